"""Makes the schedulers of a comparison from their names, with the largest batches that the comparison allows.

At equal memory the model is priced first, in bytes and in seconds, and each scheduler gets the largest batch
size or budget with which no batch of the whole comparison is predicted to need more than one limit. So a
scheduler that pads little may use the memory that others waste. All keep captions of one image apart, since
batches without that rule are easier to fill.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from mmlab.comparison.options import ComparisonOptions
from mmlab.comparison.preparation import COST, augmentation, model_of, with_sampling
from mmlab.machine import memory_limit
from mmlab.model.conversation_model import ConversationModel
from mmlab.model.packing import enable_packing
from mmlab.pricing.equal_memory import EqualMemory
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.plan_prices import StepModels
from mmlab.pricing.step_prices import packing, peak_of, price_dataset, take_first_step
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time, loading_seconds, timed_step, timed_trainer
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import batch_costs, check_samples_fit
from mmlab.schedule.dense import Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import scheduler_among
from mmlab.types import CostModel

# a short fit of the time model: enough to plan and to rank schedulers, takes seconds for a small model
SHORT_FIT: dict[str, Any] = {"num_probes": 12, "num_held_out": 4, "seconds": 15.0}
_TIMED_PACKS, _TIMED_ROUNDS = 5, 4  # packs of pairs that are timed, and how often; the first round prepares


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized(StepModels):
    """The schedulers, and the models that predict the bytes and seconds of their batches."""

    planners: dict[str, Scheduler]
    budget: float | None = None  # padded tokens a batch; None at equal memory
    limit_bytes: float | None = None


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


def largest_batches(plan: BatchPlan, memory: CostModel | None) -> dict[str, tuple[float, list[int]]]:
    """The batches of a plan that may need the most bytes, each with its size by one measure and its samples.

    That is one if `memory` predicts bytes. Else it is the batch with the most tokens and patches, or the one with
    the most padded pixels: packed images are padded until the first layer has cut them into patches.
    """
    if memory is not None:
        measures = {"bytes": plan.costs(memory)}
    else:
        area = plan.shape_columns[:, [0, 2, 3]].prod(axis=1)
        measures = {"tokens": plan.costs(COST), "pixels": area.astype(np.float64)}
    found = {}
    for name, sizes in measures.items():
        place, batches = int(sizes.argmax()), plan.columns
        found[name] = float(sizes[place]), batches.order[batches.starts[place] : batches.ends[place]].tolist()
    return found


def _token_budget(options: ComparisonOptions, dataset: Any) -> float:
    """Padded tokens a batch: the budget given, or the batch size times the mean cost of a sample."""
    return options.budget or options.batch_size * float(batch_costs(COST, dataset.sizes.alone).mean())


class _Sizing:
    """Finds batch sizes and budgets by planning the comparison with each candidate; only packs of pairs are loaded."""

    def __init__(self, options: ComparisonOptions, dataset: Any, progress: bool) -> None:
        self.options, self.dataset, self.progress = options, dataset, progress
        # of all schedulers: all keep captions of one image apart
        self.shared = {"seed": options.seed, "allow_collisions": False}

    def by_budget(self, names: Sequence[str]) -> Sized:
        """One budget, or one batch size, for all."""
        options, dataset, planners = self.options, self.dataset, {}
        budget = _token_budget(options, dataset)
        time = self._fit_time(model_of(options, dataset), COST, budget) if "fastest" in names else None
        for name in names:
            own: dict[str, Any] = {"batch_size": options.batch_size, "budget": budget}
            if name == "fastest":
                own["time"] = time
            elif name == "memory":
                own["budget"] = memory_limit(options.device, memory_gb=options.memory_gb).usable_bytes
                own["cost"] = self._fit_memory(model_of(options, dataset))[0]
            planners[name] = scheduler_among(name, {**self.shared, **own})
        return as_configured(planners, options, dataset, time)

    def by_memory(self, names: Sequence[str]) -> Sized:
        """One limit of bytes for all."""
        options, dataset, model = self.options, self.dataset, model_of(self.options, self.dataset)
        memory, time = self._fit_memory(model)
        limit_bytes: float | None = None
        if options.memory_gb is not None:
            limit_bytes = memory_limit(options.device, memory_gb=options.memory_gb).usable_bytes
            remedy = "raise memory_gb, take a smaller model or smaller images"
            check_samples_fit(memory, dataset.sizes, limit_bytes, remedy)
        equal = EqualMemory(
            sizes=dataset.sizes, memory=memory, plans_of=self._plans, batch_size=options.batch_size, options=self.shared
        )  # fmt: skip
        baseline, limit_bytes = equal.baseline(limit_bytes)
        time = time or self._fit_time(model, memory, limit_bytes)
        packs: Any = None
        if "packed" in names and isinstance(model, ConversationModel):
            packs = self._price(packing(model, dataset))
        planners = equal.schedulers(names, baseline, limit_bytes, time=time, packs=packs)
        if "packed" in names and packs is None:
            planners["packed"], time_of_packs = self._measure_packs(planners["packed"], limit_bytes, time)
            packs = None, time_of_packs
        return Sized(planners=planners, memory=memory, limit_bytes=limit_bytes, time=time, packs=packs)

    def _measure_packs(
        self, packed: Scheduler, limit_bytes: float, time: TimeModel
    ) -> tuple[Scheduler, TimeModel]:
        """`packed` with packs that fit, and the seconds of its steps: from real steps on packs of the first epoch.

        No closed form has the bytes of packed pairs, and their seconds are a multiple of what the time model says.
        """
        model = enable_packing(model_of(self.options, self.dataset))
        trainer = timed_trainer(model, device=self.options.device, precision=self.options.precision)
        while True:
            plan, most = next(self._plans(packed)), 0
            for _, rows in largest_batches(plan, None).values():
                batch = [self._load(rows)]
                take_first_step(trainer, *batch)
                most = max(most, peak_of(trainer.train_step, batch, (trainer.model, trainer.optimizer)))
            if most <= limit_bytes:
                break
            # bytes fall faster than the budget: smaller packs mix fewer shapes
            smaller = int(0.98 * packed.budget * (limit_bytes / most) ** 0.7)  # type: ignore[attr-defined]
            packed = replace(packed, budget=smaller)  # type: ignore[call-arg]
        places = np.unique(np.linspace(0, len(plan) - 1, _TIMED_PACKS).astype(int))
        planned = list(plan)
        batches = [self._load(planned[place]) for place in places]
        rounds = [[timed_step(trainer, batch) for batch in batches] for _ in range(_TIMED_ROUNDS)]
        steps = replace(time, new_shape_s=0.0, data_s_per_sample=0.0, shared_s_per_sample=0.0).batch_s(plan)
        times = np.median(rounds[1:], axis=0).sum() / (steps[places].sum() or 1.0)
        return packed, replace(time, rows=replace(time.rows, coefficients=times * time.rows.coefficients))

    def _load(self, rows: Sequence[int]) -> Any:
        """The batch of these samples."""
        return self.dataset.collate([self.dataset[row] for row in rows])

    def _plans(self, scheduler: Scheduler) -> Iterator[BatchPlan]:
        """The plans of all epochs."""
        planner, _ = with_sampling(scheduler, self.dataset, self.options, progress=False)
        return (planner.plan(self.dataset.sizes, epoch=epoch) for epoch in range(self.options.epochs))

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
            warnings.filterwarnings("ignore", message="repeats of one step vary")
            return fit_time(
                model, dataset.sizes, cost=cost, budget=budget, device=device, precision=options.precision,
                loading=partial(
                    loading_seconds, dataset, num_workers=options.num_workers, augment=augmentation(options.augment)
                ),
                progress=self.progress, **SHORT_FIT,
            )  # fmt: skip
