"""Filling a cache before training, in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm.auto import tqdm

from mmlab.errors import DataError, OptionError
from mmlab.machine import num_usable_cores

if TYPE_CHECKING:
    from mmlab.cache.store import CacheStats, SampleCache
    from mmlab.records import Records

_GROUPS_AT_ONCE = 256  # so many are under way: an interrupt need not wait for more


class Cached(Protocol):
    """What is built from, such as a `MultimodalDataset` with a cache: `decode(row, read(row))` fills it."""

    records: Records
    cache: SampleCache | None

    def read(self, row: int) -> Any: ...

    def decode(self, row: int, found: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What `build_cache` did."""

    num_samples: int  # of the data set
    num_made: int
    num_left_out: int  # for want of room
    bad_samples: tuple[str, ...]  # why each could not be made
    stats: CacheStats

    def __str__(self) -> str:
        num_there = self.num_samples - self.num_made - len(self.bad_samples)
        lines = [
            f"{self.num_made:,} samples made and {num_there:,} found of {self.num_samples:,}; the cache has "
            f"{self.stats.cache_bytes / 2**20:,.1f} MiB"
        ]
        if self.num_left_out:
            lines.append(f"{self.num_left_out:,} found no room: they are made whenever they are read")
        return "\n".join([*lines, *self.bad_samples])


def build_cache(dataset: Cached, *, num_threads: int | None = None, progress: bool = True) -> BuildReport:
    """Make every sample that the data set's cache has not; what it has is checked by the way.

    Interrupt it at any time: the next call goes on. It may run beside training.

    Args:
        dataset: a `MultimodalDataset` with a `cache`.
        num_threads: decoders; None takes one a core.
        progress: show a bar if stderr is a terminal.

    Raises:
        OptionError: the data set has no cache, or not one thread is asked for.
    """
    if dataset.cache is None:
        raise OptionError(
            "the data set has no cache: set dataset.cache = SampleCache(folder, key=cache_key(dataset))"
        )
    threads = num_usable_cores() if num_threads is None else num_threads
    if threads < 1:
        raise OptionError(f"num_threads must be at least 1, found {threads}")
    before = dataset.cache.stats()

    def make(rows: list[int]) -> list[str]:
        bad = []
        for row in rows:
            try:
                dataset.decode(row, dataset.read(row))
            except DataError as error:
                bad.append(str(error))
        return bad

    bad_samples: list[str] = []
    with (
        ThreadPoolExecutor(threads) as pool,
        tqdm(total=len(dataset.records), desc="Caching", disable=None if progress else True) as bar,
    ):
        for part in _parts(dataset.records):
            for rows, bad in zip(part, pool.map(make, part), strict=True):
                bad_samples += bad
                bar.update(len(rows))
    stats = dataset.cache.stats()
    return BuildReport(
        num_samples=len(dataset.records),
        num_made=stats.num_misses - before.num_misses - len(bad_samples),
        num_left_out=stats.num_left_out - before.num_left_out,
        bad_samples=tuple(bad_samples),
        stats=stats,
    )


def _parts(records: Records) -> Iterator[list[list[int]]]:
    """Rows, those of one image together: one thread decodes it, once."""
    order = np.argsort(records.group, kind="stable")
    starts = np.flatnonzero(np.diff(records.group[order])) + 1
    groups = [rows.tolist() for rows in np.split(order, starts)]
    return (groups[start : start + _GROUPS_AT_ONCE] for start in range(0, len(groups), _GROUPS_AT_ONCE))
