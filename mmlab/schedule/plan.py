"""A plan: which samples form which batch, in which order, for one epoch.

Held as columns (one array of sample rows, one of batch ends), built block by block as it is read: the first batch of
ten million samples is there before the rest is planned, and iterating keeps one block. `len`, `shapes` and `report`
plan the whole epoch once (8 bytes a sample). A plan reads sizes only, never pixels, and knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from mmlab.errors import OptionError
from mmlab.types import BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.report import PlanReport
    from mmlab.types import CostModel, SampleSizes


class Block(NamedTuple):
    """A run of batches as columns."""

    order: NDArray[np.int64]  # (n,) sample rows, batch after batch
    ends: NDArray[np.int64]  # (b,) where each batch ends in `order`

    @property
    def starts(self) -> NDArray[np.int64]:
        """(b,) where each batch begins in `order`."""
        return np.concatenate((np.zeros(1, np.int64), self.ends[:-1]))[: len(self.ends)]

    @property
    def batch_of_sample(self) -> NDArray[np.int64]:
        """(n,) number of the batch that each place in `order` belongs to."""
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))

    def pick(self, batches: NDArray[np.integer]) -> Block:
        """The batches asked for, in that order."""
        starts, counts = self.starts[batches], (self.ends - self.starts)[batches]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return Block(self.order[np.repeat(starts, counts) + within], ends)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """One block after the other."""
        shifts = np.cumsum([0, *(len(block.order) for block in blocks)])
        ends = [block.ends + shift for block, shift in zip(blocks, shifts, strict=False)]
        empty = np.empty(0, np.int64)
        return Block(
            np.concatenate([empty, *(block.order for block in blocks)]), np.concatenate([empty, *ends])
        )


class BlockSource(Protocol):
    """Where a plan gets its batches from. `build` is pure: the same block gives the same batches."""

    @property
    def num_blocks(self) -> int: ...

    def build(self, block: int) -> Block: ...


class BatchPlan:
    """The batches of one epoch: iterating gives lists of sample rows, as a DataLoader's `batch_sampler` should.

    >>> from mmlab.types import SampleSizes
    >>> sizes = SampleSizes(num_tokens=[3, 9, 4], height=[16, 16, 32], width=[16, 16, 32], group=[0, 1, 2])
    >>> plan = BatchPlan.from_batches([[0, 1], [2]], sizes)
    >>> list(plan), len(plan), plan.shapes[0]
    ([[0, 1], [2]], 2, BatchShape(batch_size=2, num_tokens=9, height=16, width=16))
    """

    def __init__(
        self,
        source: BlockSource,
        sizes: SampleSizes,
        *,
        cost: CostModel | None = None,
        budget: float | None = None,
        even_for: int = 1,
    ) -> None:
        self.source = source
        self.sizes = sizes
        self.cost = cost  # what `report` prices batches with; padded tokens when None
        self.budget = budget  # the limit of that cost for one batch, None when the scheduler has none
        self._even_for = even_for  # every block has a multiple of this many batches
        self._rank, self._world_size, self._skipped = 0, 1, 0

    @classmethod
    def from_batches(cls, batches: Sequence[Sequence[int]], sizes: SampleSizes) -> BatchPlan:
        """A plan of given batches, for reporting on batches that were made elsewhere."""
        order = np.concatenate([np.empty(0, np.int64), *(np.asarray(batch, np.int64) for batch in batches)])
        ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        return cls(_Given(Block(order, ends)), sizes)

    def __iter__(self) -> Iterator[list[int]]:
        to_skip = self._skipped
        for index in range(self.source.num_blocks):
            block = self._of_this_rank(self.source.build(index))
            for start, end in zip(block.starts[to_skip:], block.ends[to_skip:], strict=True):
                yield block.order[start:end].tolist()
            to_skip = max(0, to_skip - len(block.ends))

    def __len__(self) -> int:
        return len(self.columns.ends)

    @cached_property
    def columns(self) -> Block:
        """All batches as columns; plans the whole epoch on first use."""
        blocks = [self._of_this_rank(self.source.build(index)) for index in range(self.source.num_blocks)]
        joined = Block.join(blocks)
        return joined.pick(np.arange(self._skipped, len(joined.ends))) if self._skipped else joined

    @cached_property
    def shape_columns(self) -> NDArray[np.int64]:
        """(num_batches, 4): batch size, longest text, tallest and widest image of each batch."""
        order, ends = self.columns
        starts = self.columns.starts
        if not len(ends):
            return np.empty((0, 4), np.int64)
        sides = (self.sizes.num_tokens, self.sizes.height, self.sizes.width)
        longest = [np.maximum.reduceat(side[order], starts) for side in sides]
        return np.stack([ends - starts, *longest], axis=1).astype(np.int64)

    @property
    def shapes(self) -> Sequence[BatchShape]:
        """The padded shape of every batch, made on access."""
        return _Shapes(self.shape_columns)

    def shard(self, rank: int, world_size: int) -> BatchPlan:
        """The batches of one rank: every `world_size`-th, so that one step's batches are neighbours in the plan.

        Raises:
            OptionError: an uneven plan: ranks with fewer steps would leave the others waiting for ever.
        """
        if not 0 <= rank < world_size:
            raise OptionError(f"rank must lie in [0, {world_size}), found {rank}")
        if self._world_size > 1 or self._skipped:
            raise OptionError("shard the whole plan first, then skip: this one is already sharded or skipped")
        if self._even_for % world_size and len(self) % world_size:
            raise OptionError(
                f"{len(self)} batches cannot be shared evenly by {world_size} ranks; "
                f"plan with world_size={world_size}, which splits batches until they can"
            )
        part = BatchPlan(self.source, self.sizes, cost=self.cost, budget=self.budget)
        part._rank, part._world_size = rank, world_size
        return part

    def skip(self, num_steps: int) -> BatchPlan:
        """The same plan without its first `num_steps` batches (of this rank)."""
        if num_steps < 0:
            raise OptionError(f"num_steps must not be negative, found {num_steps}")
        rest = BatchPlan(self.source, self.sizes, cost=self.cost, budget=self.budget)
        rest._rank, rest._world_size, rest._skipped = self._rank, self._world_size, self._skipped + num_steps
        return rest

    def report(self, *, budget: float | None = None, num_ranks: int = 8) -> PlanReport:
        """Waste, cost, balance and coverage of the whole plan.

        Args:
            budget: what `peak_over_budget` is measured against, the plan's own budget when None.
            num_ranks: ranks over which consecutive batches are shared, for `straggler`.
        """
        from mmlab.schedule.report import report_plan

        return report_plan(self, budget=budget, num_ranks=num_ranks)

    def __repr__(self) -> str:
        return f"BatchPlan({len(self)} batches of {len(self.columns.order)} samples)"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _of_this_rank(self, block: Block) -> Block:
        if self._world_size == 1:
            return block
        return block.pick(np.arange(self._rank, len(block.ends), self._world_size))


class _Given(NamedTuple):
    block: Block
    num_blocks: int = 1

    def build(self, block: int) -> Block:
        return self.block


class _Shapes(Sequence[BatchShape]):
    def __init__(self, columns: NDArray[np.int64]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return _Shapes(self._columns[index])
        return BatchShape(*map(int, self._columns[index]))
