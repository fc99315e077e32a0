"""Batches as columns: one array of sample rows, one of the places where batches end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmlab.types import CostModel

Ints = NDArray[np.int64]


def stable_order(keys: Ints) -> Ints:
    """`np.argsort(keys, kind="stable")` in half the time: each key and its place are sorted as one number.

    >>> stable_order(np.array([2, -1, 2, 0]))
    array([1, 3, 0, 2])
    """
    bits = len(keys).bit_length()
    if np.abs(keys).max(initial=0) >> (62 - bits):  # no room for both
        return np.argsort(keys, kind="stable")
    return np.sort((keys << bits) | np.arange(len(keys))) & ((1 << bits) - 1)


def images_apart(group: Ints) -> Ints:
    """(n,) a value for each image, from the samples' groups: a sample of unknown group has an image of its own.

    >>> images_apart(np.array([7, -1, 7, -1]))
    array([ 7,  9,  7, 11])
    """
    return np.where(group < 0, group.max(initial=-1) + 1 + np.arange(len(group)), group)


class Block(NamedTuple):
    """A run of batches as columns."""

    order: Ints  # (n,) sample rows, batch after batch
    ends: Ints  # (b,) where each batch ends in `order`

    @property
    def starts(self) -> Ints:
        """(b,) where each batch begins in `order`."""
        return self.ends - self.counts

    @property
    def counts(self) -> Ints:
        """(b,) samples of each batch."""
        return np.diff(self.ends, prepend=0)

    @property
    def batch_of_place(self) -> Ints:
        """(n,) number of the batch that each place in `order` belongs to."""
        return np.repeat(np.arange(len(self.ends)), self.counts)

    def largest(self, values: NDArray[Any]) -> NDArray[Any]:
        """(b,) the largest of each batch's `values`, which are (n,) in the order of the places."""
        return np.maximum.reduceat(values, self.starts) if len(self.ends) else values[:0]

    def totals(self, values: NDArray[Any]) -> NDArray[Any]:
        """(b,) the sum of each batch's `values`, which are (n,) in the order of the places."""
        return np.add.reduceat(values, self.starts) if len(self.ends) else values[:0]

    def pick(self, batches: NDArray[np.integer]) -> Block:
        """The batches asked for, in that order."""
        starts, counts = self.starts[batches], self.counts[batches]
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        return Block(self.order[np.repeat(starts, counts) + within], ends)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """One block after the other."""
        if len(blocks) == 1:
            return blocks[0]
        shifts = np.cumsum([0, *(len(block.order) for block in blocks)])
        nothing = np.empty(0, np.int64)
        order = [nothing, *(block.order for block in blocks)]
        ends = [nothing, *(block.ends + shift for block, shift in zip(blocks, shifts, strict=False))]
        return Block(np.concatenate(order), np.concatenate(ends))


class Position(NamedTuple):
    """A place between two batches of an epoch."""

    block: int
    batch: int  # batches of that block that come before


class Limits(NamedTuple):
    """What one batch may cost under a scheduler; None where it sets no limit."""

    cost: CostModel | None = None
    budget: float | None = None
    streams: tuple[int, int] | None = None  # packed: text tokens and image patches that a pack holds
    time: CostModel | None = None  # predicts seconds, where the plan was made for them


NO_LIMITS = Limits()
