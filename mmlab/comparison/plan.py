"""How the batches of a run are planned: by the scheduler of its configuration, for each rank its share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.comparison.config import RunConfig
from mmlab.comparison.preparation import sampled
from mmlab.comparison.run import Run
from mmlab.data.dataset import MultimodalDataset
from mmlab.parallel.process_group import ProcessGroup
from mmlab.pricing.planner import memory_scheduler
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.schedule.base import Scheduler
from mmlab.schedule.dense import Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.losses.base import Objective
from mmlab.types import CostModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a loader and a trainer need of a plan."""

    planner: Any  # gives this rank's share of each epoch's plan
    weights: NDArray[np.float64] | None  # (N,) of each sample's loss
    memory: CostModel | None  # predicts a batch's bytes


def plan_run(
    config: RunConfig,
    run: Run,
    dataset: MultimodalDataset,
    model: torch.nn.Module,
    objectives: Mapping[str, Objective],
    device: str,
    prices: Path,
    *,
    world_size: int,
) -> Planned:
    """The planner that a configuration asks for.

    Args:
        prices: for `memory`, where rank 0 keeps what the model's fit found.
    """
    # each rank of the strategy `branch` needs all samples
    rank, num_shares = (0, 1) if config.parallel.strategy == "branch" else (run.rank, world_size)
    saved = prices if run.rank == 0 else None
    scheduler = _scheduler(config, model, objectives, device, num_shares, saved)
    memory = scheduler.cost if isinstance(scheduler, Memory) else None
    whole, weights = sampled(scheduler, dataset, config.sampling, progress=run.rank == 0)
    if whole is scheduler and memory is not None and config.scheduler.get("follow", True):
        agree = partial(ProcessGroup().largest, device=torch.device(device))
        following = ResourceAwareScheduler(planner=scheduler, rank=rank, emit=run.emit, agree=agree)
        return Planned(planner=following, weights=weights, memory=memory)
    planner = _Share(whole=whole, rank=rank, seed=whole.seed, world_size=num_shares)
    return Planned(planner=planner, weights=weights, memory=memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Share(Scheduler):
    """A scheduler whose plans are one rank's share."""

    whole: Scheduler
    rank: int

    def plan(self, samples: Any, *, epoch: int = 0) -> BatchPlan:
        return self.whole.plan(samples, epoch=epoch).shard(self.rank, self.world_size)

    def resume(self, samples: Any, state: Mapping[str, Any], *, world_size: int | None = None) -> BatchPlan:
        return self.whole.resume(samples, state).shard(self.rank, self.world_size)


def _scheduler(
    config: RunConfig,
    model: torch.nn.Module,
    objectives: Mapping[str, Objective],
    device: str,
    world_size: int,
    saved: Path | None,
) -> Scheduler:
    """The scheduler that is asked for; for `memory` the model is priced first, unless `saved` has its prices."""
    training = config.trainer
    options = {"seed": training.seed, **config.scheduler}
    name = options.pop("name", "budget")
    if name != "memory":
        return dataclasses.replace(make_scheduler(name, **options), world_size=world_size)
    options.pop("follow", None)
    scheduler: Any = memory_scheduler(
        model,
        device=device,
        precision=training.precision,
        checkpointing=training.checkpointing,
        objectives=objectives,
        accumulating=training.accumulation_steps > 1,
        gradient_buckets=world_size > 1 and config.parallel.strategy == "ddp",
        saved=saved,
        progress=False,
        world_size=world_size,
        **options,
    )
    # what is free differs between ranks and moments; plans must not: the least counts
    least = -ProcessGroup().largest(-scheduler.budget, torch.device(device))
    return dataclasses.replace(scheduler, budget=int(least))
