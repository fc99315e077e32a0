"""Filling a cache before training: several threads, and several processes where there are any.

Work is shared out in blocks of images, so that no image is decoded twice, and a block is taken by whoever is free.
Every process writes shards of its own: one that is killed costs the samples it had in hand.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm.auto import tqdm

from mmlab.errors import DataError, OptionError
from mmlab.loading.cache.store import CacheStats
from mmlab.machine import num_usable_cores

if TYPE_CHECKING:
    from mmlab.data.records import Records
    from mmlab.loading.cache.store import SampleCache

_IMAGES_A_BLOCK = 16  # some 50 ms of work: so long, at most, the last process is waited for
_LOOK_EVERY_S = 0.2  # at what all have done, for the progress bar


class Cached(Protocol):
    """What is built from, such as a `MultimodalDataset` with a cache: `decode(row, read(row))` fills it."""

    records: Records
    cache: SampleCache | None

    def read(self, row: int) -> Any: ...

    def decode(self, row: int, found: Any) -> Any: ...


class Work(Protocol):
    """How processes share a build, such as `mmlab.parallel.SharedWork`. Called by one thread at a time."""

    rank: int

    def blocks(self, num_blocks: int) -> Iterator[int]:
        """Numbers of the blocks that fall to this process; each number falls to one process."""

    def count(self, number: int) -> int:
        """Add to what has been done; returns the sum over all processes."""

    def gather(self, outcome: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What every process gave, by rank, once all have come here; may be called again."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What `build_cache` did, in all processes together."""

    num_samples: int  # of the data set
    num_made: int
    num_left_out: int  # for want of room
    bad_samples: tuple[str, ...]  # why each could not be made
    made_by_rank: tuple[int, ...]  # `num_made` by process
    stats: CacheStats  # summed over the processes

    def __str__(self) -> str:
        num_there = self.num_samples - self.num_made - len(self.bad_samples)
        shares = " + ".join(f"{number:,}" for number in self.made_by_rank)
        ranks = f" ({shares} by {len(self.made_by_rank)} ranks)" if len(self.made_by_rank) > 1 else ""
        lines = [
            f"{self.num_made:,} samples made{ranks} and {num_there:,} found of {self.num_samples:,}; the cache has "
            f"{self.stats.cache_bytes / 2**20:,.1f} MiB"
        ]
        if self.num_left_out:
            lines.append(f"{self.num_left_out:,} found no room: they are made whenever they are read")
        return "\n".join([*lines, *self.bad_samples])


class Blocks:
    """The rows of a data set in blocks of images, in the order of their first appearance; pure columns."""

    def __init__(self, records: Records) -> None:
        first: dict[Any, int] = {}  # row in which an image comes first; a record without one counts by itself
        images = np.fromiter(
            (
                first.setdefault(row if path is None else path, row)
                for row, path in enumerate(records.image_paths)
            ),
            np.int64,
            len(records),
        )
        self._order = np.argsort(images, kind="stable")
        starts = np.flatnonzero(np.diff(images[self._order], prepend=-1))
        self._starts = np.append(starts[::_IMAGES_A_BLOCK], len(records))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, number: int) -> list[int]:
        """Rows of one block, those of one image together."""
        return self._order[self._starts[number] : self._starts[number + 1]].tolist()


def build_cache(
    dataset: Cached, *, num_threads: int | None = None, work: Work | None = None, progress: bool = True
) -> BuildReport:
    """Make every sample that the data set's cache has not; what it has is checked by the way.

    Interrupt it at any time: the next call goes on. It may run beside training.

    Args:
        dataset: a `MultimodalDataset` with a `cache`.
        num_threads: decoders of this process; None takes one a core, shared with the other ranks of this machine.
        work: how several processes share the build: `mmlab.parallel.SharedWork.of_this_job()` under `torchrun`, where
            all ranks make this call. None makes everything here.
        progress: show a bar if stderr is a terminal; only rank 0 has one, of what all have done.

    Returns:
        The same report in every process.

    Raises:
        OptionError: the data set has no cache, or not one thread is asked for.
        RunError: another process has given up, or says nothing any more.
    """
    cache, threads = check_build(dataset, num_threads)
    work = work or _Alone()
    blocks = Blocks(dataset.records)
    before, bad_samples = cache.stats(), list[str]()
    try:
        work.gather({})  # nobody writes before all have opened: who opens later may evict what was written
        _fill(dataset, blocks, work, threads, bad_samples, progress and work.rank == 0)
    except BaseException as error:
        work.fail(error)
        raise
    return join_outcomes(dataset, work.gather(outcome_of(before, cache.stats(), bad_samples)))


def check_build(dataset: Cached, num_threads: int | None) -> tuple[SampleCache, int]:
    """The cache to fill and the number of decoders.

    Raises:
        OptionError: the data set has no cache, or not one thread is asked for.
    """
    if dataset.cache is None:
        raise OptionError(
            "the data set has no cache: set dataset.cache = SampleCache(folder, key=cache_key(dataset))"
        )
    if num_threads is not None and num_threads < 1:
        raise OptionError(f"num_threads must be at least 1, found {num_threads}")
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return dataset.cache, num_threads or max(1, num_usable_cores() // ranks_here)


def make_rows(dataset: Cached, rows: list[int]) -> list[str]:
    """Make what the cache has not of these rows; returns why each bad one could not be made."""
    bad = []
    for row in rows:
        try:
            dataset.decode(row, dataset.read(row))
        except DataError as error:
            bad.append(str(error))
    return bad


def outcome_of(before: CacheStats, after: CacheStats, bad_samples: list[str]) -> dict[str, Any]:
    """What one process did between two readings of its cache; can be JSON."""
    counts = {
        item.name: getattr(after, item.name) - getattr(before, item.name) for item in fields(CacheStats)
    }
    return {**counts, "bad_samples": bad_samples}


def join_outcomes(dataset: Cached, outcomes: list[Mapping[str, Any]]) -> BuildReport:
    """The report on what all processes did, as `outcome_of` has it."""
    assert dataset.cache is not None
    counts: dict[str, int] = {
        item.name: sum(outcome[item.name] for outcome in outcomes) for item in fields(CacheStats)
    }
    made = tuple(outcome["num_misses"] - len(outcome["bad_samples"]) for outcome in outcomes)
    return BuildReport(
        num_samples=len(dataset.records),
        num_made=sum(made),
        num_left_out=counts["num_left_out"],
        bad_samples=tuple(sorted(bad for outcome in outcomes for bad in outcome["bad_samples"])),
        made_by_rank=made,
        stats=CacheStats(**counts | {"cache_bytes": dataset.cache.stats().cache_bytes}),
    )


def _fill(
    dataset: Cached, blocks: Blocks, work: Work, threads: int, bad_samples: list[str], progress: bool
) -> None:
    """Make this process's blocks; every thread takes the next one when it is free."""
    numbers, lock, ended = work.blocks(len(blocks)), threading.Lock(), threading.Event()
    num_done = 0

    def fill() -> None:
        nonlocal num_done
        rows: list[int] = []
        bad: list[str] = []
        try:
            while not ended.is_set():
                with lock:
                    bad_samples.extend(bad)
                    num_done = work.count(len(rows))
                    if (number := next(numbers, None)) is None:
                        return
                rows = blocks.rows(number)
                bad = make_rows(dataset, rows)
        except BaseException:
            ended.set()
            raise

    with (
        ThreadPoolExecutor(threads) as pool,
        tqdm(total=len(dataset.records), desc="Caching", disable=None if progress else True) as bar,
    ):
        running = {pool.submit(fill) for _ in range(threads)}
        try:
            while running:
                done, running = wait(running, timeout=_LOOK_EVERY_S)
                bar.update(num_done - bar.n)
                for thread in done:
                    thread.result()
        finally:
            ended.set()


class _Alone:
    """All the work for one process."""

    rank = 0

    def __init__(self) -> None:
        self._num_done = 0

    def blocks(self, num_blocks: int) -> Iterator[int]:
        return iter(range(num_blocks))

    def count(self, number: int) -> int:
        self._num_done += number
        return self._num_done

    def gather(self, outcome: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [outcome]

    def fail(self, error: BaseException) -> None:
        """Nobody is waiting."""
