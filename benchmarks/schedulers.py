"""Batch schedulers beside those of other projects: waste, balance, randomness, collisions, and how fast they plan.

    python benchmarks/schedulers.py [--quick] [--lengths FILE] [--json FILE | --out DIR]

Data: image sizes and text lengths of COCO captions (`--lengths`, a CSV or Parquet file), a generated distribution with
long-tailed texts and images of every shape, conversations whose images are tiles in the text, and the bundled sample.
Budget: 32 average samples, 8 conversations. Times are CPU times of one process; every repetition is kept. `--quick`
leaves out ten million samples and repeats less.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from _common import COCO_LENGTHS, add_common_options, goal, print_goals, write_if_asked
from _peers import PEERS, Peer, batch_size_of, lengths_of

from mmlab.schedule.base import Scheduler
from mmlab.schedule.columns import Limits
from mmlab.schedule.cost import MaxPolynomial, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.preview import read_lengths
from mmlab.schedule.report import PlanReport
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler
from mmlab.types import PATCH, Aspect, SampleSizes

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 8
MEAN_SAMPLES = 32
MEAN_CONVERSATIONS = 8  # in a pack: rows of 16 thousand tokens
SHOWN = (
    "text_waste", "image_waste", "combined_waste", "peak_over_budget", "straggler", "randomness", "collision_ratio",
    "coverage", "num_duplicates", "num_batches",
)  # fmt: skip
TIMED = ("random", "length_grouped", "budget", "fastest", "packed")
TIME = MaxPolynomial(  # a step of the preset `tiny` on two cores: seconds
    [[0.034, 0.0009, 21e-6, 21e-6]], [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)], unit="seconds"
)
BUDGETED = ("budget", "memory", "fastest", "packed")
NUM_IMAGES = 720  # with five captions each: few, for what keeping those apart costs
MEMORY = MaxPolynomial(  # two towers with attention that keeps its scores: bytes
    [[2.0e9, 4.0e4, 0.0, 9.0e4, 50.0, 30.0], [2.5e9, 6.0e4, 10.0, 7.0e4, 30.0, 60.0]],
    [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 1), (1, 0, 2), (1, 1, 1)],
    unit="bytes",
)
MEMORY_LIMIT_BYTES = 4e9


def main() -> None:
    """Run everything, print a table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "schedulers")
    parser.add_argument("--lengths", type=Path, default=COCO_LENGTHS, metavar="FILE")
    parser.add_argument("--time-one", nargs=3, metavar=("NAME", "N", "REPEATS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time_one:
        name, num_samples, repeats = options.time_one
        print(json.dumps(time_planning(name, int(num_samples), int(repeats))))
        return

    rows = []
    for data, sizes in data_sets(options.lengths, options.quick):
        mean = MEAN_CONVERSATIONS if data == "tiles" else MEAN_SAMPLES
        print(f"\n{data}: {len(sizes):,} samples, budget {mean} average ones, {NUM_RANKS} ranks")
        for row in measure_quality(data, sizes, mean, repeats=1 if options.quick else 3):
            rows.append(row)
            show(row)
        if data == "coco":
            rows.append(measure_rule(sizes))
    print("\nplanning time, one process each")
    for num_samples in (100_000, 1_000_000) if options.quick else (100_000, 1_000_000, 10_000_000):
        for name in TIMED:
            rows.append(in_own_process(name, num_samples, repeats=1 if options.quick else 3))
            show(rows[-1])
    goals = judge(rows)
    print()
    print_goals(goals)
    write_if_asked(options, "schedulers", rows, goals)


def data_sets(lengths: Path, quick: bool) -> Iterator[tuple[str, SampleSizes]]:
    """Name and sizes of each data set that is there."""
    yield "coco", read_lengths(lengths).resized(Aspect(384 * 384))
    yield "wide", wide_sizes(20_000 if quick else 100_000).resized(Aspect(384 * 384))
    yield "tiles", tiled_sizes(8_000 if quick else 20_000)
    sample = ROOT / "data/sample"
    if sample.exists():
        from mmlab.data.readers import read_records

        yield "sample", read_records(sample, progress=False).sizes(Aspect(224 * 224))


def wide_sizes(num_samples: int, seed: int = 0) -> SampleSizes:
    """Images of every size and aspect, one to five texts each, text lengths with a heavy tail to 512 tokens."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(num_samples), rng.integers(1, 6, num_samples))[:num_samples]
    aspect, area = rng.lognormal(0.1, 0.4, num_samples), rng.lognormal(12.0, 1.2, num_samples)
    height, width = np.sqrt(area / aspect), np.sqrt(area * aspect)
    return SampleSizes(
        num_tokens=np.clip(rng.lognormal(3.2, 0.9, num_samples), 3, 512).astype(np.int32),
        height=np.clip(height, 32, 4000).astype(np.int32)[image],
        width=np.clip(width, 32, 4000).astype(np.int32)[image],
        group=image,
    )


def tiled_sizes(num_samples: int, seed: int = 0) -> SampleSizes:
    """Conversations of decoder models: 1 to 13 tiles of 256 tokens in the sequence, questions and answers of 35 to 830."""
    rng = np.random.default_rng(seed)
    num_patches = 256 * rng.integers(1, 14, num_samples)
    told = np.clip(rng.lognormal(4.0, 1.2, num_samples), 5, 800).astype(np.int64) + 30
    width = np.full(num_samples, PATCH)
    groups = np.arange(num_samples)
    return SampleSizes(num_tokens=num_patches + told, height=PATCH * num_patches, width=width, group=groups)


def measure_quality(data: str, sizes: SampleSizes, mean: int, *, repeats: int) -> Iterator[dict[str, Any]]:
    """One row a scheduler and a peer at a budget of `mean` samples: the figures of its plans, and what planning cost."""
    budget = mean * float(lengths_of(sizes).mean())
    tiles = data == "tiles"  # for packs; padded, such samples do not fit what the other data sets are given
    for name in ("random", "budget", "packed") if tiles else SCHEDULERS:
        yield row_of(data, name, "mmlab", *plan_ours(configure(name, sizes, budget), sizes, repeats), budget)
    for name in () if tiles else ("random", "bucket", "aspect_bucket"):
        strict = replace(configure(name, sizes, budget), allow_collisions=False)  # type: ignore[call-arg]
        yield row_of(data, f"{name}, no collisions", "mmlab", *plan_ours(strict, sizes, repeats), budget)
    alone = replace(configure("packed", sizes, budget), world_size=1)
    yield row_of(data, "packed, one rank", "mmlab", *plan_ours(alone, sizes, repeats), budget)
    for peer in PEERS:
        if peer.installed:
            yield row_of(data, peer.name, peer.package, *plan_theirs(peer, sizes, budget, repeats), budget)
        else:
            print(f"{peer.name}: {peer.package} is not installed, left out")


def measure_rule(sizes: SampleSizes) -> dict[str, Any]:
    """Predicted seconds of `fastest` on the first images of these, captions of one image apart and allowed together."""
    few = sizes.take(np.flatnonzero(sizes.group < np.unique(sizes.group)[NUM_IMAGES]))
    options = {"time": TIME, "budget": MEAN_SAMPLES * float(lengths_of(few).mean())}
    apart_s, together_s = (
        float(make_scheduler("fastest", allow_collisions=allowed, **options).plan(few).costs(TIME).sum())
        for allowed in (False, True)
    )
    print(
        f"fastest, {NUM_IMAGES} images of five captions: {apart_s:.2f} s, {together_s:.2f} s with collisions"
    )
    return {
        "kind": "rule", "num_images": NUM_IMAGES, "num_samples": len(few), "apart_s": apart_s, "together_s": together_s,
    }  # fmt: skip


def configure(name: str, sizes: SampleSizes, budget: float) -> Scheduler:
    """A scheduler of ours for this budget."""
    if name == "memory":
        return make_scheduler(name, world_size=NUM_RANKS, cost=MEMORY, budget=MEMORY_LIMIT_BYTES)
    if name == "fastest":
        return make_scheduler(name, world_size=NUM_RANKS, time=TIME, budget=budget)
    if name in ("budget", "packed"):
        return make_scheduler(name, world_size=NUM_RANKS, budget=budget)
    return make_scheduler(name, world_size=NUM_RANKS, batch_size=batch_size_of(sizes, budget))


def plan_ours(scheduler: Scheduler, sizes: SampleSizes, repeats: int) -> tuple[list[BatchPlan], list[float]]:
    """Plans of two epochs, and CPU microseconds a sample, one a repetition; compiled beforehand."""
    len(scheduler.plan(sizes.take(np.arange(min(256, len(sizes))))))
    return timed(lambda epoch: planned(scheduler.plan(sizes, epoch=epoch)), len(sizes), repeats)


def plan_theirs(
    peer: Peer, sizes: SampleSizes, budget: float, repeats: int
) -> tuple[list[BatchPlan], list[float]]:
    """The same for a peer."""
    peer.plan(sizes.take(np.arange(min(256, len(sizes)))), budget, 0)
    batches, times = timed(lambda epoch: peer.plan(sizes, budget, epoch), len(sizes), repeats)
    plans = [BatchPlan.from_batches(epoch, sizes) for epoch in batches]
    if peer.packed:
        for plan in plans:
            plan.limits = Limits(budget=budget, streams=fullest_streams(plan))
    return plans, times


def fullest_streams(plan: BatchPlan) -> tuple[int, int]:
    """Most text tokens and most image patches of any pack: what two static streams must hold."""
    order, starts = plan.columns.order, plan.columns.starts
    text = plan.sizes.num_tokens.astype(np.int64)
    sums = [np.add.reduceat(column[order], starts) for column in (text, lengths_of(plan.sizes) - text)]
    return int(sums[0].max()), int(sums[1].max())


def timed(make: Callable[[int], Any], num_samples: int, repeats: int) -> tuple[list[Any], list[float]]:
    """What `make` gives for epochs 0 and 1, and CPU microseconds a sample of `repeats` calls."""
    made, times = [], []
    for epoch in range(max(2, repeats)):
        start_s = time.process_time()
        made.append(make(epoch))
        times.append(1e6 * (time.process_time() - start_s) / num_samples)
    return made[:2], times[:repeats]


def planned(plan: BatchPlan) -> BatchPlan:
    """The plan with all its batches made."""
    len(plan)
    return plan


def row_of(
    data: str, name: str, package: str, plans: list[BatchPlan], times: list[float], budget: float
) -> dict[str, Any]:
    """The figures of one scheduler."""
    own = name == "memory"
    report: PlanReport = plans[0].report(
        budget=None if own else budget, num_ranks=NUM_RANKS, following=plans[1]
    )
    row = {
        "kind": "quality",
        "data": data,
        "scheduler": name,
        "package": package,
        "version": version(package),
    }
    row |= {figure: getattr(report, figure) for figure in SHOWN}
    if own:
        costs = batch_costs(MEMORY, plans[0].shape_columns) / MEMORY_LIMIT_BYTES
        row |= {"mean_of_limit": float(costs.mean()), "peak_of_limit": float(costs.max())}
    if plans[0].limits.streams:
        rooms = np.array(fullest_streams(plans[0])) * report.num_batches
        text = int(plans[0].sizes.num_tokens.sum())
        held = np.array([text, int(lengths_of(plans[0].sizes).sum()) - text])
        row |= dict(
            zip(("static_text_waste", "static_image_waste"), (1 - held / rooms).tolist(), strict=True)
        )
    return row | {"plan_cpu_us_per_sample": times}


def in_own_process(name: str, num_samples: int, repeats: int) -> dict[str, Any]:
    """`time_planning` in a fresh process, whose peak memory is that of one scheduler."""
    command = [sys.executable, __file__, "--time-one", name, str(num_samples), str(repeats)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def time_planning(name: str, num_samples: int, repeats: int) -> dict[str, Any]:
    """CPU time of whole epochs, wall time to the first batch and to resume elsewhere, peak memory of planning."""
    sizes = wide_sizes(num_samples).resized(Aspect(384 * 384))
    budget = MEAN_SAMPLES * float(lengths_of(sizes.take(np.arange(min(num_samples, 100_000)))).mean())
    scheduler = configure(name, sizes.take(np.arange(1000)), budget)
    len(scheduler.plan(sizes.take(np.arange(300))))
    epochs_s, first_ms, resume_ms = [], [], []
    for epoch in range(repeats):
        start_s = time.process_time()
        num_batches = sum(1 for _ in scheduler.plan(sizes, epoch=epoch))
        epochs_s.append(time.process_time() - start_s)
    tracemalloc.start()
    for _ in scheduler.plan(sizes, epoch=repeats):
        pass
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for epoch in range(5 + 2 * repeats):
        start_s = time.perf_counter()
        iterator = iter(scheduler.plan(sizes, epoch=epoch))
        next(iterator)
        first_ms.append(1e3 * (time.perf_counter() - start_s))
        for _ in range(np.random.default_rng(epoch).integers(min(2000, num_batches - 1))):
            next(iterator)
        state = iterator.state_dict()
        start_s = time.perf_counter()
        next(iter(scheduler.resume(sizes, state, world_size=6)))
        resume_ms.append(1e3 * (time.perf_counter() - start_s))
    return {
        "kind": "time", "scheduler": name, "num_samples": num_samples, "num_batches": num_batches,
        "epoch_cpu_s": epochs_s,
        "plan_cpu_us_per_sample": [1e6 * epoch_s / num_samples for epoch_s in epochs_s],
        "first_batch_ms": first_ms, "resume_ms": resume_ms, "peak_bytes": peak_bytes,
    }  # fmt: skip


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured."""
    quality = {row["scheduler"]: row for row in rows if row["kind"] == "quality" and row["data"] == "coco"}
    goals = []

    def at_most(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f"<= {bound:g}", measured, measured <= bound))

    def at_least(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f">= {bound:g}", measured, measured >= bound))

    for row in (row for row in rows if row["kind"] == "rule"):
        at_most("predicted time that the collision rule adds", row["apart_s"] / row["together_s"] - 1, 0.05)
    if quality:
        fastest = quality["fastest"]
        at_least("fastest, COCO: randomness R", fastest["randomness"], 0.90)
        at_most("fastest, COCO: straggler over 8 ranks, predicted seconds", fastest["straggler"], 0.01)
        dense, packed, memory = quality["budget"], quality["packed"], quality["memory"]
        at_most("padded, COCO: combined waste", dense["combined_waste"], 0.005)
        at_most("padded, COCO: text waste", dense["text_waste"], 0.06)
        at_most("padded, COCO: image waste", dense["image_waste"], 0.002)
        at_least("padded, COCO: randomness R", dense["randomness"], 0.90)
        at_most("packed, COCO: text stream waste", packed["text_waste"], 0.01)
        at_most("packed, COCO: image stream waste", packed["image_waste"], 0.01)
        worse = max(packed["static_text_waste"], packed["static_image_waste"])
        at_most("packed, COCO: the worse stream, were short steps padded too", worse, 0.01)
        alone = quality["packed, one rank"]
        worse = max(alone["static_text_waste"], alone["static_image_waste"])
        at_most("packed, COCO: the same, planned for one rank", worse, 0.01)
        at_least("packed, COCO: randomness R", packed["randomness"], 0.95)
        at_most("straggler over 8 ranks, padded", dense["straggler"], 0.005)
        at_most("straggler over 8 ranks, packed", packed["straggler"], 0.005)
        at_least("memory of the limit, as predicted: mean", memory["mean_of_limit"], 0.92)
        at_most("memory of the limit, as predicted: peak", memory["peak_of_limit"], 0.97)
    tiles = {row["scheduler"]: row for row in rows if row["kind"] == "quality" and row["data"] == "tiles"}
    if tiles:
        packed = tiles["packed"]
        worse = max(packed["text_waste"], packed["image_waste"])
        at_most("packed, conversations of tiles: the worse stream", worse, 0.01)
        at_least("packed, conversations of tiles: randomness R", packed["randomness"], 0.95)
        at_most("packed, conversations of tiles: straggler over 8 ranks", packed["straggler"], 0.005)
    ours = [row for row in rows if row["kind"] == "quality" and row["package"] == "mmlab"]
    ruled = [row for row in ours if row["scheduler"] in BUDGETED or "no coll" in row["scheduler"]]
    budgeted = [row for row in ours if row["scheduler"] in BUDGETED]
    at_most(
        "same-image collisions, all data, wherever ruled out", max(row["collision_ratio"] for row in ruled), 0
    )
    at_least("coverage, all data, all schedulers", min(row["coverage"] for row in ours), 1)
    at_most("duplicates, all data, all schedulers", max(row["num_duplicates"] for row in ours), 0)
    at_most("peak / budget, all data", max(row["peak_over_budget"] for row in budgeted), 1)
    times = [row for row in rows if row["kind"] == "time"]
    for name, bound in (("budget", 4.5), ("fastest", 1.5), ("packed", 1.2)):
        slowest = max(np.median(row["plan_cpu_us_per_sample"]) for row in times if row["scheduler"] == name)
        at_most(f"planning, CPU us a sample: {name}", float(slowest), bound)
    for name, bound in (("packed", 12), ("fastest", 15)):
        for row in times:
            if row["scheduler"] == name and row["num_samples"] == 10_000_000:
                at_most(f"planning ten million, {name}, CPU s", float(np.median(row["epoch_cpu_s"])), bound)
    blockwise = [row for row in times if row["scheduler"] in ("random", "budget", "fastest", "packed")]
    at_most("first batch at any N, ms", max(float(np.median(row["first_batch_ms"])) for row in blockwise), 50)
    at_most(
        "resume with 6 ranks instead of 8, ms",
        max(float(np.median(row["resume_ms"])) for row in blockwise),
        100,
    )
    return goals


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    plan_us = float(np.median(row["plan_cpu_us_per_sample"]))
    if row["kind"] == "time":
        print(
            f"{row['scheduler']:15} {row['num_samples']:>10,} samples  {plan_us:6.2f} us/sample  "
            f"first batch {np.median(row['first_batch_ms']):6.1f} ms  resume {np.median(row['resume_ms']):6.1f} ms  "
            f"peak memory {row['peak_bytes'] / 2**20:.0f} MiB"
        )
        return
    per_cent = [
        f"{100 * row[name]:6.2f}" for name in ("combined_waste", "text_waste", "image_waste", "straggler")
    ]
    print(
        f"{row['scheduler']:44} waste {per_cent[0]} % (text {per_cent[1]}, image {per_cent[2]})  "
        f"peak/budget {row['peak_over_budget']:.2f}  straggler {per_cent[3]} %  R {row['randomness']:.2f}  "
        f"collisions {100 * row['collision_ratio']:5.2f} %  {plan_us:6.2f} us/sample"
    )


if __name__ == "__main__":
    main()
