"""Does a plan that saves time cost learning? Ways to form batches beside `random`, paired by seed.

    python benchmarks/learning.py [--quick] [--seeds N] [--json FILE | --out DIR]

Generated scenes, preset `tiny`. Every arm starts from the same weights and is judged on the same held-out images, by
its loss and by R@1 (mean of both directions) among 200 images at a time. Runs of one seed are paired: a row gives the
mean difference from `random` over the seeds and its 95 % interval (Student's t). Arms that look for causes are trained
with a third of the seeds. Every arm is trained until it has seen as many samples as `random`, until it has taken as many
optimizer steps, and until it has taken as many seconds, as a fixed time model predicts them: samples are decoded once
beforehand and no clock is read, so what is found does not depend on the load of the machine.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _articles_setting import Accelerator
from _common import T_95, add_common_options, goal, print_goals, write_if_asked
from tqdm.auto import tqdm

from mmlab.comparison.options import DataOptions
from mmlab.comparison.preparation import COST, make_datasets
from mmlab.data.collate import collate
from mmlab.data.synthetic import make_dataset
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import MaxPolynomial, batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import SampleSizes

BATCH_SIZE = 32
SIDE = 48  # of the images, pixels
NUM_EPOCHS = 6
LR = 1e-3
POINT = 0.01  # of R@1 that the interval of the recommended scheduler may reach below `random`
POOL = 200  # held-out images among which R@1 is measured; the mean over several pools is less noisy than one
# seconds of a step of `tiny` on two cores: as much for the step itself as for 600 padded tokens
SECONDS = MaxPolynomial([[600.0, 1.0, 1.0]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="seconds")


@dataclass(frozen=True)
class Arm:
    """One way to form batches and to train on them."""

    scheduler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = BATCH_SIZE  # of `random`
    scale_lr: bool = False  # by the square root of the mean batch size over that of `random`
    image: str = f"aspect:{SIDE}"
    beside: str = "random"  # the arm that it is compared with
    is_question: bool = False  # whether the goals ask for it; the others look for causes, with fewer seeds


ARMS = {
    "random": Arm("random", is_question=True),
    "fastest": Arm("fastest", is_question=True),
    "random, captions of an image apart": Arm("random", {"allow_collisions": False}),
    "random, batches of 44": Arm("random", batch_size=44),
    "fastest, learning rate scaled": Arm("fastest", scale_lr=True),
    "random, square images": Arm("random", image=f"square:{SIDE}"),
    "fastest, square images": Arm("fastest", image=f"square:{SIDE}", beside="random, square images"),
}


def main() -> None:
    """Train every arm with every seed, print the table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "learning", quick="under a minute; too little to judge what is learnt")
    parser.add_argument("--seeds", type=int, default=12, choices=sorted(T_95), help="runs of every arm")
    options = parser.parse_args()
    num_seeds = 2 if options.quick else options.seeds
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary:
        scenes = make_dataset(
            Path(temporary) / "scenes",
            num_images=60 if options.quick else 2200,
            captions_per_image=2,
            max_side=128,
            val_fraction=0.25 if options.quick else 8 / 11,
            progress=False,
        )
        study = Study(scenes.parent, num_epochs=1 if options.quick else NUM_EPOCHS)
        runs = [(seed, True) for seed in range(num_seeds)] + [
            (seed, False) for seed in range(max(2, num_seeds // 3))
        ]
        for seed, is_question in tqdm(runs, desc="seeds"):
            rows += study.run(seed, is_question)
            if seed:  # a study that is stopped keeps what is done
                found = compared(rows)
                goals = judge(found, options.quick)
                write_if_asked(options, "learning", rows + found, goals)
    print(table(found))
    print_goals(goals)


class Samples:
    """The decoded samples of one image policy: those to train on, and the held-out batches, pool by pool."""

    def __init__(self, data: Path, image: str) -> None:
        train_set, held_out = make_datasets(data, DataOptions(path=str(data), image=image), progress=False)
        self.sizes: SampleSizes = train_set.sizes
        self.vocab_size = len(train_set.tokenizer)
        self.train = [train_set[row] for row in tqdm(range(len(train_set)), desc=f"decoding {image}")]
        pool = np.unique(held_out.records.group, return_inverse=True)[1] // POOL
        judged = [held_out[row] for row in tqdm(range(len(held_out)), desc=f"decoding {image}, held out")]
        order = np.argsort(held_out.sizes.height / held_out.sizes.width, kind="stable")
        rows_of_pools = [order[pool[order] == number] for number in range(pool.max() + 1)]
        self.pools = [
            [
                collate([judged[row] for row in rows[start : start + BATCH_SIZE]])
                for start in range(0, len(rows), BATCH_SIZE)
            ]
            for rows in rows_of_pools
        ]


class Study:
    """Runs of every arm on the same samples."""

    def __init__(self, data: Path, *, num_epochs: int) -> None:
        self.samples = {image: Samples(data, image) for image in {arm.image for arm in ARMS.values()}}
        self.num_epochs = num_epochs

    def run(self, seed: int, is_question: bool) -> list[dict[str, Any]]:
        """A row an arm and a measure of equal effort."""
        rows = []
        for name, arm in ((name, arm) for name, arm in ARMS.items() if arm.is_question == is_question):
            samples, scheduler = (
                self.samples[arm.image],
                scheduler_of(arm, self.samples[arm.image].sizes, seed),
            )
            seconds = step_seconds(scheduler, samples.sizes)
            base = ARMS[arm.beside]
            own_steps, num_steps = (
                sum(len(of.plan(samples.sizes, epoch=epoch)) for epoch in range(self.num_epochs))
                for of in (scheduler, scheduler_of(base, samples.sizes, seed))
            )
            time = sum(
                islice(step_seconds(scheduler_of(base, samples.sizes, seed), samples.sizes), num_steps)
            )
            steps = {
                "samples": own_steps,
                "steps": num_steps,
                "seconds": sum(
                    1 for spent in accumulate(islice(seconds, 4 * num_steps)) if spent <= 1.0001 * time
                ),
            }
            found: dict[int, dict[str, Any]] = {}
            for equal, length in steps.items():
                if length not in found:
                    found[length] = train(arm, samples, scheduler, seed, length, num_steps / own_steps)
                rows.append({"kind": "run", "arm": name, "equal": equal, "seed": seed, **found[length]})
        return rows


def scheduler_of(arm: Arm, sizes: SampleSizes, seed: int) -> Scheduler:
    """The arm's scheduler; a budget is what a costly random batch costs, as at equal memory."""
    options: dict[str, Any] = {"seed": seed, **arm.options}
    if arm.scheduler == "random":
        options["batch_size"] = arm.batch_size
    else:
        budget = 1.6 * BATCH_SIZE * float(batch_costs(COST, sizes.alone).mean())
        options |= {"budget": budget, "time": SECONDS}
    return make_scheduler(arm.scheduler, **options)


def step_seconds(scheduler: Scheduler, sizes: SampleSizes) -> Iterator[float]:
    """Predicted time of one step after the other, over endless epochs; in units of a padded token's."""
    for epoch in count():
        yield from scheduler.plan(sizes, epoch=epoch).costs(SECONDS).tolist()


def train(
    arm: Arm, samples: Samples, scheduler: Scheduler, seed: int, num_steps: int, batch_ratio: float
) -> dict[str, Any]:
    """Train one model for so many steps, and judge it."""
    model = Accelerator().build(samples.vocab_size, seed)
    trainer = FusionTrainer(
        model,
        device="cpu",
        lr=LR * (batch_ratio**0.5 if arm.scale_lr else 1.0),
        total_steps=num_steps,
        objectives={"contrastive": Contrastive(num_negatives=BATCH_SIZE - 1)},
        seed=seed,
    )
    num_samples = 0
    batches = (rows for epoch in count() for rows in scheduler.plan(samples.sizes, epoch=epoch))
    for rows in islice(batches, num_steps):
        trainer.train_step([collate([samples.train[row] for row in rows])])
        num_samples += len(rows)
    found = [trainer.evaluate(pool) for pool in samples.pools]
    return {
        "held_out_loss": float(np.mean([pool["loss"] for pool in found])),
        "recall": float(np.mean([[pool["image_to_text_r1"], pool["text_to_image_r1"]] for pool in found])),
        "num_steps": num_steps,
        "num_samples": num_samples,
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every arm the mean difference from `random` on the same images, seed by seed, and half of its 95 % interval."""
    runs = {(run["equal"], run["arm"], run["seed"]): run for run in rows}
    found = []
    for equal, name in dict.fromkeys((run["equal"], run["arm"]) for run in rows):
        own = {seed: run for (*arm, seed), run in runs.items() if arm == [equal, name]}
        pairs = [
            (run, base) for seed, run in own.items() if (base := runs.get((equal, ARMS[name].beside, seed)))
        ]
        if len(pairs) < 2:
            continue
        row: dict[str, Any] = {"kind": "paired", "arm": name, "equal": equal, "num_seeds": len(pairs)}
        row["num_steps"] = float(np.mean([run["num_steps"] for run, _ in pairs]))
        for key in ("held_out_loss", "recall"):
            difference = np.array([run[key] - base[key] for run, base in pairs])
            row[key] = float(np.mean([run[key] for run, _ in pairs]))
            row[f"{key}_difference"] = float(difference.mean())
            row[f"{key}_interval"] = float(T_95[len(pairs)] * difference.std(ddof=1) / len(pairs) ** 0.5)
        found.append(row)
    return sorted(found, key=lambda row: ("samples", "steps", "seconds").index(row["equal"]))


def table(rows: list[dict[str, Any]]) -> str:
    """The paired rows."""
    lines = [
        f"{'equal':<8} {'arm':<38} {'seeds':>5} {'steps':>5} {'loss':>7} {'difference':>17} {'R@1':>7} {'difference':>17}"
    ]
    for row in rows:
        if row["kind"] == "paired":
            loss = f"{row['held_out_loss_difference']:+.3f} +- {row['held_out_loss_interval']:.3f}"
            recall = f"{row['recall_difference']:+.3f} +- {row['recall_interval']:.3f}"
            lines.append(
                f"{row['equal']:<8} {row['arm']:<38} {row['num_seeds']:>5} {row['num_steps']:>5.0f} "
                f"{row['held_out_loss']:>7.3f} {loss:>17} "
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
