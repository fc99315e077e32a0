"""How the batches of a run are planned: by a scheduler of a name, and for each rank its share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.comparison.config import RunConfig
from mmlab.comparison.preparation import sampled
from mmlab.comparison.run import Run
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.data.dataset import MultimodalDataset
from mmlab.machine import device_limit
from mmlab.parallel.process_group import ProcessGroup
from mmlab.pricing.planner import memory_scheduler, saved_or_fitted_time
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.step_prices import saved_or_priced
from mmlab.runs.folders import TIME_MODEL
from mmlab.schedule.base import Scheduler
from mmlab.schedule.dense import Fastest, Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.losses.base import Objective


def named_scheduler(
    name: str,
    options: dict[str, Any],
    model: Callable[[], torch.nn.Module],
    *,
    device: str,
    world_size: int = 1,
    dataset: MultimodalDataset | ConversationDataset | None = None,
    saved: Path | None = None,
    progress: bool = False,
    **setting: Any,
) -> Scheduler:
    """The scheduler of a name; for `memory` and `fastest` the model is priced first, by rank 0 for all.

    Args:
        options: of the scheduler; of these two also `memory_gb`.
        model: makes, or returns, what they are to price.
        dataset: for `fastest`, which measures steps as well, and for conversations, whose price is measured too.
        saved: a file that keeps the prices; the seconds are kept beside it.
        setting: fields of `mmlab.pricing.trace.StepSetting`.
    """
    if name not in ("memory", "fastest"):
        return dataclasses.replace(make_scheduler(name, **options), world_size=world_size)
    group, seconds = ProcessGroup(device), None
    once = partial(group.run_on_main, doing="price the model")
    own = ("precision", "checkpointing", "objectives")
    if isinstance(dataset, ConversationDataset):
        network: Any = model().to(device)
        precision = setting["precision"]
        cost, seconds = once(lambda: saved_or_priced(saved, network, dataset, precision=precision))
        limit = device_limit(device, memory_gb=options.pop("memory_gb", None))
        scheduler: Any = make_scheduler("memory", cost=cost, budget=limit, world_size=world_size, **options)
    else:
        scheduler = memory_scheduler(
            model(),
            device=device,
            saved=saved,
            progress=progress,
            once=once,
            world_size=world_size,
            **setting,
            **options,
        )
    # what is free differs between ranks and moments; plans must not: the least counts
    least = -group.largest(-scheduler.budget)
    memory: Memory = dataclasses.replace(scheduler, budget=int(least))
    if name == "memory":
        return memory
    assert dataset is not None
    limit_bytes = memory.target_ratio * int(least)
    trainer = {"device": device, **{key: value for key, value in setting.items() if key in own}}
    kept = None if saved is None else saved.with_name(TIME_MODEL)
    time = seconds or group.run_on_main(
        lambda: saved_or_fitted_time(
            kept,
            model(),
            dataset.sizes,
            trainer=trainer,
            cost=memory.cost,
            budget=limit_bytes,
            progress=progress,
        ),
        doing="measure the model's steps",
    )
    shared = {item.name: getattr(memory, item.name) for item in dataclasses.fields(Fastest)}
    return Fastest(**{**shared, "budget": limit_bytes, "time": time})


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
) -> tuple[Any, NDArray[np.float64] | None, Any]:
    """The planner that a configuration asks for.

    Args:
        prices: for `memory` and `fastest`, where rank 0 keeps what the model's fit found.

    Returns:
        What gives this rank's share of each epoch's plan; (N,) weights in the loss, or None; what predicts a batch's
        bytes, or None.
    """
    # each rank of the strategy `branch` needs all samples
    rank, num_shares = (0, 1) if config.parallel.strategy == "branch" else (run.rank, world_size)
    training, options = config.trainer, {"seed": config.trainer.seed, **config.scheduler}
    name, follow = options.pop("name", "budget"), options.pop("follow", True)
    scheduler = named_scheduler(
        name,
        options,
        lambda: model,
        device=device,
        world_size=num_shares,
        dataset=dataset,
        saved=prices,
        precision=training.precision,
        checkpointing=training.checkpointing,
        objectives=objectives,
        accumulating=training.accumulation_steps > 1,
        gradient_buckets=num_shares > 1 and config.parallel.strategy == "ddp",
    )
    memory = scheduler.cost if isinstance(scheduler, Memory | Fastest) else None
    whole, weights = sampled(scheduler, dataset, config.sampling, progress=run.rank == 0)
    if whole is scheduler and isinstance(scheduler, Memory) and follow:
        agree = ProcessGroup(device).largest
        following = ResourceAwareScheduler(planner=scheduler, rank=rank, emit=run.emit, agree=agree)
        return following, weights, memory
    return _Share(whole=whole, rank=rank, seed=whole.seed, world_size=num_shares), weights, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Share(Scheduler):
    """A scheduler whose plans are one rank's share."""

    whole: Scheduler
    rank: int

    def plan(self, samples: Any, *, epoch: int = 0) -> BatchPlan:
        return self.whole.plan(samples, epoch=epoch).shard(self.rank, self.world_size)

    def resume(self, samples: Any, state: Mapping[str, Any], *, world_size: int | None = None) -> BatchPlan:
        return self.whole.resume(samples, state).shard(self.rank, self.world_size)
