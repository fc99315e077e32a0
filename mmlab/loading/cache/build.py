"""Filling a cache before training: by threads, by all ranks of a `torchrun` job, or by Ray (`on_ray`).

Each rank decodes its own contiguous range of the distinct images, so that each shard is read by few ranks. A
process that is killed loses only the images it was decoding; the next build decodes what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, OptionError, RunError, check_numbers
from mmlab.machine import num_usable_cores, place_in_launch, progress_bar

if TYPE_CHECKING:
    from mmlab.data.dataset import MultimodalDataset
    from mmlab.loading.cache.store import SampleCache

BLOCK = 16  # images that a thread takes at once: some 50 ms of work
_SILENCE_S, _LOOK_EVERY_S = 600.0, 0.05
_num_builds = count()  # the same on every rank: all make the same calls


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What `build_cache` did, in all processes together."""

    num_images: int  # distinct ones of the data set
    num_made: int  # decoded now, also those that were then left out
    num_left_out: int  # for lack of space, or after the disk failed
    problems: tuple[str, ...]  # why the cache lacks images that it should have
    bad_samples: tuple[str, ...]  # why each could not be made
    made_by_rank: tuple[int, ...]  # `num_made` by process
    cache_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every image could be read, and written up to the limit."""
        return not self.bad_samples and not self.problems

    def __str__(self) -> str:
        num_there = self.num_images - self.num_made - len(self.bad_samples)
        shares = " + ".join(f"{number:,}" for number in self.made_by_rank)
        ranks = f" ({shares} by {len(self.made_by_rank)} ranks)" if len(self.made_by_rank) > 1 else ""
        lines = [
            f"{self.num_made:,} images made{ranks} and {num_there:,} found of {self.num_images:,}; the cache has "
            f"{self.cache_bytes / 2**20:,.1f} MiB"
        ]
        if self.num_left_out:
            lines.append(f"{self.num_left_out:,} did not fit: they are decoded whenever they are read")
        return "\n".join([*lines, *self.problems, *self.bad_samples])


def build_cache(
    dataset: MultimodalDataset, *, num_threads: int | None = None, progress: bool = True
) -> BuildReport:
    """Decode every image that the data set's cache lacks, and check those that it has.

    It may be interrupted at any time: the next call continues. It may run during training. Under `torchrun`,
    all ranks make this call, and each decodes its share.

    Args:
        dataset: a `MultimodalDataset` with a `cache`.
        num_threads: decoding threads of this process; None takes one per core, divided among the ranks of
            this machine.
        progress: show a bar of this process's share on stderr; on rank 0 only.

    Returns:
        The same report in every process.

    Raises:
        OptionError: the data set has no cache, or `num_threads` is below 1.
        RunError: another rank no longer responds.
    """
    cache, threads = check_build(dataset, num_threads)
    rank, world_size = place_in_launch()
    rows = image_rows(cache)
    share = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    outcome = make_rows(dataset, share, threads, progress=progress and rank == 0)
    if world_size == 1:
        return join_outcomes(cache, [outcome])
    from torch import distributed

    store, rank, world_size = next(distributed.rendezvous("env://"))
    store = distributed.PrefixStore(f"mmlab cache {next(_num_builds)}", store)
    return join_outcomes(cache, gather(outcome, cache, store, rank, world_size))


def check_build(dataset: MultimodalDataset, num_threads: int | None) -> tuple[SampleCache, int]:
    """The cache to fill and the number of decoding threads.

    Raises:
        OptionError: the data set has no cache, or `num_threads` is below 1.
    """
    if dataset.cache is None:
        raise OptionError("no cache to fill: set dataset.cache = SampleCache(folder, key=cache_key(dataset))")
    check_numbers({"num_threads": num_threads})
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return dataset.cache, num_threads or max(1, num_usable_cores() // ranks_here)


def image_rows(cache: SampleCache) -> list[int]:
    """A row of each distinct image, in the order of the slots."""
    slots, rows = np.unique(cache.key.slots, return_index=True)
    return rows[slots >= 0].tolist()


def make_rows(
    dataset: MultimodalDataset, rows: Sequence[int], threads: int = 1, *, progress: bool
) -> dict[str, Any]:
    """Decode the images of these rows that the cache lacks; the outcome can be written as JSON."""

    def make(block: Sequence[int]) -> tuple[int, list[str]]:
        num_made, bad = 0, []
        for row in block:
            try:
                found = dataset.read(row)
                if not isinstance(found, np.ndarray):
                    dataset.decode(row, found)
                    num_made += 1
            except DataError as error:
                bad.append(str(error))
        return num_made, bad

    before = dataset.cache.stats().num_left_out
    blocks = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
    pool = ThreadPoolExecutor(threads)
    try:
        with progress_bar(total=len(rows), name="Caching", show=progress) as bar:
            done = []
            for block, outcome in zip(blocks, pool.map(make, blocks), strict=True):
                done.append(outcome)
                bar.update(len(block))
    finally:
        pool.shutdown(cancel_futures=True)
    return {
        "num_made": sum(num_made for num_made, _ in done),
        "num_left_out": dataset.cache.stats().num_left_out - before,
        "bad_samples": [reason for _, bad in done for reason in bad],
        "problems": [dataset.cache.problem] if dataset.cache.problem else [],
    }


def join_outcomes(cache: SampleCache, outcomes: Sequence[Mapping[str, Any]]) -> BuildReport:
    """The report on what all processes did."""
    problems = {problem for outcome in outcomes for problem in outcome["problems"]}
    if not problems and not cache.path.exists():
        problems.add(
            f"{cache.path}: another process removed it, to keep other images there: use a folder for each"
        )
    return BuildReport(
        num_images=len(image_rows(cache)),
        num_made=sum(outcome["num_made"] for outcome in outcomes),
        num_left_out=sum(outcome["num_left_out"] for outcome in outcomes),
        problems=tuple(sorted(problems)),
        bad_samples=tuple(sorted(bad for outcome in outcomes for bad in outcome["bad_samples"])),
        made_by_rank=tuple(outcome["num_made"] for outcome in outcomes),
        cache_bytes=cache.stats().cache_bytes,
    )


def gather(
    outcome: Mapping[str, Any], cache: SampleCache, store: Any, rank: int, world_size: int
) -> list[Mapping[str, Any]]:
    """The outcome of every rank; waits for as long as the cache's file still changes.

    `torchrun` ends the job if a rank fails; the limit is for other launchers.

    Raises:
        RunError: for ten minutes, a rank has not reported and the file has not changed.
    """
    store.set(f"done {rank}", json.dumps(outcome))
    _wait_for(store, [f"done {other}" for other in range(world_size)], cache)
    found = [json.loads(store.get(f"done {other}")) for other in range(world_size)]
    store.set(f"left {rank}", "")
    if rank == 0:  # it leaves last: without torchrun, the store is in this process
        _wait_for(store, [f"left {other}" for other in range(world_size)], cache)
    return found


def _wait_for(store: Any, keys: list[str], cache: SampleCache) -> None:
    """Wait until every rank has set its key."""
    seen_s, seen = time.monotonic(), None
    while not store.check(keys):
        written = cache.path.stat().st_mtime_ns if cache.path.exists() else 0
        # this machine's clock may be set, and differ from that of the disk
        if written != seen:
            seen_s, seen = time.monotonic(), written
        if time.monotonic() - seen_s > _SILENCE_S:
            ranks = ", ".join(key.split()[1] for key in keys if not store.check([key]))
            raise RunError(
                f"rank {ranks} has not reported for {_SILENCE_S:g} s; start the job again: what is done is kept"
            )
        time.sleep(_LOOK_EVERY_S)
