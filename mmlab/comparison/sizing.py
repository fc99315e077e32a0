"""Makes the schedulers of a comparison from their names, with the largest batches that the comparison allows.

At equal memory the model is priced first, in bytes and in seconds, and each scheduler gets the largest batch
size or budget with which no batch of the whole comparison is predicted to need more than one limit. So a
scheduler that pads little may use the memory that others waste. All keep captions of one image apart, since
batches without that rule are easier to fill.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from mmlab.comparison.options import ComparisonOptions
from mmlab.comparison.preparation import COST, augmentation, model_of, with_sampling
from mmlab.errors import OptionError
from mmlab.machine import GIB, memory_limit
from mmlab.model.conversation_model import ConversationModel
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.plan_prices import prices_of
from mmlab.pricing.step_prices import packing, price_dataset
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time, loading_seconds
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import PaddedTokens, batch_costs, check_samples_fit
from mmlab.schedule.dense import Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import scheduler_type
from mmlab.types import CostModel

# a short fit of the time model: enough to rank schedulers, takes seconds for a small model
_SHORT: dict[str, Any] = {"num_probes": 12, "num_held_out": 4, "repeats": 4, "seconds": 15.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The schedulers, and the models that predict the bytes and seconds of their batches."""

    planners: dict[str, Scheduler]
    budget: float | None = None  # padded tokens a batch; None at equal memory
    memory: CostModel | None = None  # predicts a batch's bytes
    limit_bytes: float | None = None
    time: TimeModel | None = None  # predicts a batch's seconds
    packs: tuple[MemoryModel, TimeModel] | None = None  # both, for packed conversations

    def prices(self, plan: BatchPlan) -> tuple[CostModel | None, TimeModel | None]:
        """The models that predict bytes and seconds of a plan's batches."""
        return prices_of(plan, self.memory, self.time, self.packs)


def size_schedulers(
    names: Sequence[str], options: ComparisonOptions, dataset: Any, *, progress: bool = True
) -> Sized:
    """Make the schedulers of a comparison.

    Raises:
        OptionError: a sample needs more than the limit, or the model cannot be priced.
    """
    sizing = _Sizing(options, dataset, progress)
    if options.equal == "memory" and options.budget is None:
        return sizing.by_memory(names)
    return sizing.by_budget(names)


def as_configured(
    planners: Mapping[str, Scheduler], options: ComparisonOptions, dataset: Any, time: TimeModel | None = None
) -> Sized:
    """The schedulers as configured; the cost model of `memory`, if given, predicts the bytes of every run."""
    memory = next((planner for planner in planners.values() if isinstance(planner, Memory)), None)
    return Sized(
        planners=dict(planners),
        budget=_token_budget(options, dataset),
        memory=None if memory is None else memory.cost,
        limit_bytes=None if memory is None else memory.budget,
        time=time,
    )


def _token_budget(options: ComparisonOptions, dataset: Any) -> float:
    """Padded tokens a batch: the budget given, or the batch size times the mean cost of a sample."""
    return options.budget or options.batch_size * float(batch_costs(COST, dataset.sizes.alone).mean())


class _Sizing:
    """Finds batch sizes and budgets by planning the comparison with each candidate; nothing is decoded."""

    memory: MemoryModel
    time: TimeModel | None = None
    packs: tuple[MemoryModel, TimeModel] | None = None

    def __init__(self, options: ComparisonOptions, dataset: Any, progress: bool) -> None:
        self.options, self.dataset, self.progress = options, dataset, progress

    def by_budget(self, names: Sequence[str]) -> Sized:
        """One budget, or one batch size, for all."""
        options, dataset, planners = self.options, self.dataset, {}
        budget = _token_budget(options, dataset)
        time = self._fit_time(model_of(options, dataset), COST, budget) if "fastest" in names else None
        for name in names:
            if name == "memory":
                limit_bytes = memory_limit(options.device, memory_gb=options.memory_gb).usable_bytes
                memory, _ = self._fit_memory(model_of(options, dataset))
                planners[name] = self._scheduler(name, cost=memory, budget=limit_bytes)
            else:
                own = {"time": time} if name == "fastest" else {}
                planners[name] = self._scheduler(name, batch_size=options.batch_size, budget=budget, **own)
        return as_configured(planners, options, dataset, time)

    def by_memory(self, names: Sequence[str]) -> Sized:
        """One limit of bytes for all."""
        options, dataset, model = self.options, self.dataset, model_of(self.options, self.dataset)
        memory, time = self._fit_memory(model)
        self.memory = memory
        if options.memory_gb is None:
            baseline = self._make("random", options.batch_size)
            limit_bytes = max(map(self._peak_bytes, self._plans(baseline)))
        else:
            limit_bytes = memory_limit(options.device, memory_gb=options.memory_gb).usable_bytes
            check_samples_fit(
                memory, dataset.sizes, limit_bytes, "raise memory_gb, take a smaller model or smaller images"
            )
            baseline = self._largest("random", limit_bytes)
        self.time = time = time or self._fit_time(model, memory, limit_bytes)
        planners = {}
        for name in names:
            if name == "random":
                planners[name] = baseline
            elif name in ("memory", "fastest"):
                planners[name] = self._scheduler(name, cost=memory, budget=limit_bytes, time=time)
            elif name == "packed" and isinstance(model, ConversationModel):
                self.packs = self._price(packing(model, dataset))
                planners[name] = self._scheduler(name, cost=self.packs[0], budget=limit_bytes)
            elif name == "packed":  # cannot be priced: gets the baseline's most padded tokens as its budget
                tokens = max(float(plan.costs(COST).max()) for plan in self._plans(baseline))
                planners[name] = self._make(name, int(tokens))
            else:
                planners[name] = self._largest(name, limit_bytes)
        return Sized(planners=planners, memory=memory, limit_bytes=limit_bytes, time=time, packs=self.packs)

    def _scheduler(self, name: str, **values: Any) -> Scheduler:
        """A scheduler with those `values` that are its options; all keep captions apart and share a seed."""
        kind = scheduler_type(name)
        return kind(**kind.options_among({"seed": self.options.seed, "allow_collisions": False, **values}))

    def _make(self, name: str, size: int) -> Scheduler:
        """A scheduler with `size` samples, or padded tokens, a batch."""
        cost = PaddedTokens(self.memory.patch)
        return self._scheduler(name, batch_size=size, budget=size, cost=cost, time=self.time)

    def _plans(self, scheduler: Scheduler) -> Iterator[BatchPlan]:
        """The plans of all epochs."""
        planner, _ = with_sampling(scheduler, self.dataset, self.options, progress=False)
        return (planner.plan(self.dataset.sizes, epoch=epoch) for epoch in range(self.options.epochs))

    def _largest(self, name: str, limit_bytes: float) -> Scheduler:
        """The scheduler with the largest size that fits: at most all samples, or their padded tokens.

        The search plans a few epochs only; the size is reduced afterwards if a later epoch needs more.
        """
        least, first, most = 1, self.options.batch_size, len(self.dataset.sizes)
        if "budget" in scheduler_type(name).__dataclass_fields__:
            tokens = batch_costs(COST, self.dataset.sizes.alone)
            least = first = math.ceil(tokens.max())
            most = int(tokens.sum())

        def fits(size: int, num_epochs: int | None = 3) -> bool:
            plans = islice(self._plans(self._make(name, size)), num_epochs)
            return all(self._peak_bytes(plan) <= limit_bytes for plan in plans)

        size = largest_fitting(fits, least=least, first=first, most=most)
        while not fits(size, None):
            if size == least:
                raise OptionError(
                    f"scheduler {name!r} cannot keep within {limit_bytes / GIB:.2g} GiB: as many padded tokens as its "
                    "largest sample has need more in small samples; raise memory_gb, or leave the scheduler out"
                )
            size = max(least, size - 1 - size // 100)
        return self._make(name, size)

    def _peak_bytes(self, plan: BatchPlan) -> float:
        return float(batch_costs(self.memory, plan.shape_columns).max())

    def _fit_memory(self, model: nn.Module) -> tuple[MemoryModel, TimeModel | None]:
        """The memory model of a step, and its time model if pricing the model measures steps anyway."""
        if isinstance(model, ConversationModel):
            return self._price(model)
        device, precision = self.options.device.partition(":")[0], self.options.precision
        memory = fit_memory(model, num_held_out=0, progress=self.progress, device=device, precision=precision)
        return memory, None

    def _price(self, model: ConversationModel) -> tuple[MemoryModel, TimeModel]:
        own = {name: getattr(self.options, name) for name in ("precision", "num_workers")}
        return price_dataset(model.to(self.options.device), self.dataset, **own)

    def _fit_time(self, model: nn.Module, cost: CostModel, budget: float) -> TimeModel:
        """A time model from a short fit; the comparison's notes say how noisy the machine was."""
        if isinstance(model, ConversationModel):
            return self._price(model)[1]
        options, dataset, device = self.options, self.dataset, self.options.device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="repeats of one step lie")
            return fit_time(
                model, dataset.sizes, cost=cost, budget=budget, device=device, precision=options.precision,
                loading=loading_seconds(
                    dataset, device=device, num_workers=options.num_workers, augment=augmentation(options.augment)
                ),
                progress=self.progress, **_SHORT,
            )  # fmt: skip


def largest_fitting(fits: Callable[[int], bool], *, least: int = 1, first: int, most: int) -> int:
    """The largest number up to `most` that fits, to within 1 %; `least` if none does.

    Assumes that everything below a number that fits also fits.

    >>> largest_fitting(lambda number: number <= 41, first=8, most=1000)
    41
    """
    low, high = least, first
    while high < most and fits(high):
        low, high = high, 2 * high
    if high >= most and fits(most):
        return most
    high = min(high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
