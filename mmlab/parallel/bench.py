"""`bench_parallel`: how strategies of parallel training compare on this machine, and what more devices would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mmlab.errors import OptionError, unknown_name
from mmlab.machine import cpu_name, num_usable_cores, resolve_device
from mmlab.model.presets import PRESETS
from mmlab.parallel.bench_report import ParallelBench
from mmlab.parallel.bench_turns import BENCH_STRATEGIES, BenchStrategy, Setting, measure_on_rank
from mmlab.parallel.launch import run_on_ranks
from mmlab.training.precision import Precision

_DEFAULT = ("single", "ddp", "fsdp", "branch")


def bench_parallel(
    strategies: Sequence[str] | None = None,
    *,
    model: str = "small",
    ranks: int = 2,
    batch_size: int = 16,
    micro_batches: int = 1,
    image_side: int = 128,
    num_tokens: int = 32,
    steps: int = 4,
    rounds: int = 3,
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    more: Mapping[str, BenchStrategy] | None = None,
    progress: bool = True,
) -> ParallelBench:
    """Train with every strategy in turns, in real processes, and predict what more devices would give.

    All strategies get the same samples, weights, global batch and, on a CPU, the same cores: a single process gets the
    threads of all ranks together. Memory holds one model per rank at a time; no data set is read.

    Args:
        strategies: names in `BENCH_STRATEGIES`; None takes those that this number of ranks can run.
        ranks: processes; on CUDA one per GPU.
        batch_size: samples of a step, over all ranks.
        micro_batches: that each process splits its samples of a step into.
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
        ("micro_batches", micro_batches, 1),
        ("batch_size", batch_size, 2 * ranks * micro_batches),
        ("image_side", image_side, 16),
        ("num_tokens", num_tokens, 2),
        ("steps", steps, 1),
        ("rounds", rounds, 1),
    ):
        if number < least:
            raise OptionError(f"{name} must be at least {least}, found {number}")
    if model not in PRESETS:
        raise unknown_name("model preset", model, PRESETS)
    if batch_size % (ranks * micro_batches):
        raise OptionError(f"batch_size must divide by the {ranks} ranks' micro-batches, found {batch_size}")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise OptionError(f"{ranks} ranks need a GPU each, found {torch.cuda.device_count()}")
    Precision(precision, device_type)
    num_cores = num_usable_cores()
    setting = Setting(
        strategies=_names(strategies, {**BENCH_STRATEGIES, **(more or {})}, ranks, device_type),
        model=model,
        num_ranks=ranks,
        threads_per_rank=max(1, num_cores // ranks),
        batch_size=batch_size,
        num_micro_batches=micro_batches,
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
    found = run_on_ranks(measure_on_rank, setting, num_processes=ranks, shows_progress=progress)
    name = torch.cuda.get_device_name() if device_type == "cuda" else cpu_name()
    return ParallelBench(setting=setting, device=name, num_cores=num_cores, ranks=found)


def _names(
    strategies: Sequence[str] | None, known: Mapping[str, BenchStrategy], ranks: int, device_type: str
) -> tuple[str, ...]:
    """The strategies that were asked for, or all usual ones that can run."""
    if strategies is None:
        usual = (*_DEFAULT, *(name for name in known if name not in BENCH_STRATEGIES))
        strategies = [name for name in usual if _obstacle(name, known[name], ranks) is None]
    elif not strategies:
        raise OptionError(f"strategies must name at least one of {', '.join(known)}")
    for name in strategies:
        if name not in known:
            raise unknown_name("strategy", name, known)
        if (obstacle := _obstacle(name, known[name], ranks)) is not None:
            raise OptionError(obstacle)
    names = [name for name in dict.fromkeys(strategies) if name != "one core"]
    # what efficiency is measured against; elsewhere `single` is that
    return tuple(["one core", *names] if device_type == "cpu" and ranks > 1 else names)


def _obstacle(name: str, strategy: BenchStrategy, ranks: int) -> str | None:
    if strategy.num_ranks not in (None, ranks):
        return f"strategy {name!r} needs {strategy.num_ranks} ranks, found {ranks}"
    if strategy.joins and ranks < 2:
        return f"strategy {name!r} needs at least 2 ranks, found {ranks}"
    return None
