"""Makes the scheduler that a run's configuration names, and counts what its plans hold."""

from __future__ import annotations

from collections.abc import Mapping
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
    group, training, seconds = ProcessGroup(device), config.trainer, None
    setting: dict[str, Any] = {"precision": training.precision, "checkpointing": training.checkpointing}
    once = partial(group.run_on_main, doing="price the model")  # rank 0 prices it, or reads the saved fit
    scheduler: Any
    if name not in ("memory", "fastest"):
        scheduler = make_scheduler(name, **options)
    else:
        memory_gb = options.pop("memory_gb", None)
        limit_bytes = memory_limit(device, memory_gb=memory_gb).usable_bytes
        step = {**setting, "accumulating": training.accumulation_steps > 1}
        step["gradient_buckets"] = num_shares > 1 and config.parallel.strategy == "ddp"
        if isinstance(dataset, ConversationDataset):
            network: Any = model.to(device)
            cost, seconds = once(lambda: saved_or_priced(prices, network, dataset, **step))
        else:
            step |= {"objectives": objectives, "device": torch.device(device).type}
            cost = once(
                lambda: MemoryModel.load_or_fit(
                    prices,
                    lambda: fit_memory(model, num_held_out=0, progress=progress, **step),
                    fingerprint=fingerprint(model),
                    conditions=lambda: StepSetting(**step).conditions,
                )
            )
        # free memory differs between ranks, but plans must not: the smallest limit counts
        budget = int(-group.largest(-limit_bytes))
        if memory_gb is None:
            budget = once(lambda: _kept(prices.with_name(LIMIT), budget))
        scheduler = make_scheduler("memory", cost=cost, budget=budget, **options)
    if name == "fastest":
        trainer = {**setting, "objectives": objectives, "device": device}
        bounds = {"cost": scheduler.cost, "budget": scheduler.target_ratio * scheduler.budget}
        time = seconds or group.run_on_main(
            lambda: TimeModel.load_or_fit(
                prices.with_name(TIME_MODEL),
                lambda: fit_time(model, dataset.sizes, progress=progress, **SHORT_FIT, **bounds, **trainer),
                fingerprint=fingerprint(model),
                conditions=lambda: time_conditions(timed_trainer(model, **trainer)),
            ),
            doing="measure the model's steps",
        )
        scheduler = scheduler_among("fastest", {**vars(scheduler), **bounds, "time": time})
    memory = scheduler.cost if isinstance(scheduler, Memory | Fastest) else None
    whole, weights = with_sampling(scheduler, dataset, config.sampling, progress=progress)
    if whole is scheduler and isinstance(scheduler, Memory) and follow:
        following = ResourceAwareScheduler(planner=scheduler, rank=rank, emit=run.emit, agree=group.largest)
        return following, weights, memory
    return whole, weights, memory


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


def _kept(path: Path, limit_bytes: int) -> int:
    """The limit as it was when the run began, so that a resumed run has the same plans."""
    if not path.exists():
        replace_file(path, f"{limit_bytes}\n")
    try:
        return int(path.read_text())
    except ValueError:
        raise DataError(f"{path} is damaged: expected a number of bytes; remove it to plan anew") from None
