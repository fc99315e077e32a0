"""`fastest` beside other schedulers at one predicted peak memory, epoch for epoch; and how long it plans.

Like is compared with like: schedulers that keep captions of one image apart with each other, and those that let them
meet in a batch with each other. `random` is as everybody has it, so it lets them meet.

Samples lie in memory before the clock starts and are collated in the training thread, so that what is compared is the
batches alone. Generated scenes are real images; on the COCO lengths and the wide mix pixels and tokens are noise of the
data's sizes. Seconds are for as many samples as the data have, of which the loss learns something.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import COCO_LENGTHS, goal, paired
from schedulers import in_own_process, wide_sizes
from torch import nn

from mmlab.data.collate import Sample, collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.model.presets import build_model
from mmlab.pricing.equal_memory import largest_fitting
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.timing import fit_time
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.preview import read_lengths
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.noise import noise_sample
from mmlab.types import Aspect, SampleSizes

SIDE = 80  # of images, pixels
VOCAB_SIZE = 1000  # of noise
BATCH_SIZE = 32  # of `random`, whose predicted peak is the limit of all
TOGETHER = " with collisions"  # of an arm's name: captions of one image may meet in a batch
ARMS = tuple(name + rule for name in ("sorted", "bucket", "budget", "fastest") for rule in ("", TOGETHER))
NUM_SAMPLES = {"tiny": 3000, "small": 300}  # of five captions an image
NUM_ROUNDS = {"tiny": 4, "small": 4}  # in each of which every arm trains an epoch
NUM_TURNS = 4  # that an epoch is cut into, so that a machine that becomes slower does so for all arms
NUM_WARM_UP = 4  # steps of each arm that are not measured
OVER_RANDOM, OVER_OTHERS, LOWER_END = 1.4, 1.0, 0.97
APART_OVER_TOGETHER = 0.95  # what keeping captions of one image apart may cost
NUM_IMAGES = (60, 200, 1000, 5000)  # of five captions each, for which that is predicted
TEN_MILLION, PLANNING_S, FIRST_BATCH_MS = 10_000_000, 15.0, 60.0


def arms(quick: bool) -> Iterator[dict[str, Any]]:
    """A row for every data set, model and scheduler."""
    for model_name in ("tiny",) if quick else NUM_SAMPLES:
        num_samples = 100 if quick else NUM_SAMPLES[model_name]
        torch.manual_seed(0)
        model = build_model(model_name, vocab_size=VOCAB_SIZE)
        memory = fit_memory(model, num_held_out=0, progress=False, device="cpu")
        with TemporaryDirectory() as temporary:
            for data, samples, sizes in islice(data_sets(Path(temporary), num_samples), 1 if quick else None):
                num_rounds = 2 if quick else NUM_ROUNDS[model_name]
                for row in compared(
                    model, memory, samples, sizes, num_rounds=num_rounds, fit_s=3 if quick else 20
                ):
                    yield {
                        "kind": "arms",
                        "data": data,
                        "model": model_name,
                        "num_samples": len(sizes),
                        **row,
                    }


def data_sets(folder: Path, num_samples: int) -> Iterator[tuple[str, list[Sample], SampleSizes]]:
    """Name, decoded samples and their sizes."""
    scenes = make_dataset(
        folder / "scenes",
        num_images=num_samples // 5,
        val_fraction=0,
        max_side=160,
        progress=False,
    )
    dataset = MultimodalDataset(read_records(scenes, progress=False), image_policy=Aspect(SIDE**2))
    yield "scenes", [dataset[row] for row in range(len(dataset))], dataset.sizes
    lengths = {"COCO lengths": read_lengths(COCO_LENGTHS), "wide mix": wide_sizes(num_samples)}
    for name, original in lengths.items():
        sizes = original.take(np.arange(num_samples)).resized(Aspect(SIDE**2))
        yield name, noise(sizes), sizes


def noise(sizes: SampleSizes) -> list[Sample]:
    """Samples of these sizes."""
    generator = torch.Generator().manual_seed(0)
    columns = (column.tolist() for column in (sizes.group, sizes.num_tokens, sizes.height, sizes.width))
    return [
        noise_sample(group, (tokens, height, width), num_ids=VOCAB_SIZE, generator=generator)
        for group, tokens, height, width in zip(*columns, strict=True)
    ]


def compared(
    model: nn.Module,
    memory: MemoryModel,
    samples: list[Sample],
    sizes: SampleSizes,
    *,
    num_rounds: int,
    fit_s: float,
) -> list[dict[str, Any]]:
    """Epochs of every scheduler, a part of each in turns, in another order each time."""
    epochs = range(1, 1 + num_rounds)
    baseline = make_scheduler("random", batch_size=BATCH_SIZE)
    limit = peak_bytes(baseline, memory, sizes, epochs)
    fitted = fit_time(model, sizes, cost=memory, budget=limit, device="cpu", seconds=fit_s, progress=False)
    schedulers = {"random": baseline}
    for arm in ARMS:
        name, allowed = arm.removesuffix(TOGETHER), arm.endswith(TOGETHER)
        if name == "fastest":
            schedulers[arm] = make_scheduler(
                name, cost=memory, budget=limit, time=fitted, allow_collisions=allowed
            )
        else:
            schedulers[arm] = largest_scheduler(name, memory, limit, sizes, epochs, allow_collisions=allowed)
    trainer = FusionTrainer(model, device="cpu", lr=1e-4, total_steps=10**6)
    measured: dict[str, list[float]] = {name: [] for name in schedulers}
    rng = np.random.default_rng(0)

    def train(batches: list[list[int]]) -> float:
        started = time.perf_counter()
        for rows in batches:
            trainer.train_step([collate([samples[row] for row in rows])])
        return time.perf_counter() - started

    for scheduler in schedulers.values():
        train(list(scheduler.plan(sizes, epoch=0))[:NUM_WARM_UP])
    for epoch in epochs:
        plans = {name: list(scheduler.plan(sizes, epoch=epoch)) for name, scheduler in schedulers.items()}
        taken_s = dict.fromkeys(plans, 0.0)
        for turn in range(NUM_TURNS):
            for name in rng.permutation(list(plans)).tolist():
                start, stop = (len(plans[name]) * place // NUM_TURNS for place in (turn, turn + 1))
                taken_s[name] += train(plans[name][start:stop])
        for name, batches in plans.items():  # a contrastive loss learns nothing from a batch of one sample
            num_learnt = sum(len(rows) for rows in batches if len(rows) > 1)
            measured[name].append(taken_s[name] * len(sizes) / num_learnt if num_learnt else np.inf)
    rows = []
    for name, all_s in measured.items():
        plan = schedulers[name].plan(sizes, epoch=1)
        rows.append(
            {
                "scheduler": name,
                "batch_size": getattr(schedulers[name], "batch_size", None),
                "budget": getattr(schedulers[name], "budget", None),
                "num_batches": len(plan),
                "limit_bytes": limit,
                "peak_over_limit": peak_bytes(schedulers[name], memory, sizes, epochs) / limit,
                "combined_waste": plan.report().combined_waste,
                "collision_ratio": plan.report().collision_ratio,
                "predicted_s": fitted.epoch_s(plan),
                "measured_s": median(all_s),
                "samples_per_s": len(sizes) / median(all_s),
                "spread_ratio": fitted.spread_ratio,
                "all_measured_s": all_s,
            }
        )
    return rows


def largest_scheduler(
    name: str, memory: MemoryModel, limit: float, sizes: SampleSizes, epochs: range, *, allow_collisions: bool
) -> Scheduler:
    """The scheduler with the most samples, or padded tokens, a batch that the limit allows in every epoch."""
    tokens = batch_costs(PaddedTokens(), sizes.alone)
    is_budget = name == "budget"

    def made(size: int) -> Scheduler:
        option = "budget" if is_budget else "batch_size"
        return make_scheduler(name, allow_collisions=allow_collisions, **{option: size})

    first = int(tokens.max()) if is_budget else BATCH_SIZE
    most = int(tokens.sum()) if is_budget else len(sizes)
    return made(
        largest_fitting(
            lambda size: peak_bytes(made(size), memory, sizes, epochs) <= limit, first=first, most=most
        )
    )


def peak_bytes(scheduler: Scheduler, memory: MemoryModel, sizes: SampleSizes, epochs: range) -> float:
    """The most that a batch of these epochs is predicted to need."""
    plans = (scheduler.plan(sizes, epoch=epoch) for epoch in epochs)
    return max(float(batch_costs(memory, plan.shape_columns).max()) for plan in plans)


def apart(quick: bool) -> Iterator[dict[str, Any]]:
    """Predicted seconds of an epoch of `fastest` on COCO's lengths, with captions of one image apart and together."""
    original = read_lengths(COCO_LENGTHS)
    for model_name in ("tiny",) if quick else NUM_SAMPLES:
        torch.manual_seed(0)
        model = build_model(model_name, vocab_size=VOCAB_SIZE)
        memory = fit_memory(model, num_held_out=0, progress=False, device="cpu")
        cases = {}  # sizes, and what bounds the batches
        for num_images in NUM_IMAGES:
            sizes = original.take(np.arange(5 * num_images)).resized(Aspect(SIDE**2))
            limit = peak_bytes(make_scheduler("random", batch_size=BATCH_SIZE), memory, sizes, range(1, 3))
            cases[num_images] = sizes, {"cost": memory, "budget": limit}
        sizes, options = cases[NUM_IMAGES[0]]
        seconds = 3 if quick else 20
        fitted = fit_time(model, sizes, device="cpu", seconds=seconds, progress=False, **options)
        for num_images, (sizes, options) in cases.items():
            found = {}
            for rule, allowed in (("apart", False), ("together", True)):
                planner = make_scheduler("fastest", time=fitted, allow_collisions=allowed, **options)
                found[f"{rule}_s"] = fitted.epoch_s(planner.plan(sizes, epoch=1))
            yield {"kind": "apart", "model": model_name, "num_images": num_images, **found}


def planning(quick: bool) -> Iterator[dict[str, Any]]:
    """CPU seconds of planning ten million samples with `fastest`, and wall milliseconds to its first batch."""
    row = in_own_process("fastest", 200_000 if quick else TEN_MILLION, repeats=1 if quick else 2)
    yield {**row, "kind": "planning"}


def judge_arms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`fastest` against `random`, against the others under the same rule, and against itself without the rule."""
    goals = []
    of_arms = [row for row in rows if row["kind"] == "arms"]
    for model, data in dict.fromkeys((row["model"], row["data"]) for row in of_arms):
        times = {
            row["scheduler"]: row["all_measured_s"]
            for row in of_arms
            if (row["model"], row["data"]) == (model, data)
        }
        for name in times:
            ours = "fastest" + (TOGETHER if name.endswith(TOGETHER) else "")
            if name == ours:
                continue
            ratio, lower = paired(times[ours], times[name])
            bound, least = (OVER_RANDOM, 0.0) if name == "random" else (OVER_OTHERS, LOWER_END)
            text = f">= {bound:g}" + (f", interval from {least:g}" if least else "")
            measured = f"{ratio:.3f}, interval from {lower:.3f}"
            met = ratio >= bound and lower >= least
            goals.append(goal(f"{model}, {data}: samples/s of {ours} over {name}", text, measured, met))
        ratio, lower = paired(times["fastest"], times["fastest" + TOGETHER])
        measured = f"{ratio:.3f}, interval from {lower:.3f}"
        goals.append(
            goal(
                f"{model}, {data}: samples/s of fastest, captions apart over together",
                f">= {APART_OVER_TOGETHER:g}", measured, ratio >= APART_OVER_TOGETHER,
            )
        )  # fmt: skip
    for row in (row for row in rows if row["kind"] == "apart" and row["num_images"] == NUM_IMAGES[-1]):
        ratio = row["together_s"] / row["apart_s"]
        name = f"{row['model']}, {row['num_images']:,} images: predicted speed of fastest, captions apart over together"
        goals.append(goal(name, f">= {APART_OVER_TOGETHER:g}", ratio, ratio >= APART_OVER_TOGETHER))
    for row in (row for row in rows if row["kind"] == "planning"):
        number, bound = row["num_samples"], PLANNING_S * row["num_samples"] / TEN_MILLION
        cpu_s, first_ms = median(row["epoch_cpu_s"]), median(row["first_batch_ms"])
        goals.append(goal(f"fastest plans {number:,} samples, CPU s", f"<= {bound:g}", cpu_s, cpu_s <= bound))
        goals.append(
            goal(
                f"fastest's first batch of {number:,}, ms",
                f"<= {FIRST_BATCH_MS:g}",
                first_ms,
                first_ms <= FIRST_BATCH_MS,
            )
        )
    return goals
