"""The dense planner: variable batches of similar samples, filled to a hard budget (`budget`, `memory`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmlab.cost import MaxPolynomial, PaddedTokens
from mmlab.errors import OptionError
from mmlab.schedule.base import BatchScheduler
from mmlab.schedule.classic import aspect_class
from mmlab.schedule.plan import Block
from mmlab.types import BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import CostModel, SampleSizes

_MAX_BATCH_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class Budget(BatchScheduler):
    """As many similar samples a batch as a hard cost budget allows.

    Args:
        budget: the most that a batch may cost; None takes 32 average samples.
        cost: what a batch costs, never falling in any dimension.
        max_batch_size: the most samples a batch may have.
    """

    budget: float | None = None
    cost: CostModel = field(default_factory=PaddedTokens)
    max_batch_size: int = _MAX_BATCH_SIZE

    def limits(self, sizes: SampleSizes) -> tuple[CostModel, float]:
        largest = _dearest(sizes, self.cost)
        if self.budget is None:
            some = sizes.take(np.arange(0, len(sizes), max(1, len(sizes) // 65536)))
            patches = -(-some.height.astype(np.int64) // 16) * -(-some.width.astype(np.int64) // 16)
            mean = float((some.num_tokens + patches).mean()) if len(some) else 0.0
            return self.cost, max(32 * mean, largest[1])
        if largest[1] > self.budget:
            row, price = largest
            raise OptionError(
                f"sample {row} alone ({sizes.num_tokens[row]} tokens, {sizes.height[row]} x {sizes.width[row]} pixels) "
                f"costs {price:.0f} {self.cost.unit}, above the budget of {self.budget:.0f}; "
                "raise the budget, cut the text or shrink the image"
            )
        return self.cost, self.budget

    def block_size(self, num_samples: int) -> int:
        return 16384

    def cut(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, budget: float | None
    ) -> Block:
        from mmlab.schedule.dense_cut import cut_optimally  # loads numba

        assert budget is not None
        text, high, wide = sizes.num_tokens[rows], -(-sizes.height[rows] // 16), -(-sizes.width[rows] // 16)
        by_size = np.lexsort((text, wide, high, aspect_class(sizes, rows)))
        polynomial = self.cost.as_polynomial() if isinstance(self.cost, PaddedTokens) else self.cost
        assert isinstance(polynomial, MaxPolynomial)
        ends = cut_optimally(
            text[by_size].astype(np.int64),
            high[by_size].astype(np.int64),
            wide[by_size].astype(np.int64),
            polynomial.coefficients,
            polynomial.exponents,
            float(budget),
            0.02 * budget,
            self.max_batch_size,
        )
        block = Block(rows[by_size], ends)
        return block.pick(rng.permutation(len(ends)))


def _dearest(sizes: SampleSizes, cost: CostModel) -> tuple[int, float]:
    """Row and cost of the sample that costs most by itself."""
    if not len(sizes):
        return -1, 0.0
    kinds, first = np.unique(
        np.stack((sizes.num_tokens, sizes.height, sizes.width), axis=1), axis=0, return_index=True
    )
    prices = [cost(BatchShape(1, *map(int, kind))) for kind in kinds]
    dearest = int(np.argmax(prices))
    return int(first[dearest]), prices[dearest]
