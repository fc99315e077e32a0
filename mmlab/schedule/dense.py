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
from mmlab.schedule.collisions import images_of, resolve_collisions
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.cost import FREE, PaddedTokens, costliest_sample, max_batch_size, polynomial_of
from mmlab.schedule.metrics import lengths, sides, work
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
        max_batch_size: the most samples a batch may have.
    """

    budget: float | None = None
    cost: CostModel = field(default_factory=PaddedTokens)
    allow_collisions: bool = False
    window: int | None = None
    overhead_ratio: float = 0.03
    max_batch_size: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and not self.budget > 0:
            raise OptionError(f"budget must be above 0 {self.cost.unit}, found {self.budget}")
        require_at_least("window", 1 if self.window is None else self.window, 1)
        require_at_least("overhead_ratio", self.overhead_ratio, 0)
        require_at_least("max_batch_size", self.max_batch_size, 1)

    def limits(self, sizes: SampleSizes) -> Limits:
        budget = self.budget
        if budget is None:
            budget = DEFAULT_MEAN_SAMPLES * self._cost_of_one(*mean_lengths(sizes, self._patch))
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

    def block_size(self, num_samples: int) -> int:
        return max(BLOCK_SIZE, self.window or 0)

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        window = self.window or min(BLOCK_SIZE, max(_SMALLEST_WINDOW, len(sizes) // 3))
        num_windows = max(1, round(len(rows) / window))
        if self.allow_collisions or not len(rows):
            return self._cut_windows(
                sizes, rows, np.arange(len(rows)) * num_windows // max(1, len(rows)), limits
            )
        batches = self._cut_windows(sizes, rows, _deal_images(sizes, rows, num_windows, rng), limits)
        assert limits.budget is not None
        if (polynomial := polynomial_of(self.cost)) is None:
            batches, put_out = resolve_collisions(sizes, batches, FREE, limits.budget, reach=0)
        else:
            batches, put_out = resolve_collisions(sizes, batches, polynomial, limits.budget)
        turn = images_of(sizes, put_out).occurrence  # samples of one turn are all of different images
        return Block.join([batches, self._cut_windows(sizes, put_out, turn, limits)])

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        if not len(batches.ends):
            return batches
        text, high, wide = sides(sizes, self._patch, batches.order)
        longest, tallest, widest = (batches.largest(side) for side in (text, high, wide))
        batch_work = batches.counts * (work(longest) + work(tallest * widest))
        sample_work = batches.totals(work(text) + work(high * wide))
        return balance(batches, batch_work, sample_work, self.world_size, rng)

    @property
    def _patch(self) -> int:
        return getattr(self.cost, "patch", PATCH)

    def _cost_of_one(self, text: float, image: float) -> float:
        """Cost of an average sample, its image taken as a square where the model must see one."""
        if polynomial := polynomial_of(self.cost):
            return float(polynomial.at(1, text, image))
        side = round(image**0.5) * self._patch
        return self.cost(BatchShape(1, round(text), side, side))

    def _cut_windows(self, sizes: SampleSizes, rows: Ints, window: Ints, limits: Limits) -> Block:
        """Batches of `rows` that stay inside a window, in the order of the windows and of size in each."""
        if not len(rows):
            return Block(rows, np.empty(0, np.int64))
        text, high, wide = sides(sizes, self._patch, rows)
        by_size = _order_by(window, aspect_class(high, wide, _CLASSES_PER_OCTAVE), high, wide, text)
        rows, window = rows[by_size], window[by_size]
        polynomial, budget = polynomial_of(self.cost), limits.budget
        assert budget is not None
        if polynomial is None:
            return Block(rows, self._cut_greedily(sizes, rows, window, budget))
        from mmlab.schedule._dense_loops import cut_optimally

        mean_text, mean_area = text.mean(), (high * wide).mean()
        side = round(mean_area**0.5) * self._patch
        num_mean = max_batch_size(self.cost, round(mean_text), side, side, budget)
        overhead = self.overhead_ratio * (num_mean * (mean_text + mean_area))
        ends = cut_optimally(
            *(side[by_size] for side in (text, high, wide)), window, polynomial.coefficients,
            polynomial.exponents, float(budget), overhead, self.max_batch_size,
        )  # fmt: skip
        return Block(rows, ends)

    def _cut_greedily(self, sizes: SampleSizes, rows: Ints, window: Ints, budget: float) -> Ints:
        """Ends of batches that are each as long as the budget allows, for cost models that cannot be compiled.

        The padded shape of the first k samples, and so its cost, never falls when k grows: the largest k is found by
        bisection.
        """
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


def mean_lengths(sizes: SampleSizes, patch: int) -> tuple[float, float]:
    """Mean text tokens and image patches of a sample; of 262,144 spread over the data where there are more.

    Those lie at multiples of the golden ratio, so that no period in the data (captions, sources in turn) misleads.
    """
    if not len(sizes):
        return 0.0, 0.0
    some: NDArray[np.uint64] | slice = slice(None)
    if len(sizes) > _SURVEYED:
        spread = np.arange(_SURVEYED, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        some = ((spread >> np.uint64(32)) * np.uint64(len(sizes))) >> np.uint64(32)
    text, image = lengths(sizes, patch, some)
    return float(text.mean()), float(image.mean())


def _deal_images(sizes: SampleSizes, rows: Ints, num_windows: int, rng: np.random.Generator) -> Ints:
    """(n,) window of each row: samples of one image go round the windows from a random one.

    There are as many windows as half of the samples have on their image, if that is more than asked for: samples of one
    image may not meet in a batch anyway, and separating them beforehand pads less than exchanging them afterwards.
    """
    images = images_of(sizes, rows)
    of_one_image = np.sort(np.bincount(images.number)[images.number])
    num_windows = max(num_windows, int(of_one_image[len(rows) // 2]))
    first_window = rng.integers(num_windows, size=len(images.starts) - 1)
    return (first_window[images.number] + images.occurrence) % num_windows


def _order_by(*keys: Ints) -> Ints:
    """Stable order by several columns of whole numbers >= 0, the most important first."""
    spans = [int(key.max()) + 1 for key in keys]
    if np.prod([float(span) for span in spans]) >= 2**62:
        return np.lexsort(keys[::-1])
    combined = keys[0]
    for key, span in zip(keys[1:], spans[1:], strict=True):
        combined = combined * span + key
    return np.argsort(combined, kind="stable")
