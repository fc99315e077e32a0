"""Does a plan that saves time cost learning? Schedulers beside `random`, paired by seed.

    python benchmarks/learning.py [--quick] [--seeds N] [--json FILE | --out DIR]

Generated scenes, preset `tiny`. Every arm starts from the same weights and is judged on the same held-out images, by
its loss and by R@1 (mean of both directions). Runs of one seed are paired: a row gives the mean difference from `random`
over the seeds and its 95 % interval (Student's t). Every arm is trained twice: on equal samples, and for as many
optimizer steps as `random` takes. Samples are decoded once beforehand, so seconds mean nothing here; what is learnt does
not depend on the load of the machine.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, print_goals, write_if_asked
from tqdm.auto import tqdm

from mmlab.comparison.preparation import COST, held_out_loader, make_datasets, make_model
from mmlab.data.synthetic import make_dataset
from mmlab.loading.collate import collate
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import MaxPolynomial, batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Batch, SampleSizes

BATCH_SIZE = 32
SIDE = 48  # of the images, pixels
NUM_EPOCHS = 6
LR = 1e-3
POINT = 0.01  # of R@1 that the interval of the recommended scheduler may reach below `random`
# Student's t, two-sided 95 %, by the number of pairs
T_95 = {2: 12.71, 4: 3.182, 8: 2.365, 12: 2.201, 16: 2.131}
# seconds of a step of `tiny` on two cores: as much for the step itself as for 600 padded tokens
SECONDS = MaxPolynomial([[600.0, 1.0, 1.0]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="seconds")


@dataclass(frozen=True)
class Arm:
    """One way to form batches and to train on them."""

    scheduler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale_lr: bool = False  # by the square root of the mean batch size over that of `random`


ARMS = {
    "random": Arm("random"),
    "random, captions of an image apart": Arm("random", {"allow_collisions": False}),
    "bucket": Arm("bucket"),
    "budget": Arm("budget"),
    "budget, window of 256": Arm("budget", {"window": 256}),
    "fastest": Arm("fastest"),
    "fastest, learning rate scaled": Arm("fastest", scale_lr=True),
}


def main() -> None:
    """Train every arm with every seed, print the table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "learning", quick="under a minute; too little to judge what is learnt")
    parser.add_argument("--seeds", type=int, default=8, choices=sorted(T_95), help="runs of every arm")
    options = parser.parse_args()
    num_seeds = 2 if options.quick else options.seeds
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        scenes = make_dataset(
            Path(temporary) / "scenes",
            num_images=60 if options.quick else 800,
            captions_per_image=2,
            max_side=128,
            val_fraction=0.25,
            progress=False,
        )
        study = Study(scenes.parent, num_epochs=1 if options.quick else NUM_EPOCHS)
        for seed in tqdm(range(num_seeds), desc="seeds"):
            rows += study.run(seed)
    rows += compared(rows)
    print(table(rows))
    goals = judge(rows, options.quick)
    print_goals(goals)
    write_if_asked(options, "learning", rows, goals)


class Study:
    """Decoded samples, and runs on them."""

    def __init__(self, data: Path, *, num_epochs: int) -> None:
        self.train_set, held_out = make_datasets(data, image=f"aspect:{SIDE}", progress=False)
        self.samples = [self.train_set[row] for row in tqdm(range(len(self.train_set)), desc="decoding")]
        self.held_out = held_out_loader(held_out)
        self.num_epochs = num_epochs
        self.sizes: SampleSizes = self.train_set.sizes

    def run(self, seed: int) -> list[dict[str, Any]]:
        """A row an arm and a measure of equal effort."""
        num_steps = self._steps_of_epochs(self._scheduler(ARMS["random"], seed))
        rows = []
        for name, arm in ARMS.items():
            scheduler = self._scheduler(arm, seed)
            own_steps = self._steps_of_epochs(scheduler)
            for equal, steps in (("samples", own_steps), ("steps", num_steps)):
                if rows and equal == "steps" and own_steps == num_steps:
                    found = {
                        key: rows[-1][key] for key in ("held_out_loss", "recall", "num_steps", "num_samples")
                    }
                else:
                    found = self._train(arm, scheduler, seed, steps, num_steps / own_steps)
                rows.append({"kind": "run", "arm": name, "equal": equal, "seed": seed, **found})
        return rows

    def _scheduler(self, arm: Arm, seed: int) -> Scheduler:
        budget = BATCH_SIZE * float(batch_costs(COST, self.sizes.alone).mean())
        options: dict[str, Any] = {"seed": seed, **arm.options}
        if arm.scheduler in ("random", "bucket"):
            options["batch_size"] = BATCH_SIZE
        else:  # what a random batch costs at most, as on equal memory
            options["budget"] = 1.6 * budget
        if arm.scheduler == "fastest":
            options["time"] = SECONDS
        return make_scheduler(arm.scheduler, **options)

    def _steps_of_epochs(self, scheduler: Scheduler) -> int:
        return sum(len(scheduler.plan(self.sizes, epoch=epoch)) for epoch in range(self.num_epochs))

    def _train(
        self, arm: Arm, scheduler: Scheduler, seed: int, num_steps: int, batch_ratio: float
    ) -> dict[str, Any]:
        model = make_model({"preset": "tiny"}, vocab_size=len(self.train_set.tokenizer), seed=seed)
        trainer = FusionTrainer(
            model,
            device="cpu",
            lr=LR * (batch_ratio**0.5 if arm.scale_lr else 1.0),
            total_steps=num_steps,
            objectives={"contrastive": Contrastive(num_negatives=BATCH_SIZE - 1)},
            seed=seed,
        )
        num_samples = 0
        for batch in islice(self._batches(scheduler), num_steps):
            trainer.train_step([batch])
            num_samples += len(batch)
        found = trainer.evaluate(self.held_out)
        return {
            "held_out_loss": found["loss"],
            "recall": (found["image_to_text_r1"] + found["text_to_image_r1"]) / 2,
            "num_steps": num_steps,
            "num_samples": num_samples,
        }

    def _batches(self, scheduler: Scheduler) -> Iterator[Batch]:
        for epoch in count():
            for batch in scheduler.plan(self.sizes, epoch=epoch):
                yield collate([self.samples[row] for row in batch])


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every arm the mean difference from `random`, seed by seed, and half of its 95 % interval."""
    found = []
    for equal in ("samples", "steps"):
        for arm in ARMS:
            row: dict[str, Any] = {"kind": "paired", "arm": arm, "equal": equal}
            for key in ("held_out_loss", "recall"):
                own, base = (
                    np.array([run[key] for run in rows if (run["arm"], run["equal"]) == (name, equal)])
                    for name in (arm, "random")
                )
                difference = own - base
                spread = difference.std(ddof=1) / len(own) ** 0.5
                row[key] = float(own.mean())
                row[f"{key}_difference"] = float(difference.mean())
                row[f"{key}_interval"] = float(T_95[len(own)] * spread)
            mine = [run for run in rows if (run["arm"], run["equal"]) == (arm, equal)]
            row["num_steps"] = float(np.mean([run["num_steps"] for run in mine]))
            found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The paired rows."""
    lines = [
        f"{'equal':<8} {'arm':<38} {'steps':>6} {'loss':>7} {'difference':>17} {'R@1':>7} {'difference':>17}"
    ]
    for row in rows:
        if row["kind"] == "paired":
            loss = f"{row['held_out_loss_difference']:+.3f} +- {row['held_out_loss_interval']:.3f}"
            recall = f"{row['recall_difference']:+.3f} +- {row['recall_interval']:.3f}"
            lines.append(
                f"{row['equal']:<8} {row['arm']:<38} {row['num_steps']:>6.0f} {row['held_out_loss']:>7.3f} {loss:>17} "
                f"{row['recall']:>7.3f} {recall:>17}"
            )
    return "\n".join(lines)


def judge(rows: list[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    """The recommended scheduler is not worse than `random` by more than a point of R@1."""
    goals = []
    for row in rows:
        if row["kind"] == "paired" and row["arm"] == "fastest" and not quick:
            lowest = row["recall_difference"] - row["recall_interval"]
            goals.append(
                goal(
                    f"fastest beside random, equal {row['equal']}: lower end of the paired interval of R@1",
                    f">= {-POINT:g}",
                    lowest,
                    lowest >= -POINT,
                )
            )
    return goals


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
