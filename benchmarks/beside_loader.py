"""What loading costs the thread that trains: by threads of its own process, by other processes, by torch's DataLoader.

    python benchmarks/beside_loader.py [--quick] [--rounds N] [--json FILE | --out DIR]

On a GPU one thread of Python starts every operation of a step. Threads that decode need the interpreter's lock for a
part of their work, and that thread waits for it. Here it starts small operations on a CPU, right after each batch,
while the workers load the next ones. The median is judged: it tells of the lock, and hardly of cores that are shared.
`make gpu` measures whole epochs of a model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import add_common_options, goal, print_goals, write_if_asked
from torch.utils.data import DataLoader

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.loading.loader import PlannedLoader
from mmlab.loading.workers import START_METHOD
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import aspect

BATCH_SIZE, NUM_STARTS = 32, 300  # samples loaded at a time, operations started after each batch
ALONE, THREADS, PROCESSES, PEER = "alone", "threads", "processes", "DataLoader of torch"
MOST_RATIO = 0.1  # by which starting an operation may take longer
_WAIT_S = 0.02


def scenes(folder: str, num_images: int, side: int) -> MultimodalDataset:
    """Generated scenes, whose images keep their shape and have about `side` x `side` pixels."""
    data = make_dataset(Path(folder) / "data", num_images=num_images, progress=False)
    return MultimodalDataset(read_records(data, progress=False), image_policy=aspect(side**2))


def planned(dataset: MultimodalDataset, num_workers: int, *, backend: str, stack: ExitStack) -> Iterator[Any]:
    """Batches of a `PlannedLoader`, epoch after epoch."""
    scheduler = make_scheduler("random", batch_size=BATCH_SIZE)
    loader = stack.enter_context(
        PlannedLoader(dataset, scheduler, backend=backend, num_workers=num_workers, pin_memory=False)
    )
    for epoch in count():
        loader.set_epoch(epoch)
        yield from loader


def peer(dataset: MultimodalDataset, num_workers: int, *, stack: ExitStack) -> Iterator[Any]:
    """The same samples from torch's DataLoader, in batches that are not padded."""
    loader = DataLoader(
        dataset,  # type: ignore[arg-type]
        BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=list,
        persistent_workers=True,
        multiprocessing_context=START_METHOD,
    )
    while True:
        yield from loader


def waiting(dataset: MultimodalDataset, num_workers: int, *, stack: ExitStack) -> Iterator[Any]:
    """No loader: as long a wait as for a batch, after which a thread is slower at first in any case."""
    while True:
        yield time.sleep(_WAIT_S)


LOADERS: dict[str, Callable[..., Iterator[Any]]] = {
    ALONE: waiting,
    THREADS: partial(planned, backend="threads"),
    PROCESSES: partial(planned, backend="torch"),
    PEER: peer,
}


def start_operations() -> float:
    """Seconds to start one small operation."""
    numbers = torch.zeros(64)
    started = time.perf_counter()
    for _ in range(NUM_STARTS):
        numbers.add_(1.0)
    return (time.perf_counter() - started) / NUM_STARTS


def measure(
    dataset: MultimodalDataset,
    numbers_of_workers: Sequence[int],
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """A row a loader and number of workers, which take turns: medians of each round.

    Args:
        seconds: of one turn.
    """
    rows, works = [], []
    with ExitStack() as stack:
        for name, make in LOADERS.items():
            for num_workers in (0,) if name == ALONE else numbers_of_workers:
                rows.append({"loader": name, "num_workers": num_workers, "start_s": [], "wait_s": []})
                works.append(make(dataset, num_workers, stack=stack))
        for number in range(rounds):
            places = range(len(rows))
            for place in (places, reversed(places))[number % 2]:
                next(works[place])  # starts workers, or wakes them
                starts, waits = [], []
                end_s = time.perf_counter() + seconds
                while time.perf_counter() < end_s or not starts:
                    asked = time.perf_counter()
                    next(works[place])
                    waits.append(time.perf_counter() - asked)
                    starts.append(start_operations())
                rows[place]["start_s"].append(median(starts))
                rows[place]["wait_s"].append(median(waits))
        del works  # ends the DataLoader's workers
    return rows


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much longer starting an operation takes beside each loader."""
    goals = []
    (alone,) = (row for row in rows if row["loader"] == ALONE)
    for row in rows:
        if row is not alone and row["loader"] != PEER:
            longer = median(row["start_s"]) / median(alone["start_s"]) - 1
            name = f"starting an operation takes longer beside {row['num_workers']} {row['loader']}"
            goals.append(goal(name, f"<= {MOST_RATIO:.0%}", longer, longer <= MOST_RATIO))
    return goals


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    add_common_options(parser, "beside_loader")
    options = parser.parse_args()
    rounds, seconds = (2, 0.5) if options.quick else (options.rounds, 2.0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = scenes(folder, num_images=100 if options.quick else 300, side=224)
        rows = measure(dataset, (1, 2), rounds=rounds, seconds=seconds)
    alone_s = median(rows[0]["start_s"])
    for row in rows:
        start_s = median(row["start_s"])
        print(
            f"{row['loader']:<20} {row['num_workers']} workers  {1e6 * start_s:6.2f} us to start an operation, "
            f"{start_s / alone_s:.2f} times as long as alone"
        )
    goals = judge(rows)
    print_goals(goals)
    write_if_asked(options, "beside_loader", rows, goals)


if __name__ == "__main__":
    main()
