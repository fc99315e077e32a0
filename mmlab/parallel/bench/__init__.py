"""How strategies of parallel training compare on this machine, and what a model says of more devices.

setting   what is measured, and the batch that all strategies share
arms      the strategies, in turns
group     a process group for one turn
traffic   what a step sends, counted
probes    seconds of parts and of messages, for `mmlab.parallel.scaling`
launch    real processes, by torch's own launcher
report    table, figure and conclusion
picture   the figure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mmlab.errors import OptionError, unknown_name
from mmlab.machine import cpu_name, num_usable_cores, resolve_device
from mmlab.model.presets import PRESETS
from mmlab.parallel.bench.arms import ARMS, Strategy
from mmlab.parallel.bench.launch import measure
from mmlab.parallel.bench.report import ParallelBench
from mmlab.parallel.bench.setting import Setting
from mmlab.training.precision import Precision

DEFAULT = ("single", "ddp", "fsdp", "branch")


def bench_parallel(
    strategies: Sequence[str] | None = None,
    *,
    model: str = "small",
    ranks: int = 2,
    batch_size: int = 16,
    image_side: int = 128,
    num_tokens: int = 32,
    steps: int = 4,
    rounds: int = 3,
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    more: Mapping[str, Strategy] | None = None,
    progress: bool = True,
) -> ParallelBench:
    """Train with every strategy in turns, in real processes, and model what more devices would give.

    All strategies get the same samples, weights, global batch and, on a CPU, the same cores: a single process gets the
    threads of all ranks together. Takes a model for each rank in memory at a time; no data set is read.

    Args:
        strategies: names in `ARMS`; None takes all that such a number of ranks can run.
        ranks: processes; on CUDA one a GPU.
        batch_size: samples of a step, over all ranks.
        image_side: pixels.
        steps: timed in a row, after one that is not.
        rounds: turns of every strategy.
        more: strategies of your own, by name; they must be picklable.
        progress: show a bar if stderr is a terminal.

    Raises:
        OptionError: a strategy, a number or a device that cannot work; the message names it.
        RunError: a rank failed.
    """
    device_type = resolve_device(device).split(":")[0]
    for name, number, least in (
        ("ranks", ranks, 1),
        ("batch_size", batch_size, 2 * ranks),
        ("image_side", image_side, 16),
        ("num_tokens", num_tokens, 2),
        ("steps", steps, 1),
        ("rounds", rounds, 1),
    ):
        if number < least:
            raise OptionError(f"{name} must be at least {least}, found {number}")
    if model not in PRESETS:
        raise unknown_name("model preset", model, PRESETS)
    if batch_size % ranks:
        raise OptionError(f"batch_size must divide by the {ranks} ranks, found {batch_size}")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise OptionError(f"{ranks} ranks need a GPU each, found {torch.cuda.device_count()}")
    Precision(precision, device_type)
    num_cores = num_usable_cores()
    setting = Setting(
        strategies=_names(strategies, {**ARMS, **(more or {})}, ranks, device_type),
        model=model,
        num_ranks=ranks,
        threads_per_rank=max(1, num_cores // ranks),
        batch_size=batch_size,
        image_side=image_side,
        num_tokens=num_tokens,
        num_steps=steps,
        num_rounds=rounds,
        device_type=device_type,
        precision=precision,
        seed=seed,
        progress=progress,
        more=more or {},
    )
    name = torch.cuda.get_device_name() if device_type == "cuda" else cpu_name()
    return ParallelBench(setting=setting, device=name, num_cores=num_cores, ranks=measure(setting))


def _names(
    strategies: Sequence[str] | None, arms: Mapping[str, Strategy], ranks: int, device_type: str
) -> tuple[str, ...]:
    """The strategies that were asked for, or all usual ones that can run."""
    if strategies is None:
        can_run = [name for name in DEFAULT if name in ARMS and _obstacle(name, arms[name], ranks) is None]
        strategies = [*can_run, *(name for name in arms if name not in ARMS)]
    elif not strategies:
        raise OptionError(f"strategies must name at least one of {', '.join(arms)}")
    for name in strategies:
        if name not in arms:
            raise unknown_name("strategy", name, arms)
        if (obstacle := _obstacle(name, arms[name], ranks)) is not None:
            raise OptionError(obstacle)
    names = [name for name in dict.fromkeys(strategies) if name != "one core"]
    # what efficiency is measured against; elsewhere `single` is that
    return tuple(["one core", *names] if device_type == "cpu" and ranks > 1 else names)


def _obstacle(name: str, strategy: Strategy, ranks: int) -> str | None:
    if strategy.ranks not in (None, ranks):
        return f"strategy {name!r} needs {strategy.ranks} ranks, found {ranks}"
    return (
        f"strategy {name!r} needs at least 2 ranks, found {ranks}" if strategy.joins and ranks < 2 else None
    )


__all__ = ["ARMS", "ParallelBench", "Setting", "Strategy", "bench_parallel"]
