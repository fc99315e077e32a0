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
from mmlab.schedule.base import Scheduler
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler, scheduler_among
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.base import Objective

MEMORY = "memory.json"  # of a run under `memory` or `fastest`, the fitted memory model
LIMIT = "limit_bytes.txt"  # of a run whose configuration gives none


@dataclass
class RunPlanner:
    """Makes the scheduler that a configuration names.

    For `memory` and `fastest`, rank 0 first prices a step in bytes and seconds, or reads what it saved.

    Args:
        folder: of the run, in which rank 0 saves prices and the limit on memory.
    """

    config: RunConfig
    run: Run
    dataset: Any
    model: Any
    objectives: Mapping[str, Objective]
    device: str
    folder: Path
    progress: bool

    def __post_init__(self) -> None:
        self.group = ProcessGroup(self.device)

    def plan(self) -> tuple[Any, NDArray[np.float64] | None, Any]:
        """The scheduler; (N,) weights of samples in the loss, or None; the model that predicts a batch's bytes, or None."""
        # each rank of the strategy `branch` needs all samples
        config, is_branch = self.config, self.config.parallel.strategy == "branch"
        rank, num_shares = (0, 1) if is_branch else (self.run.rank, self.group.world_size)
        options = {"seed": config.trainer.seed, "world_size": num_shares, **config.scheduler}
        name, follow = options.pop("name", "budget"), options.pop("follow", True)
        planner: Any
        if name == "memory":
            planner, _ = self._memory(**options)
        elif name == "fastest":
            planner = self._fastest(**options)
        else:
            planner = make_scheduler(name, **options)
        cost = planner.cost if name in ("memory", "fastest") else None
        scheduler, weights = with_sampling(planner, self.dataset, config.sampling, progress=self.progress)
        if name == "memory" and scheduler is planner and follow:
            agree = self.group.largest
            following = ResourceAwareScheduler(planner=planner, rank=rank, emit=self.run.emit, agree=agree)
            return following, weights, cost
        return scheduler, weights, cost

    @property
    def _step(self) -> dict[str, Any]:
        """What the bytes and the seconds of a step depend on."""
        return {name: getattr(self.config.trainer, name) for name in ("precision", "checkpointing")}

    def _memory(self, *, memory_gb: float | None = None, **options: Any) -> tuple[Any, TimeModel | None]:
        """Batches that fit the memory given, or else what is free when the run begins; and their seconds if those were measured."""
        limit_bytes = memory_limit(self.device, memory_gb=memory_gb).usable_bytes
        cost, time = self.group.run_on_main(self._price_bytes, doing="price the model")
        # free memory differs between ranks, but plans must not: the smallest limit counts
        budget = int(-self.group.largest(-limit_bytes))
        if memory_gb is None:
            keep = partial(_kept, self.folder / LIMIT, budget)
            budget = self.group.run_on_main(keep, doing="keep the limit on memory")
        return make_scheduler("memory", cost=cost, budget=budget, **options), time

    def _fastest(self, **options: Any) -> Scheduler:
        """The batches that take the fewest seconds within the limit of `memory`."""
        memory, time = self._memory(**options)
        bounds = {"cost": memory.cost, "budget": memory.target_ratio * memory.budget}
        if time is None:
            measure = partial(self._price_seconds, **bounds)
            time = self.group.run_on_main(measure, doing="measure the model's steps")
        return scheduler_among("fastest", {**vars(memory), **bounds, "time": time})

    def _price_bytes(self) -> tuple[MemoryModel, TimeModel | None]:
        step = {
            **self._step,
            "accumulating": self.config.trainer.accumulation_steps > 1,
            "gradient_buckets": self.group.world_size > 1 and self.config.parallel.strategy == "ddp",
        }
        if isinstance(self.dataset, ConversationDataset):
            return saved_or_priced(self.folder / MEMORY, self.model.to(self.device), self.dataset, **step)
        step |= {"objectives": self.objectives, "device": torch.device(self.device).type}
        memory = MemoryModel.load_or_fit(
            self.folder / MEMORY,
            lambda: fit_memory(self.model, num_held_out=0, progress=self.progress, **step),
            fingerprint=fingerprint(self.model),
            conditions=lambda: StepSetting(**step).conditions,
        )
        return memory, None

    def _price_seconds(self, **bounds: Any) -> TimeModel:
        trainer = {**self._step, "objectives": self.objectives, "device": self.device}
        sizes, options = self.dataset.sizes, {**SHORT_FIT, **bounds, **trainer}
        return TimeModel.load_or_fit(
            self.folder / TIME_MODEL,
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
