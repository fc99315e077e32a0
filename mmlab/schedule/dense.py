"""The dense planner: variable batches of similar samples under a hard budget (`budget`, `memory`, `fastest`).

Samples are ordered by (aspect class, patch rows, patch columns, tokens) inside random windows, and each
window is cut into batches that minimise the sum of an objective, each within the budget. The objective is
predicted seconds where a time model is given, else padded tokens and an overhead for each batch. With a time
model a second order, by tokens before patches, is tried, and up to eight ways to deal the captions of one image over
the windows; the cheapest cut is taken. Batches of similar
work then form the steps of the ranks, in random order. Takes about a microsecond per sample, in compiled
code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, check_is
from mmlab.schedule import cost as costs
from mmlab.schedule.base import BLOCK_SIZE, Scheduler
from mmlab.schedule.classic import aspect_class
from mmlab.schedule.collisions import images_of, resolve_collisions
from mmlab.schedule.columns import Block, Ints, Limits, stable_order
from mmlab.schedule.metrics import lengths, sides, work
from mmlab.schedule.ranks import balance
from mmlab.types import PATCH, CostModel, SampleSizes

DEFAULT_MEAN_SAMPLES = 32  # the budget where none is given
_SURVEYED = 2**18  # samples from which means are taken
_SMALLEST_WINDOW = 2048
_FEW_WINDOWS = 3
_MOST_TRIES = 8


@dataclass(frozen=True, kw_only=True)
class Budget(Scheduler):
    """As many similar samples per batch as a hard cost budget allows; never above it.

    When to use: training with images of different shapes, texts of different lengths, or both.

    Args:
        budget: the most that a batch may cost; None takes 32 average samples.
        cost: what a batch costs; must never fall when a dimension grows.
        allow_collisions: whether a batch may hold two samples of one image.
        time: a polynomial cost model in seconds; batches are cut to minimise the sum of their predicted
            times. None cuts them to pad little.
        window: samples ordered together; a larger one pads less, a smaller one mixes more. None takes a third of the
            epoch, at most 32,768.
        max_batch_size: the most samples a batch may have.

    Raises:
        OptionError: a number out of range, a cost that is no polynomial, or a time that is not in seconds or
            counts other patches.
    """

    budget: float | None = None
    cost: CostModel = field(default_factory=costs.PaddedTokens)
    allow_collisions: bool = False
    time: CostModel | None = None
    window: int | None = None
    max_batch_size: int = 4096

    # what a batch costs besides its samples, as a share of a full one, if `time` is None
    _overhead_ratio = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is("cost", self.cost, "as_polynomial", "a cost model with as_polynomial()")
        if self.time is not None:
            self._check_time(self.time)

    def _check_time(self, time: CostModel) -> None:
        """Raise OptionError if this is no time model, or one of another model or setting than `cost`."""
        if (unit := getattr(time, "unit", "no unit")) != "seconds":
            raise OptionError(f"time must predict seconds, found {type(time).__name__} in {unit}")
        both = (time, self.cost)
        made_for = [{"model": getattr(m, "fingerprint", None), **getattr(m, "conditions", {})} for m in both]
        for name in ("model", "precision", "checkpointing"):
            of_time, of_cost = (setting.get(name) for setting in made_for)
            if None not in (of_time, of_cost) and of_time != of_cost:
                raise OptionError(f"time is of {name} {of_time}, cost of {name} {of_cost}; fit both alike")
        if (patch := getattr(time, "patch", PATCH)) != self._patch:
            raise OptionError(
                f"time counts image patches of {patch} pixels and cost those of {self._patch}; give both for one model"
            )

    def limits(self, sizes: SampleSizes) -> Limits:
        budget = self.budget
        if budget is None:
            text, image, _ = mean_lengths(sizes, self._patch)
            budget = DEFAULT_MEAN_SAMPLES * float(self.cost.as_polynomial().at(1, text, image))
            budget = max(budget, costs.costliest_sample(self.cost, sizes, enough=budget)[1])
        else:
            costs.check_samples_fit(self.cost, sizes, budget)
        return Limits(self.cost, budget, time=self.time)

    def block_size(self, num_samples: int) -> int:
        return max(BLOCK_SIZE, self.window or 0)

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        assert limits.budget is not None
        window = self.window or min(BLOCK_SIZE, max(_SMALLEST_WINDOW, len(sizes) // 3))
        num_windows = max(1, round(len(rows) / window))
        objective = self._objective(sizes, rows, limits.budget)
        budget = limits.budget * costs.ROUNDING
        cut = partial(self._cut_windows, sizes, budget=budget, objective=objective)
        if self.allow_collisions:
            return cut(rows, np.arange(len(rows)) * num_windows // len(rows))
        separate = partial(
            resolve_collisions, sizes, objective=objective, cut=cut, limit=self.cost.as_polynomial(),
            budget=budget, max_size=self.max_batch_size,
        )  # fmt: skip
        # few samples take some per cent longer or shorter, by how their images happen to be dealt
        num_tries = 1 if self.time is None else int(np.clip(BLOCK_SIZE // len(rows), 1, _MOST_TRIES))
        tried = [separate(cut(rows, _deal_images(sizes, rows, num_windows, rng))) for _ in range(num_tries)]

        def total(batches: Block) -> float:
            return float(_costs(objective, batches, *sides(sizes, self._patch, batches.order)).sum())

        return min(tried, key=total) if num_tries > 1 else tried[0]

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        text, high, wide = sides(sizes, self._patch, batches.order)
        if self.time is not None:
            batch_work = _costs(self.time.as_polynomial(), batches, text, high, wide)
        else:
            longest, tallest, widest = (batches.largest(side) for side in (text, high, wide))
            batch_work = batches.counts * (work(longest) + work(tallest * widest))
        sample_work = batches.totals(work(text) + work(high * wide))
        return balance(batches, batch_work, sample_work, self.world_size, rng)

    @property
    def _patch(self) -> int:
        return getattr(self.cost, "patch", PATCH)

    def _objective(self, sizes: SampleSizes, rows: Ints, budget: float) -> costs.MaxPolynomial:
        """The cost whose sum over the batches of these rows is to be minimised.

        Without a time model: padded tokens, and a share of a full batch of average samples for each batch.
        """
        if self.time is not None:
            return self.time.as_polynomial()
        text, area = (float(length.mean()) for length in lengths(sizes, self._patch, rows))
        side = round(area**0.5) * self._patch
        full = costs.max_batch_size(self.cost, round(text), side, side, budget) * (text + area)
        overhead = self._overhead_ratio * full
        exponents = np.array([(1, 1, 0), (1, 0, 1), (0, 0, 0)])
        return costs.MaxPolynomial(np.array([[1.0, 1.0, overhead]]), exponents, patch=self._patch)

    def _cut_windows(
        self, sizes: SampleSizes, rows: Ints, window: Ints, budget: float, objective: costs.MaxPolynomial
    ) -> Block:
        """Batches of `rows` that stay inside a window, ordered by window and, in each, by size."""
        from mmlab.schedule._dense_loops import cut_optimally

        text, high, wide = sides(sizes, self._patch, rows)
        orders = [_order_by(window, aspect_class(high, wide, 8), high, wide, text)]
        if self.time is not None:  # batches may mix image sizes, where that costs less than mixing texts
            octave = np.log2(np.maximum(text, 1)).astype(np.int64)
            orders.append(_order_by(window, octave, aspect_class(high, wide, 4), high, wide, text))
        polynomials, cuts = (self.cost.as_polynomial().columns, objective.columns), []
        for order in orders:
            columns = (column[order] for column in (text, high, wide, window))
            ends, total = cut_optimally(*columns, *polynomials, float(budget), self.max_batch_size)
            cuts.append((total, Block(rows[order], ends)))
        return min(cuts, key=lambda cut: cut[0])[1]


@dataclass(frozen=True, kw_only=True)
class Memory(Budget):
    """`Budget` with bytes as the cost: the largest batches that a memory model predicts to fit.

    When to use: a fitted memory model is at hand and the device should be full, but never run out.

    Args:
        cost: a cost model in bytes.
        budget: bytes of the device that training may use.
        target_ratio: share of `budget` that a batch is planned for; the rest is margin for what the model misses.
    """

    target_ratio: float = 0.97

    _overhead_ratio = 0.6  # high, because this scheduler must not leave memory empty

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost.unit != "bytes" or self.budget is None:
            raise OptionError(
                f"scheduler 'memory' needs a cost model in bytes and a budget, found a cost in {self.cost.unit} and "
                f"budget={self.budget}; give cost=<memory model>, budget=<bytes of the device> (in mmlab plan: --model)"
            )

    def limits(self, sizes: SampleSizes) -> Limits:
        assert self.budget is not None
        remedy = f"raise the budget to this cost / {self.target_ratio:g}, or cut the text or the image"
        limit = self.target_ratio * self.budget
        costs.check_samples_fit(self.cost, sizes, limit, remedy)
        return Limits(self.cost, limit, time=self.time)


@dataclass(frozen=True, kw_only=True)
class Fastest(Budget):
    """The epoch with the fewest predicted seconds under a hard limit on every batch.

    When to use: training should be fast. A step has a fixed cost besides its tokens, so the fastest plan may
    pad more than `budget` does and have fewer batches.

    Args:
        time: the cost model in seconds; must be given.
        cost: what the limit counts: padded tokens, or a memory model in bytes.
        budget: the limit.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time is None:
            raise OptionError(
                "scheduler 'fastest' needs a time model; give time=<a cost model in seconds> (on the command line "
                "--model NAME), or take the scheduler 'budget', which pads little without one"
            )


def _costs(
    cost: costs.MaxPolynomial, batches: Block, text: Ints, high: Ints, wide: Ints
) -> NDArray[np.float64]:
    """(b,) the cost of each batch, from the sides of its samples."""
    return cost.at(batches.counts, batches.largest(text), batches.largest(high) * batches.largest(wide))


def mean_lengths(sizes: SampleSizes, patch: int) -> tuple[float, float, int]:
    """Mean text tokens and image patches of a sample, and the largest number that divides the patches of every image.

    Taken from 262,144 samples spread over the data where there are more. Their spacing follows the golden
    ratio, so that periodic data (captions of one image, alternating sources) do not bias the means.
    """
    if not len(sizes):
        return 0.0, 0.0, 0
    some: NDArray[np.uint64] | slice = slice(None)
    if len(sizes) > _SURVEYED:
        spread = np.arange(_SURVEYED, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        some = ((spread >> np.uint64(32)) * np.uint64(len(sizes))) >> np.uint64(32)
    text, image = lengths(sizes, patch, some)
    return float(text.mean()), float(image.mean()), int(np.gcd.reduce(image))


def _deal_images(sizes: SampleSizes, rows: Ints, num_windows: int, rng: np.random.Generator) -> Ints:
    """(n,) window of each row: samples of one image go to successive windows, from a random one.

    There are as many windows as an image has samples (for 95 % of the samples, their image has no more), if
    that is more than `num_windows`: samples of one image may not share a batch anyway, and separating them
    beforehand pads less, and takes less time, than exchanging them afterwards. But each window ends every run
    of similar samples with a batch that is not full. So there are at most `_FEW_WINDOWS` where more would
    hold less than `_SMALLEST_WINDOW` samples each; exchanges do the rest.
    """
    images = images_of(sizes, rows)
    of_one_image = np.sort(np.bincount(images.number)[images.number])
    enough = max(_FEW_WINDOWS, len(rows) // _SMALLEST_WINDOW)
    num_windows = max(num_windows, min(int(of_one_image[len(rows) * 19 // 20]), enough))
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
    return stable_order(combined)
