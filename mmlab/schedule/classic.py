"""The batch schedulers that everybody knows, as everybody knows them: the baselines to compare with.

All have a fixed batch size. Only `random` plans in blocks; the others look at the whole epoch, which costs a sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.schedule.base import Scheduler, require_at_least
from mmlab.schedule.collisions import occurrences, resolve_collisions
from mmlab.schedule.columns import Block, Limits
from mmlab.schedule.cost import FREE
from mmlab.schedule.metrics import cells
from mmlab.types import PATCH

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.plan import BatchPlan
    from mmlab.types import SampleSizes


@dataclass(frozen=True, kw_only=True)
class FixedSize(Scheduler):
    """The base of schedulers whose batches have a fixed number of samples.

    Args:
        batch_size: samples a batch; leftovers form smaller ones.
        allow_collisions: whether a batch may hold two samples of one image; if not, neighbours change places.
    """

    batch_size: int = 8
    allow_collisions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("batch_size", self.batch_size, 1)

    def make_batches(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, limits: Limits
    ) -> Block:
        order, starts_bucket = self.sort_samples(sizes, rows)
        batches = Block(order, _ends_of(starts_bucket, self.batch_size))
        if self.allow_collisions:
            return batches
        batches, put_out = resolve_collisions(sizes, batches, FREE, np.inf)
        turn = occurrences(sizes, put_out)
        by_turn = np.argsort(turn, kind="stable")
        extra = Block(put_out[by_turn], _ends_of(_changes(turn[by_turn]), self.batch_size))
        return Block.join([batches, extra])

    def sort_samples(
        self, sizes: SampleSizes, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(n,) `rows` in the order in which they are cut, and where a new batch must begin."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Random(FixedSize):
    """Fixed batch size in a fresh random order each epoch: no bias, the most padding.

    When to use: images of one size and texts of one length, or as the baseline.
    """

    def block_size(self, num_samples: int) -> int:
        return 4096 * self.batch_size

    def sort_samples(
        self, sizes: SampleSizes, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return rows, np.zeros(len(rows), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class BatchScheduler(FixedSize):
    """The articles' scheduler: sorted by image height and width, then text length. The same in every epoch.

    When to use: evaluation, where order does not matter. In training, the frozen order biases the optimizer.
    """

    def optimize_batch(self, dataset: Any) -> BatchPlan:
        """Plan an epoch under the articles' name; reads `dataset.sizes` and decodes no image."""
        return self.plan(dataset.sizes)

    def sort_samples(
        self, sizes: SampleSizes, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        rows = np.sort(rows)
        by_size = np.lexsort((sizes.num_tokens[rows], sizes.width[rows], sizes.height[rows]))
        return rows[by_size], np.zeros(len(rows), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class LengthGrouped(FixedSize):
    """Hugging Face's `group_by_length`: sorted by length inside random mega-batches, the longest sample first.

    Length is text tokens and image patches together. When to use: to reproduce `Trainer(group_by_length=True)`; it sees
    one number a sample, so images of different shape still pad each other.

    Args:
        mega_batch: batches that are sorted together; None takes 50, or a quarter of the epoch if that is less.

    Source:
        `get_length_grouped_indices` in transformers' `trainer_pt_utils.py`.
    """

    mega_batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("mega_batch", 1 if self.mega_batch is None else self.mega_batch, 1)

    def sort_samples(
        self, sizes: SampleSizes, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        length = sizes.num_tokens[rows] + _patches(sizes, rows)
        span = self.batch_size * (self.mega_batch or max(1, min(len(rows) // (self.batch_size * 4), 50)))
        mega = np.arange(len(rows)) // span
        by_length = np.lexsort((-length, mega))
        order, length = rows[by_length], length[by_length]
        firsts = np.arange(0, len(rows), span)
        if len(rows):
            longest = firsts[np.argmax(length[firsts])]
            order[[0, longest]] = order[[longest, 0]]
        return order, np.zeros(len(rows), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Bucketed(FixedSize):
    """The base of schedulers whose batches stay inside a bucket; batches come in random order."""

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        return batches.pick(rng.permutation(len(batches.ends)))

    def sort_samples(
        self, sizes: SampleSizes, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        keys = self.buckets(sizes, rows)
        by_bucket = np.lexsort(keys)
        edges = [_changes(key[by_bucket]) for key in keys]
        return rows[by_bucket], np.logical_or.reduce(edges)

    def buckets(self, sizes: SampleSizes, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer], ...]:
        """Columns (n,) that are equal inside a bucket, the most important last."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Bucket(Bucketed):
    """Buckets of aspect class and text length, shuffled inside: fresh batches with little padding.

    When to use: a fixed batch size is wanted, for example for a contrastive loss with a fixed number of negatives.

    Args:
        text_step: tokens that a bucket spans.
        classes_per_octave: aspect classes for each doubling of width / height.
    """

    text_step: int = 8
    classes_per_octave: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("text_step", self.text_step, 1)
        require_at_least("classes_per_octave", self.classes_per_octave, 1)

    def buckets(self, sizes: SampleSizes, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer], ...]:
        aspect = aspect_class(sizes.height[rows], sizes.width[rows], self.classes_per_octave)
        return sizes.num_tokens[rows] // self.text_step, aspect


@dataclass(frozen=True, kw_only=True)
class AspectBucket(Bucketed):
    """One bucket for each image size in patches, text ignored: the practice of diffusion training.

    When to use: image cost rules and captions are short, or padded to a fixed length anyway.
    """

    def buckets(self, sizes: SampleSizes, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer], ...]:
        return cells(sizes.width[rows], PATCH), cells(sizes.height[rows], PATCH)


def aspect_class(
    height: NDArray[np.integer], width: NDArray[np.integer], classes_per_octave: int
) -> NDArray[np.int64]:
    """(n,) class of width / height on a logarithmic scale, from 1; 0 without an image."""
    there = (height > 0) & (width > 0)
    ratio = np.divide(width, height, out=np.ones(len(width)), where=there)
    octave = np.clip(np.log2(ratio), -16, 16)
    return np.where(there, np.rint((octave + 17) * classes_per_octave), 0).astype(np.int64)


def _patches(sizes: SampleSizes, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return cells(sizes.height[rows], PATCH) * cells(sizes.width[rows], PATCH)


def _changes(ordered: NDArray[np.integer]) -> NDArray[np.bool_]:
    """(n,) whether a value differs from the one before it; not so for the first."""
    return np.diff(ordered, prepend=ordered[:1]) != 0


def _ends_of(starts_bucket: NDArray[np.bool_], batch_size: int) -> NDArray[np.int64]:
    """Ends of batches of at most `batch_size` that begin anew at each start of a bucket."""
    num_samples = len(starts_bucket)
    places = np.arange(num_samples)
    bucket_start = np.maximum.accumulate(np.where(starts_bucket, places, 0))
    starts_batch = (places - bucket_start) % batch_size == 0
    return np.append(np.flatnonzero(starts_batch)[1:], num_samples)[: int(starts_batch.sum())]
