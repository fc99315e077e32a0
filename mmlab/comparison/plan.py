"""Makes the scheduler that a run's configuration names, and counts what its plans hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.comparison.config import RunConfig
from mmlab.comparison.preparation import costs_of, with_sampling
from mmlab.comparison.run import Run
from mmlab.comparison.sizing import SHORT_FIT
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import DataError
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import memory_limit, replace_file
from mmlab.parallel.process_group import ProcessGroup
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.step_prices import saved_or_priced
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time, time_conditions, timed_trainer
from mmlab.pricing.trace import StepSetting
from mmlab.runs.folders import TIME_MODEL
from mmlab.schedule.dense import Fastest, Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler, scheduler_among
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.base import Objective

LIMIT = "limit_bytes.txt"  # of a run whose configuration gives none


def plan_run(
    config: RunConfig,
    run: Run,
    dataset: Any,
    model: torch.nn.Module,
    objectives: Mapping[str, Objective],
    device: str,
    prices: Path,
    *,
    world_size: int,
    progress: bool,
) -> tuple[Any, NDArray[np.float64] | None, Any]:
    """The scheduler that a configuration names.

    Args:
        prices: the file in which rank 0 saves the fitted memory model, with the time model beside it; for
            `memory` and `fastest` only.

    Returns:
        The scheduler; (N,) weights of samples in the loss, or None; the
        model that predicts a batch's bytes, or None.
    """
    # each rank of the strategy `branch` needs all samples
    rank, num_shares = (0, 1) if config.parallel.strategy == "branch" else (run.rank, world_size)
    options = {"seed": config.trainer.seed, "world_size": num_shares, **config.scheduler}
    name, follow = options.pop("name", "budget"), options.pop("follow", True)
    group = ProcessGroup(device)
    planner: Any
    if name in ("memory", "fastest"):
        pricing = _Pricing(config, dataset, model, objectives, device, group, prices, progress)
        planner = pricing.memory(**options)
        if name == "fastest":
            planner = pricing.fastest(planner)
    else:
        planner = make_scheduler(name, **options)
    cost = planner.cost if isinstance(planner, Memory | Fastest) else None
    scheduler, weights = with_sampling(planner, dataset, config.sampling, progress=progress)
    if scheduler is planner and isinstance(planner, Memory) and follow:
        following = ResourceAwareScheduler(planner=planner, rank=rank, emit=run.emit, agree=group.largest)
        return following, weights, cost
    return scheduler, weights, cost


def planned_steps(trainer: FusionTrainer, loader: PlannedLoader, config: RunConfig) -> dict[str, float]:
    """Steps of the whole run, and the cost of those left; an epoch without ratios of its own counts like the one before.

    The cost is left out where the plan follows memory use, or is the rest of an epoch that other ranks began.
    """
    last_epoch, each = config.trainer.num_epochs, config.trainer.accumulation_steps
    is_planned = isinstance(loader.plan, BatchPlan) and len(loader) == len(loader.plan)
    if trainer.epoch >= last_epoch or not is_planned:
        return {"num_steps": trainer.step + trainer.steps_left(loader, last_epoch)}

    def steps_and_cost(costs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([-(-len(costs) // each), costs.sum()])

    loader.set_epoch(trainer.epoch)
    ratios, costs = config.sampling.ratios, costs_of(loader.plan)
    last_change = ratios[-1][0] if isinstance(ratios, tuple) else 0
    left, of_epoch = steps_and_cost(costs[trainer.epoch_batches :]), steps_and_cost(costs)
    for epoch in range(trainer.epoch + 1, last_epoch):
        if epoch <= last_change:
            of_epoch = steps_and_cost(costs_of(loader.plan_of(epoch)))
        left += of_epoch
    return {"num_steps": trainer.step + int(left[0]), "planned_cost": float(left[1])}


@dataclass
class _Pricing:
    """The schedulers that need prices: rank 0 prices a step in bytes and seconds, or reads what it saved."""

    config: RunConfig
    dataset: Any
    model: Any
    objectives: Mapping[str, Objective]
    device: str
    group: ProcessGroup
    saved: Path
    progress: bool
    time: TimeModel | None = None  # where pricing the bytes measures steps anyway

    @property
    def setting(self) -> dict[str, Any]:
        """What the bytes and the seconds of a step depend on."""
        return {
            "precision": self.config.trainer.precision,
            "checkpointing": self.config.trainer.checkpointing,
        }

    def memory(self, *, world_size: int, memory_gb: float | None = None, **options: Any) -> Any:
        """Batches that fit the memory given, or else what is free when the run begins."""
        limit_bytes = memory_limit(self.device, memory_gb=memory_gb).usable_bytes
        price = partial(self._price_bytes, world_size)
        cost, self.time = self.group.run_on_main(price, doing="price the model")
        # free memory differs between ranks, but plans must not: the smallest limit counts
        budget = int(-self.group.largest(-limit_bytes))
        if memory_gb is None:
            keep = partial(_kept, self.saved.with_name(LIMIT), budget)
            budget = self.group.run_on_main(keep, doing="keep the limit on memory")
        return make_scheduler("memory", cost=cost, budget=budget, world_size=world_size, **options)

    def fastest(self, memory: Any) -> Any:
        """The batches that take the fewest seconds within the same limit."""
        bounds = {"cost": memory.cost, "budget": memory.target_ratio * memory.budget}
        measure = partial(self._price_seconds, **bounds)
        time = self.time or self.group.run_on_main(measure, doing="measure the model's steps")
        return scheduler_among("fastest", {**vars(memory), **bounds, "time": time})

    def _price_bytes(self, world_size: int) -> tuple[MemoryModel, TimeModel | None]:
        step = {
            **self.setting,
            "accumulating": self.config.trainer.accumulation_steps > 1,
            "gradient_buckets": world_size > 1 and self.config.parallel.strategy == "ddp",
        }
        if isinstance(self.dataset, ConversationDataset):
            return saved_or_priced(self.saved, self.model.to(self.device), self.dataset, **step)
        step |= {"objectives": self.objectives, "device": torch.device(self.device).type}
        memory = MemoryModel.load_or_fit(
            self.saved,
            lambda: fit_memory(self.model, num_held_out=0, progress=self.progress, **step),
            fingerprint=fingerprint(self.model),
            conditions=lambda: StepSetting(**step).conditions,
        )
        return memory, None

    def _price_seconds(self, **bounds: Any) -> TimeModel:
        trainer = {**self.setting, "objectives": self.objectives, "device": self.device}
        sizes, options = self.dataset.sizes, {**SHORT_FIT, **bounds, **trainer}
        return TimeModel.load_or_fit(
            self.saved.with_name(TIME_MODEL),
            lambda: fit_time(self.model, sizes, progress=self.progress, **options),
            fingerprint=fingerprint(self.model),
            conditions=lambda: time_conditions(timed_trainer(self.model, **trainer)),
        )


def _kept(path: Path, limit_bytes: int) -> int:
    """The limit as it was when the run began, so that a resumed run has the same plans."""
    if not path.exists():
        replace_file(path, f"{limit_bytes}\n")
    try:
        return int(path.read_text())
    except ValueError:
        raise DataError(f"{path} is damaged: expected a number of bytes; remove it to plan anew") from None
