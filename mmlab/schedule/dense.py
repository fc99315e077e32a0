"""The dense planner: variable batches of like samples, filled to a hard budget (`budget`, `memory`).

Samples are ordered by (aspect class, patch rows, patch columns, tokens) inside random windows, and each window is cut
where padding is least, under the budget of every batch. Batches are then matched for the ranks and shuffled. About a
microsecond a sample. Any cost model that never falls will do; those that are polynomials are cut in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mmlab.errors import OptionError
from mmlab.schedule.base import BLOCK_SIZE, Scheduler, require_at_least
from mmlab.schedule.classic import aspect_class
from mmlab.schedule.collisions import occurrences, resolve_collisions
from mmlab.schedule.columns import Block, Limits
from mmlab.schedule.cost import FREE, PaddedTokens, costliest_sample, max_batch_size, polynomial_of
from mmlab.schedule.metrics import cells, work
from mmlab.schedule.ranks import balance
from mmlab.types import PATCH, BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import CostModel, SampleSizes

DEFAULT_MEAN_SAMPLES = 32  # the budget where none is given
_SURVEYED = 2**18  # samples from which means are taken
_SMALLEST_WINDOW = 2048
_CLASSES_PER_OCTAVE = 8


@dataclass(frozen=True, kw_only=True)
class Budget(Scheduler):
    """As many like samples a batch as a hard cost budget allows; never above it.

    When to use: training with images of different shapes, texts of different lengths, or both.

    Args:
        budget: the most that a batch may cost; None takes 32 average samples.
        cost: what a batch costs; must never fall when a dimension grows.
        allow_collisions: whether a batch may hold two samples of one image.
        window: samples ordered together; a larger one pads less, a smaller one mixes more. None takes a third of the
            epoch, at most 32,768.
        overhead_ratio: what a batch costs besides its samples, as a share of a full one; a larger value gives fewer,
            fuller batches with more padding.
        min_batch_size, multiple_of: sizes that batches have where the budget allows.
        max_batch_size: the most samples a batch may have.
    """

    budget: float | None = None
    cost: CostModel = field(default_factory=PaddedTokens)
    allow_collisions: bool = False
    window: int | None = None
    overhead_ratio: float = 0.03
    min_batch_size: int = 1
    max_batch_size: int = 4096
    multiple_of: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and not self.budget > 0:
            raise OptionError(f"budget must be above 0 {self.cost.unit}, found {self.budget}")
        require_at_least("window", 1 if self.window is None else self.window, 1)
        require_at_least("overhead_ratio", self.overhead_ratio, 0)
        require_at_least("min_batch_size", self.min_batch_size, 1)
        require_at_least("max_batch_size", self.max_batch_size, self.min_batch_size)
        require_at_least("multiple_of", self.multiple_of, 1)

    def limits(self, sizes: SampleSizes) -> Limits:
        budget = self.budget
        if budget is None:
            text, image = mean_sizes(sizes, _patch_of(self.cost))
            budget = DEFAULT_MEAN_SAMPLES * self._price_of(text, image)
        row, price = costliest_sample(self.cost, sizes, enough=budget)
        if price > budget and self.budget is None:
            budget = price
        if price > budget:
            raise OptionError(
                f"sample {row} alone ({sizes.num_tokens[row]} tokens, {sizes.height[row]} x {sizes.width[row]} pixels) "
                f"costs {price:.6g} {self.cost.unit}, above the budget of {budget:.6g}; "
                f"raise the budget to {price:.6g} or more, or cut the text or the image"
            )
        return Limits(self.cost, budget)

    def _price_of(self, text: float, image: float) -> float:
        """Cost of an average sample, its image taken as a square where the model must see one."""
        if polynomial := polynomial_of(self.cost):
            return float(polynomial.at(1, text, image))
        side = round(image**0.5) * _patch_of(self.cost)
        return self.cost(BatchShape(1, round(text), side, side))

    def block_size(self, num_samples: int) -> int:
        return max(BLOCK_SIZE, self.window or 0)

    def make_batches(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, limits: Limits
    ) -> Block:
        window = self.window or min(BLOCK_SIZE, max(_SMALLEST_WINDOW, len(sizes) // 3))
        num_windows = max(1, round(len(rows) / window))
        if self.allow_collisions or not len(rows):
            return self._cut_windows(
                sizes, rows, np.arange(len(rows)) * num_windows // max(1, len(rows)), limits
            )
        batches = self._cut_windows(sizes, rows, _deal_images(sizes, rows, num_windows, rng), limits)
        polynomial = polynomial_of(self.cost)
        assert limits.budget is not None
        if polynomial is None:
            batches, put_out = resolve_collisions(sizes, batches, FREE, limits.budget, reach=0)
        else:
            batches, put_out = resolve_collisions(sizes, batches, polynomial, limits.budget)
        extra = self._cut_windows(sizes, put_out, occurrences(sizes, put_out), limits)
        return Block.join([batches, extra])

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        if not len(batches.ends):
            return batches
        patch, (order, _), starts = _patch_of(self.cost), batches, batches.starts
        text = sizes.num_tokens[order]
        high, wide = cells(sizes.height[order], patch), cells(sizes.width[order], patch)
        most = [np.maximum.reduceat(side, starts) for side in (text, high, wide)]
        batch_work = batches.counts * (work(most[0]) + work(most[1] * most[2]))
        sample_work = np.add.reduceat(work(text) + work(high * wide), starts)
        return balance(batches, batch_work, sample_work, self.world_size, rng)

    def _cut_windows(
        self, sizes: SampleSizes, rows: NDArray[np.int64], window: NDArray[np.int64], limits: Limits
    ) -> Block:
        """Batches of `rows` that stay inside a window, in the order of the windows and of size in each."""
        if not len(rows):
            return Block(rows, np.empty(0, np.int64))
        patch = _patch_of(self.cost)
        text = sizes.num_tokens[rows].astype(np.int64)
        high, wide = cells(sizes.height[rows], patch), cells(sizes.width[rows], patch)
        aspect = aspect_class(high, wide, _CLASSES_PER_OCTAVE)
        by_size = _order_by(window, aspect, high, wide, text)
        polynomial = polynomial_of(self.cost)
        assert limits.budget is not None
        if polynomial is None:
            ends = self._cut_greedily(sizes, rows[by_size], window[by_size], limits.budget)
            return Block(rows[by_size], ends)
        from mmlab.schedule._dense_loops import cut_optimally

        mean_text, mean_area = text.mean(), (high * wide).mean()
        side = round(mean_area**0.5) * patch
        full = max_batch_size(self.cost, round(mean_text), side, side, limits.budget) * (
            mean_text + mean_area
        )
        ends = cut_optimally(
            text[by_size],
            high[by_size],
            wide[by_size],
            window[by_size],
            polynomial.coefficients,
            polynomial.exponents,
            float(limits.budget),
            self.overhead_ratio * full,
            self.min_batch_size,
            self.max_batch_size,
            self.multiple_of,
            1e6 * full,
        )
        return Block(rows[by_size], ends)

    def _cut_greedily(
        self, sizes: SampleSizes, rows: NDArray[np.int64], window: NDArray[np.int64], budget: float
    ) -> NDArray[np.int64]:
        """Ends of batches that are each as long as the budget allows, for cost models that cannot be compiled."""
        columns = [column[rows] for column in (sizes.num_tokens, sizes.height, sizes.width)]
        ends, start = [], 0
        while start < len(rows):
            stop = min(start + self.max_batch_size, int(np.searchsorted(window, window[start], side="right")))
            most = [np.maximum.accumulate(column[start:stop]) for column in columns]
            least, beyond = 1, stop - start + 1
            while beyond - least > 1:
                size = (least + beyond) // 2
                if self.cost(BatchShape(size, *(int(column[size - 1]) for column in most))) <= budget:
                    least = size
                else:
                    beyond = size
            if least > self.multiple_of:
                least -= least % self.multiple_of
            start += least
            ends.append(start)
        return np.array(ends, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Memory(Budget):
    """The same with bytes as the cost: the largest batches that a memory model says will fit.

    When to use: a fitted memory model is at hand and the device should be full, but never run out.

    Args:
        cost: a cost model in bytes.
        budget: bytes of the device that training may use.
        target_ratio: share of `budget` that a batch is planned for; the rest is margin for what the model misses.
        overhead_ratio: as for `Budget`; higher, because memory that stays empty is what this scheduler is to avoid.
    """

    target_ratio: float = 0.97
    overhead_ratio: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost.unit != "bytes" or self.budget is None:
            raise OptionError(
                f"scheduler 'memory' needs a cost model in bytes and a budget, found a cost in {self.cost.unit} and "
                f"budget={self.budget}; give cost=<memory model>, budget=<bytes of the device>"
            )
        if not 0 < self.target_ratio <= 1:
            raise OptionError(f"target_ratio must lie in (0, 1], found {self.target_ratio}")

    def limits(self, sizes: SampleSizes) -> Limits:
        assert self.budget is not None
        return Budget.limits(replace(self, budget=self.target_ratio * self.budget), sizes)


def mean_sizes(sizes: SampleSizes, patch: int) -> tuple[float, float]:
    """Mean text tokens and image patches of a sample; of 262,144 spread over the data where there are more.

    Those lie at multiples of the golden ratio, so that no period in the data (captions, sources in turn) misleads.
    """
    if not len(sizes):
        return 0.0, 0.0
    some: NDArray[np.uint64] | slice = slice(None)
    if len(sizes) > _SURVEYED:
        spread = np.arange(_SURVEYED, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        some = ((spread >> np.uint64(32)) * np.uint64(len(sizes))) >> np.uint64(32)
    patches = cells(sizes.height[some], patch) * cells(sizes.width[some], patch)
    return float(sizes.num_tokens[some].mean()), float(patches.mean())


def _deal_images(
    sizes: SampleSizes, rows: NDArray[np.int64], num_windows: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """(n,) window of each row: samples of one image go round the windows from a random one.

    There are as many windows as half of the samples have on their image, if that is more than asked for: samples of one
    image may not meet in a batch anyway, and parting them beforehand pads less than exchanging them afterwards.
    """
    from mmlab.schedule._groups import number_groups

    image, occurrence, num_images = number_groups(sizes.group[rows])
    of_one_image = np.sort(np.bincount(image)[image])
    num_windows = max(num_windows, int(of_one_image[len(rows) // 2]))
    return (rng.integers(num_windows, size=num_images)[image] + occurrence) % num_windows


def _order_by(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Stable order by several columns of whole numbers >= 0, the most important first."""
    spans = [int(key.max()) + 1 for key in keys]
    if np.prod([float(span) for span in spans]) >= 2**62:
        return np.lexsort(keys[::-1])
    combined = keys[0]
    for key, span in zip(keys[1:], spans[1:], strict=True):
        combined = combined * span + key
    return np.argsort(combined, kind="stable")


def _patch_of(cost: CostModel) -> int:
    return getattr(cost, "patch", PATCH)
