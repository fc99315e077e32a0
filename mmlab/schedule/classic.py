"""The well-known batch schedulers, in their usual form: the baselines to compare with.

All have a fixed batch size. Only `random` plans in blocks; the others look at the whole epoch, which costs a sort.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmlab.schedule.base import Scheduler
from mmlab.schedule.collisions import resolve_collisions
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.metrics import lengths, sides
from mmlab.schedule.plan import BatchPlan
from mmlab.types import PATCH, SampleSizes


@dataclass(frozen=True, kw_only=True)
class FixedSize(Scheduler):
    """The base of schedulers whose batches have a fixed number of samples.

    Args:
        batch_size: samples per batch; leftovers form smaller ones.
        allow_collisions: whether a batch may hold two samples of one image; if not, they are exchanged with
            samples of neighbouring batches.
    """

    batch_size: int = field(default=8, kw_only=False)  # `BatchScheduler(8)`, as in article A
    allow_collisions: bool = True

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        order = self.sort_samples(sizes, rows)
        batches = Block(order, _ends_of(self.bucket_of(sizes, order), self.batch_size))
        if self.allow_collisions:
            return batches

        def cut(removed: Ints, turn: Ints) -> Block:
            by_turn = np.argsort(turn, kind="stable")
            return Block(removed[by_turn], _ends_of(turn[by_turn], self.batch_size))

        return resolve_collisions(sizes, batches, PaddedTokens().as_polynomial(), cut)

    def sort_samples(self, sizes: SampleSizes, rows: Ints) -> Ints:
        """(n,) `rows`, given in random order, in the order to cut: bucket after bucket unless overridden."""
        return rows[np.argsort(self.bucket_of(sizes, rows), kind="stable")]

    def bucket_of(self, sizes: SampleSizes, rows: Ints) -> Ints:
        """(n,) number of the bucket of each row; a batch stays inside one. All are in bucket 0 unless overridden."""
        return np.zeros(len(rows), np.int64)


@dataclass(frozen=True, kw_only=True)
class Random(FixedSize):
    """Fixed batch size in a fresh random order each epoch: no bias, the most padding.

    When to use: images of one size and texts of one length, or as the baseline.
    """

    def block_size(self, num_samples: int) -> int:
        return 4096 * self.batch_size


@dataclass(frozen=True, kw_only=True)
class BatchScheduler(FixedSize):
    """The articles' scheduler: sorted by image height and width, then text length. The same in every epoch.

    When to use: evaluation, where order does not matter. In training, the frozen order biases the optimizer.
    """

    def optimize_batch(self, dataset: Any) -> BatchPlan:
        """Plan an epoch under the articles' name; reads `dataset.sizes` and decodes no image."""
        return self.plan(dataset.sizes)

    def sort_samples(self, sizes: SampleSizes, rows: Ints) -> Ints:
        rows = np.sort(rows)
        return rows[np.lexsort((sizes.num_tokens[rows], sizes.width[rows], sizes.height[rows]))]


@dataclass(frozen=True, kw_only=True)
class LengthGrouped(FixedSize):
    """Hugging Face's `group_by_length`: sorted by length inside random mega-batches, the longest sample first.

    Length is text tokens and image patches together. When to use: to reproduce
    `Trainer(group_by_length=True)`; it sees one number per sample, so images of different shape still pad
    each other.

    Args:
        mega_batch: batches that are sorted together; None takes 50, or a quarter of the epoch if that is less.

    Source:
        `get_length_grouped_indices` in transformers' `trainer_pt_utils.py`.
    """

    mega_batch: int | None = None

    def sort_samples(self, sizes: SampleSizes, rows: Ints) -> Ints:
        length = np.add(*lengths(sizes, PATCH, rows))
        span = self.batch_size * (self.mega_batch or max(1, min(len(rows) // (self.batch_size * 4), 50)))
        by_length = np.lexsort((-length, np.arange(len(rows)) // span))
        order, length = rows[by_length], length[by_length]
        firsts = np.arange(0, len(rows), span)
        longest = firsts[np.argmax(length[firsts])]
        order[[0, longest]] = order[[longest, 0]]
        return order


@dataclass(frozen=True, kw_only=True)
class Bucketed(FixedSize):
    """The base of schedulers with several buckets, whose batches come in random order."""

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        return batches.pick(rng.permutation(len(batches.ends)))


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

    def bucket_of(self, sizes: SampleSizes, rows: Ints) -> Ints:
        aspect = aspect_class(sizes.height[rows], sizes.width[rows], self.classes_per_octave)
        return aspect << 32 | sizes.num_tokens[rows] // self.text_step


@dataclass(frozen=True, kw_only=True)
class AspectBucket(Bucketed):
    """One bucket for each image size in patches, text ignored: the practice of diffusion training.

    When to use: images dominate the cost, and captions are short or padded to a fixed length anyway.
    """

    def bucket_of(self, sizes: SampleSizes, rows: Ints) -> Ints:
        _, high, wide = sides(sizes, PATCH, rows)
        return high << 32 | wide


def aspect_class(height: np.ndarray, width: np.ndarray, classes_per_octave: int) -> Ints:
    """(n,) class of width / height on a logarithmic scale, from 1; 0 without an image."""
    there = (height > 0) & (width > 0)
    ratio = np.divide(width, height, out=np.ones(len(width)), where=there)
    octave = np.clip(np.log2(ratio), -16, 16)
    return np.where(there, np.rint((octave + 17) * classes_per_octave), 0).astype(np.int64)


def _ends_of(bucket: Ints, batch_size: int) -> Ints:
    """Ends of batches of at most `batch_size` samples that stay inside a bucket; buckets lie one after the other."""
    places = np.arange(len(bucket))
    starts_bucket = np.diff(bucket, prepend=bucket[:1]) != 0
    bucket_start = np.maximum.accumulate(np.where(starts_bucket, places, 0))
    starts_batch = (places - bucket_start) % batch_size == 0
    return np.append(np.flatnonzero(starts_batch)[1:], len(bucket))
