"""The batch schedulers that everybody knows, as everybody knows them: the baselines to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmlab.schedule.base import FixedSize, require_at_least
from mmlab.schedule.plan import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import SampleSizes


@dataclass(frozen=True, kw_only=True)
class Random(FixedSize):
    """Fixed batch size, fresh random order each epoch: no bias, the most padding."""

    def block_size(self, num_samples: int) -> int:
        return 8192 * self.batch_size

    def cut(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, budget: float | None
    ) -> Block:
        return Block(rows, _every(len(rows), self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Sorted(FixedSize):
    """Sorted by image height, width, then text length: the articles' `BatchScheduler`. The same every epoch."""

    def cut(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, budget: float | None
    ) -> Block:
        order = np.lexsort((sizes.num_tokens, sizes.width, sizes.height))
        return Block(order.astype(np.int64), _every(len(order), self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Bucket(FixedSize):
    """Aspect class x text length buckets, shuffled inside and between: fresh batches with less padding.

    Args:
        text_step: tokens that a length bucket spans.
    """

    text_step: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("text_step", self.text_step, 1)

    def cut(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, budget: float | None
    ) -> Block:
        length = sizes.num_tokens[rows] // self.text_step
        return _cut_buckets(rows, (length, aspect_class(sizes, rows)), self.batch_size, rng)


def aspect_class(sizes: SampleSizes, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Quarter octaves of width / height, a class of its own for samples without an image."""
    height, width = sizes.height[rows].astype(np.float64), sizes.width[rows].astype(np.float64)
    there = (height > 0) & (width > 0)
    ratio = np.divide(width, height, out=np.ones_like(width), where=there)
    return np.where(there, np.rint(4 * np.log2(ratio)), -1000).astype(np.int64)


def _every(num_samples: int, batch_size: int) -> NDArray[np.int64]:
    return np.append(np.arange(batch_size, num_samples, batch_size), num_samples)[
        : -(-num_samples // batch_size)
    ]


def _cut_buckets(
    rows: NDArray[np.int64], keys: tuple[NDArray[np.integer], ...], batch_size: int, rng: np.random.Generator
) -> Block:
    """Batches of at most `batch_size` that do not cross a bucket (rows of equal keys), in random order."""
    by_bucket = np.lexsort(keys)
    edges = np.zeros(len(rows), dtype=bool)
    for key in keys:
        edges[1:] |= np.diff(key[by_bucket]) != 0
    bucket_starts = np.flatnonzero(edges)
    start = np.zeros(len(rows), np.int64)
    start[bucket_starts] = np.diff(bucket_starts, prepend=0)
    place = np.arange(len(rows)) - np.cumsum(start)
    ends = np.append(np.flatnonzero(place % batch_size == 0)[1:], len(rows))[: len(rows)]
    block = Block(rows[by_bucket], ends)
    return block.pick(rng.permutation(len(ends)))
