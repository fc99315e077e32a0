"""A plan: which samples form which batch, in which order, for one epoch.

Built block by block as it is read, so the first batch of ten million samples is there before the rest is planned.
`len`, `shapes` and `report` plan the whole epoch once (8 bytes per sample). A plan reads sizes only, never
pixels, and knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, check_numbers
from mmlab.schedule.columns import NO_LIMITS, Block, Ints, Limits, Position
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.epoch import EpochBlocks, FixedBatches
from mmlab.schedule.metrics import cells, lengths
from mmlab.schedule.report import PlanReport, report_plan
from mmlab.types import PATCH, BatchShape, CostModel, SampleSizes, mean_height

_START = Position(0, 0)


class BatchPlan:
    """The batches of one epoch: iterating gives lists of sample rows, as a DataLoader's `batch_sampler` should.

    >>> from mmlab.types import SampleSizes
    >>> sizes = SampleSizes(num_tokens=[3, 9, 4], height=[16, 16, 32], width=[16, 16, 32], group=[0, 1, 2])
    >>> plan = BatchPlan.from_batches([[0, 1], [2]], sizes)
    >>> list(plan), len(plan), plan.shapes[0]
    ([[0, 1], [2]], 2, BatchShape(batch_size=2, num_tokens=9, height=16, width=16))

    Args:
        source: where the batches come from.
        sizes: of all samples, N.
        start: where in the source the plan begins.
        rank, world_size: the rank whose share this plan is, and the number of ranks.
    """

    def __init__(
        self,
        source: EpochBlocks | FixedBatches,
        sizes: SampleSizes,
        *,
        start: Position = _START,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.source, self.sizes, self.limits = source, sizes, source.limits
        self._start, self._rank, self._world_size = start, rank, world_size

    @classmethod
    def from_batches(
        cls, batches: Sequence[Sequence[int]], sizes: SampleSizes, limits: Limits = NO_LIMITS
    ) -> BatchPlan:
        """A plan of given batches, to report on or train with batches that were made elsewhere.

        Raises:
            OptionError: a batch that is empty, or has anything but row numbers from 0 to N - 1.
        """
        rows = [np.asarray(batch) for batch in batches]
        for number, batch in enumerate(rows):
            is_rows = batch.ndim == 1 and batch.dtype.kind in "iu" and len(batch)
            if not is_rows or batch.min() < 0 or batch.max() >= len(sizes):
                raise OptionError(f"batch {number} must hold rows from 0 to {len(sizes) - 1}, found {batch}")
        order = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
        ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        return cls(FixedBatches(Block(order, ends), limits), sizes)

    def __iter__(self) -> PlanIterator:
        return PlanIterator(self)

    def __len__(self) -> int:
        return len(self.columns.ends)

    @cached_property
    def columns(self) -> Block:
        """All batches as columns; plans the whole epoch on first use."""
        return Block.join([block for _, _, block in self._blocks(self._start)])

    @cached_property
    def shape_columns(self) -> Ints:
        """(num_batches, 4): batch size, longest text, tallest (or mean, see `SampleSizes`) and widest image of each batch."""
        batches, sizes = self.columns, self.sizes
        sides = (sizes.num_tokens, sizes.height, sizes.width)
        most = [batches.largest(side[batches.order]).astype(np.int64) for side in sides]
        if not sizes.pads_images:
            most[1] = mean_height(
                batches.totals(sizes.height[batches.order].astype(np.int64)), batches.counts
            )
        return np.stack([batches.counts, *most], axis=1)

    @cached_property
    def shapes(self) -> list[BatchShape]:
        """The padded shape of every batch."""
        return [BatchShape(*shape) for shape in self.shape_columns.tolist()]

    def step_shapes(self, patch: int = PATCH) -> Ints:
        """(num_batches, 4) shapes computed: padded or, if packed, one sample of all tokens and patches."""
        if self.limits.streams is None:
            return self.shape_columns
        text, image = map(self.columns.totals, lengths(self.sizes, patch, self.columns.order))
        one = np.ones_like(text)
        return np.stack([one, text, patch * image, patch * one], axis=1)

    def padded_patches(self, patch: int = PATCH) -> Ints:
        """(num_batches,) image patches computed: with padding, where images are padded."""
        if not self.sizes.pads_images:
            return self.columns.totals(lengths(self.sizes, patch, self.columns.order)[1])
        number, _, height, width = self.step_shapes(patch).T
        return number * cells(height, patch) * cells(width, patch)

    def costs(self, cost: CostModel | None = None) -> NDArray[np.float64]:
        """(num_batches,) what each batch costs: `step_shapes` under a cost model.

        Args:
            cost: a cost model; None takes the plan's own, or else padded tokens.
        """
        cost = cost or self.limits.cost or PaddedTokens()
        return batch_costs(cost, self.step_shapes(getattr(cost, "patch", PATCH)))

    @property
    def times_drawn(self) -> Ints:
        """(N,) how often each sample comes."""
        return np.bincount(self.columns.order, minlength=len(self.sizes))

    @property
    def dropped(self) -> Ints:
        """Rows that are in no batch, ascending; only a scheduler that draws leaves any out."""
        return np.flatnonzero(self.times_drawn == 0)

    @property
    def repeated(self) -> Ints:
        """Rows that come more than once, ascending; only a scheduler that draws repeats any."""
        return np.flatnonzero(self.times_drawn > 1)

    @property
    def ranks_in_step(self) -> int:
        """How many successive batches ranks train in one step; 1 in the share of one rank."""
        return 1 if self._world_size > 1 else self.source.world_size

    def shard(self, rank: int, world_size: int) -> BatchPlan:
        """The batches of one rank: every `world_size`-th, so that one step's batches are neighbours in the plan.

        Raises:
            OptionError: an uneven plan: ranks with fewer steps would leave the others waiting for ever.
        """
        if not 0 <= rank < world_size:
            raise OptionError(f"rank must lie in [0, {world_size}), found {rank}")
        if self._world_size > 1:
            raise OptionError(f"this plan is already the share of rank {self._rank} of {self._world_size}")
        if self.source.world_size % world_size and len(self) % world_size:
            raise OptionError(
                f"{len(self)} batches cannot be shared evenly by {world_size} ranks; "
                f"plan with world_size={world_size}, which splits batches until they can"
            )
        return BatchPlan(self.source, self.sizes, start=self._start, rank=rank, world_size=world_size)

    def skip(self, num_steps: int) -> BatchPlan:
        """The same plan without its first `num_steps` batches (of this rank); plans the blocks that it passes over."""
        start = self._after(num_steps)
        return BatchPlan(self.source, self.sizes, start=start, rank=self._rank, world_size=self._world_size)

    def state_dict(self, num_steps: int) -> dict[str, Any]:
        """The position after `num_steps` batches (of this rank): a few integers, the same on every rank.

        `scheduler.resume(sizes, state)` gives the rest of the epoch, also for another number of ranks.
        """
        return self.source.state(self._after(num_steps))

    def report(
        self, *, budget: float | None = None, num_ranks: int | None = None, following: BatchPlan | None = None
    ) -> PlanReport:
        """Waste, cost, balance, randomness and coverage.

        Args:
            budget: what costs are measured against, the plan's own budget when None.
            num_ranks: ranks that share consecutive batches; None takes those it was planned for, or 8; 1 for one rank's share.
            following: the next epoch's plan, for `randomness`; None makes it, if this is the plan of a whole
                epoch.

        Raises:
            OptionError: a budget or a number of ranks out of range, or a `following` of other data.
        """
        check_numbers({"budget": budget, "ranks": num_ranks})
        if following is not None and len(following.sizes) != len(self.sizes):
            raise OptionError(f"following plans {len(following.sizes)} samples, this plan {len(self.sizes)}")
        source, whole = self.source, self._world_size == 1 and self._start == _START
        if following is None and whole and isinstance(source, EpochBlocks):
            following = BatchPlan(source.next_epoch(self.sizes), self.sizes)
        if num_ranks is None:
            num_ranks = self.ranks_in_step if source.world_size > 1 else 8
        return report_plan(self, budget=budget, num_ranks=num_ranks, following=following)

    def __repr__(self) -> str:
        return f"BatchPlan({len(self)} batches of {len(self.columns.order)} samples)"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _blocks(self, start: Position) -> Iterator[tuple[int, int, Block]]:
        """Number of each block, number of this rank's first batch in it, and this rank's batches."""
        num_before = 0
        for number in range(start.block, self.source.num_blocks):
            block = self.source.build(number)
            first = start.batch if number == start.block else 0
            mine = first + (self._rank - num_before) % self._world_size
            num_before += len(block.ends) - first
            if self._world_size > 1 or first:
                block = block.pick(np.arange(mine, len(block.ends), self._world_size))
            yield number, mine, block

    def _after(self, num_steps: int) -> Position:
        if num_steps < 0:
            raise OptionError(f"num_steps must not be negative, found {num_steps}")
        return self._settle(self._start.block, self._start.batch + num_steps * self._world_size)

    def _settle(self, block: int, batch: int) -> Position:
        """The position `batch` batches after the start of a block, carried over into later blocks."""
        while block < self.source.num_blocks:
            num_batches = len(self.source.build(block).ends)
            if batch < num_batches:
                return Position(block, batch)
            block, batch = block + 1, batch - num_batches
        return Position(block, 0)


class PlanIterator(Iterator[list[int]]):
    """Walks over a plan, one block in memory at a time; a `Stateful` iterator as torchdata understands it."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._ends: list[int]
        self._next: int  # number of the end, in `_ends`, of the batch to come
        self._start_from(plan._start)

    def __next__(self) -> list[int]:
        while self._next == len(self._ends):
            self._block, self._mine, columns = next(self._blocks)
            self._order, self._ends, self._next = columns.order, [0, *columns.ends.tolist()], 1
        batch = self._order[self._ends[self._next - 1] : self._ends[self._next]].tolist()
        self._next += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands; the same integers as `BatchPlan.state_dict`."""
        plan, position = self._plan, self._from
        if self._next > 1:  # the step of the last batch is done on every rank
            last = self._mine + (self._next - 2) * plan._world_size
            position = plan._settle(self._block, last - plan._rank + plan._world_size)
        return plan.source.state(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this plan, without iterating up to it."""
        self._start_from(self._plan.source.locate(state))

    def _start_from(self, position: Position) -> None:
        self._from, self._blocks = position, self._plan._blocks(position)
        self._block, self._mine = position
        self._order, self._ends, self._next = np.empty(0, np.int64), [0], 1
