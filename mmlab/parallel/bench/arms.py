"""One strategy after the other in this process: made, warmed up, timed, measured, forgotten.

Arms take turns, so that what changes on the machine in between meets all of them; each turn builds its model from the
same seed, so that memory holds one strategy at a time. A turn that needs several ranks joins them in a process group of
its own; `single` runs on rank 0 without any group, while the others wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import distributed

from mmlab.machine import process_rss_bytes
from mmlab.model.fusion_model import FusionModel
from mmlab.model.presets import build_model
from mmlab.parallel.bench.group import Groups
from mmlab.parallel.bench.setting import OBJECTIVES, VOCAB_SIZE, Setting, make_batch
from mmlab.parallel.bench.traffic import Traffic, kernel_ratio, kernel_spans, written_bytes
from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.parallel.branches.placement import BranchPlacement
from mmlab.parallel.branches.timeline import Timeline
from mmlab.runs.meters import LiveBytes, peak_bytes, reset_peak_bytes
from mmlab.training.fusion_trainer import FusionTrainer


@dataclass(frozen=True, slots=True)
class Arm:
    """A strategy that is ready to step."""

    step: Callable[[], float]  # returns the loss
    held: tuple[Any, ...]  # models, optimizers and tensors that stay between steps
    timeline: Timeline | None = None  # when each branch computed


@dataclass(frozen=True, slots=True)
class Strategy:
    """How an arm is made, and on what it runs."""

    build: Callable[[Setting, int], Arm]
    joins: bool  # needs a process group of all ranks; else it runs on rank 0 alone
    gpus: int | None = None  # that it uses; None takes one a rank
    ranks: int | None = None  # that it must have
    all_cores: bool = False  # on a CPU its one process gets the threads of all ranks


def seeded_model(setting: Setting) -> FusionModel:
    """The model that every strategy starts from."""
    torch.manual_seed(setting.seed)
    model = build_model(setting.model, vocab_size=VOCAB_SIZE)
    model.token_head.requires_grad_(False)  # no objective here tells hidden tokens
    return model


def share(setting: Setting, rank: int, num_ranks: int) -> slice:
    """Rows of the batch that a rank takes."""
    size = setting.batch_size // num_ranks
    return slice(rank * size, (rank + 1) * size)


def make_trainer(
    setting: Setting, rank: int, *, model: FusionModel | None = None, **options: Any
) -> FusionTrainer:
    """A trainer on this rank's device."""
    return FusionTrainer(
        seeded_model(setting) if model is None else model,
        objectives=OBJECTIVES,
        precision=setting.precision,
        device=setting.device(rank),
        seed=setting.seed,
        **options,
    )


def _trained(setting: Setting, rank: int, *, num_ranks: int | None = None, **options: Any) -> Arm:
    """`FusionTrainer` on this rank's share of the samples, of which there are as many as ranks, or `num_ranks`."""
    num_ranks = num_ranks or setting.num_ranks
    batch = make_batch(setting, share(setting, rank % num_ranks, num_ranks))
    trainer = make_trainer(setting, rank, **options)
    batch = batch.to(trainer.device)
    timeline = None
    if trainer.branches is not None and setting.device_type == "cpu":
        timeline = trainer.branches.timeline = Timeline()
    held = (trainer.model, trainer.optimizer, *batch.tensors())
    return Arm(lambda: trainer.train_step([batch])["loss"], held, timeline)


def _threaded_branches(setting: Setting, rank: int) -> Arm:
    """Both branches in this process: by threads on a CPU, on two GPUs on one each."""
    timeline = Timeline() if setting.device_type == "cpu" else None
    names = [str(setting.device(index)) for index in range(2)] if setting.device_type == "cuda" else ["cpu"]
    model = BranchParallel(
        seeded_model(setting),
        BranchPlacement.of(names),
        timeline=timeline,
        threads_per_branch=setting.threads_per_rank if setting.device_type == "cpu" else None,
    )
    trainer = make_trainer(setting, model.branch_devices[0].index or 0, model=model)
    batch = make_batch(setting).to(trainer.device)
    held = (trainer.model, trainer.optimizer, *batch.tensors())
    return Arm(lambda: trainer.train_step([batch])["loss"], held, timeline)


ARMS: dict[str, Strategy] = {
    "one core": Strategy(partial(_trained, num_ranks=1), joins=False, gpus=1),
    "single": Strategy(partial(_trained, num_ranks=1), joins=False, gpus=1, all_cores=True),
    "reduce": Strategy(partial(_trained, parallel="reduce"), joins=True),
    "ddp": Strategy(partial(_trained, parallel="ddp"), joins=True),
    "fsdp": Strategy(partial(_trained, parallel="fsdp"), joins=True),
    "branch": Strategy(
        partial(_trained, num_ranks=1, parallel="branch"),
        joins=True,
        gpus=2,
        ranks=2,
    ),
    "branch threads": Strategy(_threaded_branches, joins=False, gpus=2, ranks=2, all_cores=True),
}


def strategy_of(setting: Setting, name: str) -> Strategy:
    """By its name."""
    return setting.more[name] if name in setting.more else ARMS[name]


def take_turn(setting: Setting, name: str, groups: Groups, *, measure: bool) -> dict[str, Any] | None:
    """One turn of a strategy on this rank; None where the rank has no part in it.

    Args:
        measure: also take steps that are not timed: one for traffic and memory, on a GPU one for its kernels.

    Returns:
        `step_s` of every step, `wall_s` and `cpu_s` of all, the losses; and what was measured.
    """
    strategy, rank = strategy_of(setting, name), groups.rank
    if not strategy.joins and rank:
        return None
    device = setting.device(rank)
    torch.set_num_threads(num_threads(setting, name))
    with groups.joined() if strategy.joins else nullcontext():
        arm = strategy.build(setting, rank)
        for _ in range(setting.num_warmup_steps):
            arm.step()
        found = _timed(setting, arm, device, joins=strategy.joins)
        if measure:
            found |= _measured(setting, arm, device)
        del arm
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def num_threads(setting: Setting, name: str) -> int:
    """Intra-op threads of one process of an arm: together every arm has the same, but for `one core`."""
    return setting.threads_per_rank * (setting.num_ranks if strategy_of(setting, name).all_cores else 1)


def num_devices(setting: Setting, name: str) -> int:
    """GPUs that an arm uses; on a CPU, how many times the cores of one rank."""
    strategy = strategy_of(setting, name)
    if setting.device_type == "cpu":
        return setting.num_ranks if strategy.joins or strategy.all_cores else 1
    return strategy.gpus or setting.num_ranks


def clock(device: torch.device) -> float:
    """Now, when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _timed(setting: Setting, arm: Arm, device: torch.device, *, joins: bool) -> dict[str, Any]:
    if joins:
        distributed.barrier()
    if arm.timeline is not None:
        arm.timeline.clear()
    losses, marks = [], [clock(device)]
    cpu_s = time.process_time()
    for _ in range(setting.num_steps):
        losses.append(arm.step())
        marks.append(clock(device))
    return {
        "step_s": [after - before for before, after in pairwise(marks)],
        "wall_s": marks[-1] - marks[0],
        "cpu_s": time.process_time() - cpu_s,
        "losses": losses,
        "spans": [] if arm.timeline is None else [tuple(span) for span in arm.timeline.spans],
    }


def _measured(setting: Setting, arm: Arm, device: torch.device) -> dict[str, Any]:
    before = written_bytes()
    with Traffic() as traffic, LiveBytes(device_type=device.type).add(*arm.held) as live:
        arm.step()
    after = written_bytes()
    found: dict[str, Any] = {
        "calls": traffic.num_calls,
        "payload_bytes": traffic.num_bytes,
        "ring_bytes": traffic.sent_bytes(setting.num_ranks),
        "written_bytes": None if before is None or after is None else after - before,
        "peak_bytes": live.peak_bytes,
        "memory_source": "live tensors",
        "rss_bytes": process_rss_bytes(),
    }
    if device.type == "cuda":
        reset_peak_bytes(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = clock(device)
            arm.step()
            wall_s = clock(device) - started
        found |= {
            "kernel_ratio": kernel_ratio(kernel_spans(profile), 1e6 * wall_s),
            "peak_bytes": peak_bytes(device),
            "memory_source": "torch allocator",
        }
    return found
