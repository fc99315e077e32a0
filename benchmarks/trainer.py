"""What FusionTrainer costs, what the articles' way of feeding a model costs, and what schedulers change.

    python benchmarks/trainer.py [--quick] [--only PART] [--json FILE | --out DIR]

Three parts, on generated scenes. `overhead`: loops by hand, ours and other projects', step by step in turns, on one
core. `articles`: fixed batches of 32, texts padded to 512, images squashed to 224 x 224, loaded in the training
process, beside our batches. `convergence`: every scheduler on the same samples, with several seeds. Every repetition
is kept. Peers take part where they are installed: accelerate, lightning. A verdict on a scheduler compares the mean
over its seeds with that of `random`; the noise is the standard deviation between seeds, pooled over all schedulers, and
differences within its 95 % interval say nothing. `--quick` trains too little to judge what is learnt.
Run it with OMP_WAIT_POLICY=PASSIVE, as `make bench` does.
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
from _articles_setting import measure_articles
from _common import add_common_options, goal, print_goals, write_results
from _trainer_loops import measure_overhead
from _trainer_tables import tables

from mmlab.comparison.experiment import compare
from mmlab.comparison.preparation import COST
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.loading.collate import collate
from mmlab.model.presets import build_model
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler, scheduler_type
from mmlab.types import Aspect, BatchShape, SampleSizes

BATCH_SIZE = 32
SIDE = 48  # of the images in `convergence`, pixels
JUDGED = ("held_out_loss", "recall")


def main() -> None:
    """Run every part, print tables and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(
        parser,
        "trainer",
        quick="under a minute; too little to judge what is learnt",
        out=", and of its part `overhead` DIR/trainer_overhead.json",
    )
    parser.add_argument("--only", choices=("overhead", "articles", "convergence"), help="one part")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        for part in ("overhead", "articles", "convergence"):
            if options.only in (None, part):
                found = PARTS[part](Path(temporary), options.quick)
                print("", *tables(found), sep="\n", flush=True)
                rows += found
    print()
    goals = judge(rows, options.quick)
    print_goals(goals)
    if options.json:
        print("wrote", write_results(options.json, rows, goals))
    elif options.out:  # overhead, which is about code alone, is measured more often than the other parts
        split = {"trainer_overhead": [row for row in rows if "step" in row]}
        split["trainer"] = [row for row in rows if "step" not in row]
        for name, found in split.items():
            if found:
                print(
                    "wrote", write_results(options.out / f"{name}.json", found, judge(found, options.quick))
                )


def overhead(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """A short step, for microseconds, and one of a length that occurs in training, for the share."""
    scenes = make_dataset(
        folder / "few",
        num_images=128,
        captions_per_image=1,
        val_fraction=0,
        max_side=256,
        num_workers=0,
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
            num_rounds=num_rounds // 10 if quick else num_rounds,
        ):
            rows.append(row | {"step": kind})
    torch.set_num_threads(num_threads)
    return rows


def articles(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Epochs in the articles' setting and in ours."""
    scenes = make_dataset(
        folder / "coco-like",
        num_images=32 if quick else 320,
        captions_per_image=2,
        max_side=640,
        progress=False,
    )
    return measure_articles(scenes.parent, folder / "caches", num_epochs=1 if quick else 3)


def convergence(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """A row a scheduler and seed: what it has learnt from the same samples; then a row a scheduler with the verdict."""
    scenes = make_dataset(
        folder / "scenes",
        num_images=60 if quick else 800,
        captions_per_image=2,
        max_side=128,
        val_fraction=0.2,
        progress=False,
    )
    dataset = MultimodalDataset(read_records(scenes.parent, progress=False), image_policy=Aspect(SIDE * SIDE))
    model = build_model("tiny", vocab_size=len(dataset.tokenizer))
    memory = fit_memory(model, device="cpu", num_held_out=0, progress=False)
    rows = []
    for seed in range(1 if quick else 3):
        comparison = compare(
            dataset.records,
            configured(dataset.sizes, memory, seed),
            epochs=1 if quick else 6,
            image=f"aspect:{SIDE}",
            num_workers=2,
            device="cpu",
            seed=seed,
            progress=False,
        )
        for arm in comparison.arms:
            recall = (arm.image_to_text_r1 + arm.text_to_image_r1) / 2
            rows.append(
                {
                    "kind": "run",
                    "scheduler": arm.scheduler,
                    "seed": seed,
                    "num_samples": arm.num_samples * comparison.config["epochs"],
                    "num_steps": sum(int(epoch["num_batches"]) for epoch in arm.epochs),
                    "held_out_loss": arm.final_loss,
                    "recall": recall,
                    "chance_recall": arm.chance_r1,
                    "epochs": arm.epochs,
                }
            )
    return rows + compare_means(rows)


PARTS = {"overhead": overhead, "articles": articles, "convergence": convergence}


def configured(sizes: SampleSizes, memory: MemoryModel, seed: int) -> dict[str, Scheduler]:
    """Every scheduler, with batches of about `BATCH_SIZE` average samples."""
    average = BatchShape(
        BATCH_SIZE, *(round(float(column.mean())) for column in (sizes.num_tokens, sizes.height, sizes.width))
    )
    options = {
        "seed": seed,
        "batch_size": BATCH_SIZE,
        "budget": BATCH_SIZE * float(batch_costs(COST, sizes.alone).mean()),
    }
    in_bytes = options | {"cost": memory, "budget": memory(average)}
    kinds = {name: scheduler_type(name) for name in SCHEDULERS if name != "fastest"}
    return {
        name: kind(**kind.options_among(in_bytes if name == "memory" else options))
        for name, kind in kinds.items()
    }


def compare_means(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of every scheduler, and how each differs from `random`."""
    names = list(dict.fromkeys(run["scheduler"] for run in runs))
    by_name = {name: [run for run in runs if run["scheduler"] == name] for name in names}
    rows: list[dict[str, Any]] = [
        {
            "kind": "verdict",
            "scheduler": name,
            "num_steps": np.mean([run["num_steps"] for run in by_name[name]]),
        }
        for name in names
    ]
    for key in JUDGED:
        values = np.array([[run[key] for run in by_name[name]] for name in names])  # (schedulers, seeds)
        num_seeds = values.shape[1]
        spread = values.std(1, ddof=1) if num_seeds > 1 else np.full(len(names), np.nan)
        noise = float(np.sqrt((spread**2).mean()) * np.sqrt(2 / num_seeds) * T_95)
        differences = values.mean(1) - values.mean(1)[names.index("random")]
        worse = differences if key == "held_out_loss" else -differences
        for row, mean, sd, difference, much_worse in zip(
            rows, values.mean(1), spread, differences, worse, strict=True
        ):
            same = abs(difference) <= noise
            row |= {
                key: float(mean),
                f"{key}_sd": float(sd),
                f"{key}_difference": float(difference),
                f"{key}_noise": noise,
                f"{key}_verdict": "not judged"
                if num_seeds < 2
                else "same"
                if same
                else "worse"
                if much_worse > 0
                else "better",
            }
    return rows


T_95 = 2.12  # Student's t, two-sided 95 %, at 16 degrees of freedom: eight schedulers, three seeds


def judge(rows: Sequence[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
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
    for name in ("budget", "packed") if arms else ():
        saved = 1 - arms[name]["all_epochs_s"] / arms["articles"]["all_epochs_s"]
        goals.append(goal(f"{name}: time saved against the articles' setting", ">= 0.5", saved, saved >= 0.5))
    verdicts = [row for row in rows if row["kind"] == "verdict"]
    for key in JUDGED if verdicts and not quick else ():
        worse = [row["scheduler"] for row in verdicts if row[f"{key}_verdict"] == "worse"]
        found = ", ".join(worse) or "none"
        goals.append(goal(f"schedulers that learn worse than random: {key}", "none", found, not worse))
    return goals


if __name__ == "__main__":
    main()
