"""Batches as columns: one array of sample rows, one of the places where batches end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import CostModel


class Block(NamedTuple):
    """A run of batches as columns."""

    order: NDArray[np.int64]  # (n,) sample rows, batch after batch
    ends: NDArray[np.int64]  # (b,) where each batch ends in `order`

    @property
    def starts(self) -> NDArray[np.int64]:
        """(b,) where each batch begins in `order`."""
        return self.ends - self.counts

    @property
    def counts(self) -> NDArray[np.int64]:
        """(b,) samples of each batch."""
        return np.diff(self.ends, prepend=0)

    @property
    def batch_of_place(self) -> NDArray[np.int64]:
        """(n,) number of the batch that each place in `order` belongs to."""
        return np.repeat(np.arange(len(self.ends)), self.counts)

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
        shifts = np.cumsum([0, *(len(block.order) for block in blocks)])[:-1]
        ends = [block.ends + shift for block, shift in zip(blocks, shifts, strict=True)]
        nothing = np.empty(0, np.int64)
        return Block(
            np.concatenate([nothing, *(block.order for block in blocks)]), np.concatenate([nothing, *ends])
        )


class Position(NamedTuple):
    """A place between two batches of an epoch."""

    block: int
    batch: int  # batches of that block that come before


class Limits(NamedTuple):
    """What one batch may cost under a scheduler; None where it sets no limit."""

    cost: CostModel | None = None
    budget: float | None = None
    streams: tuple[int, int] | None = None  # packed: text tokens and image patches that a pack holds


NO_LIMITS = Limits()
