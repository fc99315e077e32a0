"""What FusionTrainer costs, and what the articles' way of feeding a model costs beside today's usual one and mmlab's.

    python benchmarks/trainer.py [--quick] [--only PART] [--json FILE | --out DIR]

Two parts, on generated scenes. `overhead`: loops by hand, ours and other projects', step by step in turns, on one
core. `articles`: twelve settings of the same training, from the articles' own (32 samples, texts padded to 512, images
squashed to 224 x 224, loaded in the training process) over what everyone does today (a worker, texts padded to the
longest of the batch) to mmlab. They take turns epoch by epoch; every repetition is kept. Batches fit the predicted peak
memory of today's setting; those with texts of 512 keep the articles' 32 samples and need more. Peers take part where
they are installed: accelerate, lightning. What is learnt is the business of `learning.py`.
`--out`, without `--quick`, also writes the tables of docs/internals/training_measured.md and docs/articles.md, and docs/images/trainer.png.
Run it with OMP_WAIT_POLICY=PASSIVE and GOMP_SPINCOUNT=10000, as `make bench` does.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _articles_setting import BEFORE, MMLAB, TODAY, Accelerator, measure_articles
from _common import add_common_options, goal, print_goals, write_results
from _trainer_loops import measure_overhead
from _trainer_tables import computing, document, epoch_s, tables

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect


def main() -> None:
    """Run every part, print tables and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(
        parser,
        "trainer",
        quick="under a minute; too short to judge by",
        out=", of its part `overhead` DIR/trainer_overhead.json, and the documentation's tables and figure",
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with TemporaryDirectory() as temporary:
        for name, (part, measure) in {
            "trainer_overhead": ("overhead", overhead),
            "trainer": ("articles", articles),
        }.items():
            if options.only in (None, part):
                found[name] = measure(Path(temporary), options.quick)
                print("", *tables(found[name]).values(), sep="\n\n", flush=True)
    rows = [row for part in found.values() for row in part]
    print()
    print_goals(judge(rows))
    if options.json:
        print("wrote", write_results(options.json, rows, judge(rows)))
    elif options.out:  # overhead, which is about code alone, is measured more often than the other part
        for name, part in found.items():
            print("wrote", write_results(options.out / f"{name}.json", part, judge(part)))
        if not options.quick:
            document(rows)


def overhead(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """A short step, for microseconds, and one of a length that occurs in training, for the share."""
    scenes = make_dataset(
        folder / "few",
        num_images=128,
        captions_per_image=1,
        val_fraction=0,
        max_side=256,
        progress=False,
    )
    num_threads, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for kind, side, batch_size, num_rounds in (("short step", 64, 8, 50), ("long step", 224, 16, 15)):
        dataset = MultimodalDataset(read_records(scenes, progress=False), image_policy=Aspect(side * side))
        plan = list(make_scheduler("bucket", batch_size=batch_size).plan(dataset.sizes))
        batches = [collate([dataset[index] for index in batch]) for batch in plan[: 2 if quick else 8]]
        for row in measure_overhead(
            batches,
            vocab_size=len(dataset.tokenizer),
            num_rounds=num_rounds // 15 if quick else num_rounds,
        ):
            rows.append(row | {"step": kind})
    torch.set_num_threads(num_threads)
    return rows


def articles(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Epochs of every setting."""
    scenes = make_dataset(
        folder / "coco-like",
        num_images=10 if quick else 144,
        captions_per_image=2,
        max_side=640,
        val_fraction=0,
        progress=False,
    )
    records = read_records(scenes.parent, progress=False)
    accelerator = Accelerator(fit_s=1.0) if quick else Accelerator()
    return measure_articles(records, folder / "caches", num_rounds=1 if quick else 3, on=accelerator)


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured."""
    goals = []
    for row in rows:
        if row["kind"] == "overhead" and row["loop"] == "FusionTrainer":
            name, ratio = f"overhead of FusionTrainer, {row['step']}", row["overhead_ratio"]
            if row["step"] == "long step":
                goals.append(goal(f"{name}, share", "<= 0.01", ratio, ratio <= 0.01))
            else:
                goals.append(goal(f"{name}, us", "<= 200", row["overhead_us"], row["overhead_us"] <= 200))
    arms = {row["arm"]: row for row in rows if row["kind"] == "articles"}
    if arms:
        saved = 1 - float(np.median(epoch_s(arms[MMLAB]) / epoch_s(arms[BEFORE])))
        goals.append(goal(f"time saved against {BEFORE}", ">= 0.35, as claimed", saved, saved >= 0.35))
        gain = float(np.median(epoch_s(arms[TODAY]) / epoch_s(arms[MMLAB]))) - 1
        goals.append(goal(f"more samples/s than {TODAY}", ">= 0.3, as claimed", gain, gain >= 0.3))
        share = float(np.median(computing(arms[MMLAB])))
        goals.append(
            goal("share of the epoch in which the step computes", ">= 0.9, as claimed", share, share >= 0.9)
        )
        for name in ("random", "bucket", "sorted", "packed"):
            ratios = epoch_s(arms[f"own shapes, {name}"]) / epoch_s(arms["own shapes, fastest"])
            least = float(ratios.min())
            goals.append(
                goal(f"speed of fastest over {name}, the worst round", ">= 0.97", least, least >= 0.97)
            )
    return goals


PARTS = ("overhead", "articles")

if __name__ == "__main__":
    main()
