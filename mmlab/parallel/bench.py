"""`bench_parallel`: compare strategies of parallel training on this machine, and predict more devices.

Strategies take turns, so that whatever else the machine does affects all of them. Each turn builds its model from the
same seed, and memory holds one model per rank at a time. `one core` and `single` run on rank 0 while the others wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import distributed

from mmlab.errors import OptionError, check_name
from mmlab.machine import cpu_name, num_usable_cores, progress_bar
from mmlab.model.fusion_model import FusionModel
from mmlab.model.presets import build_model
from mmlab.parallel.bench_options import ALONE, BenchOptions
from mmlab.parallel.bench_report import ParallelBench
from mmlab.parallel.launch import run_on_ranks
from mmlab.parallel.predict import predict
from mmlab.parallel.probe import probe_costs, probe_network
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from mmlab.training.noise import noise_batch
from mmlab.training.step_meter import clock
from mmlab.training.strategy import Strategy
from mmlab.types import Batch, BatchShape

VOCAB_SIZE = 30_522  # of bert-base-uncased: its embedding is reduced like any other weight
OBJECTIVES = ("contrastive", "matching")


class Arm(NamedTuple):
    """A strategy that is ready to step."""

    step: Callable[[], Mapping[str, Any]]  # returns `loss`, and any other values to keep in the report
    held: tuple[Any, ...]  # models, optimizers and tensors that stay between steps


# makes an arm from the options, the rank, and the best cut of the image branch
BuildArm = Callable[[BenchOptions, int, int | None], Arm]


def device_of(options: BenchOptions, rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU that all share."""
    return torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")


def seeded_model(options: BenchOptions) -> FusionModel:
    """The model that every strategy starts from."""
    torch.manual_seed(options.seed)
    model = build_model(options.model, vocab_size=VOCAB_SIZE)
    model.token_head.requires_grad_(False)  # no objective here predicts hidden tokens
    return model


def make_batch(options: BenchOptions, share: int = 0, num_shares: int = 1) -> Batch:
    """A share of the batch that every strategy trains on: noise, nothing padded."""
    size, side = options.batch_size, options.image_side
    shape = BatchShape(size, options.num_tokens, side, side)
    whole = noise_batch(shape, num_ids=VOCAB_SIZE, seed=options.seed)
    return whole.part(slice(share * size // num_shares, (share + 1) * size // num_shares))


def _make_trainer(options: BenchOptions, rank: int, strategy: Strategy) -> FusionTrainer:
    return FusionTrainer(
        seeded_model(options),
        objectives=OBJECTIVES,
        precision=options.precision,
        device=device_of(options, rank),
        seed=options.seed,
        strategy=strategy,
    )


def train_arm(name: str, options: BenchOptions, rank: int, cut: int | None) -> Arm:
    """`FusionTrainer` with a strategy of mmlab, on this rank's share of the samples."""
    strategy = Strategy()
    if name not in ALONE:
        asked = ParallelOptions(strategy=name, image_layers=cut if name == "branch" else None)
        strategy = make_strategy(asked)
    trainer = _make_trainer(options, rank, strategy)
    batch = make_batch(options, rank % strategy.num_shares, strategy.num_shares).to(trainer.device)
    size = len(batch) // options.micro_batches
    window = [batch.part(slice(start, start + size)) for start in range(0, len(batch), size)]
    held = (trainer.model, trainer.optimizer, *batch.tensors())
    return Arm(lambda: {"loss": trainer.train_step(window)["loss"]}, held)


ARMS: dict[str, BuildArm] = {
    name: partial(train_arm, name) for name in ("one core", "single", "ddp", "fsdp", "branch", "reduce")
}


def bench_parallel(
    strategies: Sequence[str] | None = None,
    *,
    more: Mapping[str, BuildArm] | None = None,
    progress: bool = True,
    **sizes: Any,
) -> ParallelBench:
    """Train with every strategy in turns, in real processes, and predict what more devices would give.

    All strategies get the same samples, weights, global batch and, on a CPU, the same number of threads: a single
    process gets those of all ranks. No data set is read.

    Args:
        strategies: names in `ARMS` or `more`; None takes those that can run so, without `reduce`.
        more: strategies of your own, by name; functions that can be pickled.
        progress: show a bar on stderr.
        sizes: of `BenchOptions`.

    Raises:
        OptionError: a strategy, a number or a device that cannot work; the message names it.
        RunError: a rank failed.
    """
    options, known = BenchOptions(**sizes), {**ARMS, **(more or {})}
    refused = {} if options.ranks == 2 else {"branch": f"needs 2 ranks, found {options.ranks}"}
    if options.precision == "fp16":
        refused |= dict.fromkeys(("branch", "fsdp"), "does not train in fp16; give --precision bf16 or fp32")
    if strategies is None:
        strategies = [name for name in known if name not in {"reduce", *refused}]
    elif not strategies:
        raise OptionError(f"strategies must name at least one of {', '.join(known)}")
    for name in strategies:
        check_name("strategy", name, known)
        if name in refused:
            raise OptionError(f"strategy {name!r} {refused[name]}")
    names = [name for name in dict.fromkeys(strategies) if name != "one core"]
    if options.device == "cpu":  # the baseline of efficiency; on GPUs `single` is
        names.insert(0, "one core")
    arms = {name: known[name] for name in names}
    ranks = run_on_ranks(
        _measure, options, arms, progress, num_processes=options.ranks, shows_progress=progress
    )
    return ParallelBench(
        options=options,
        device=torch.cuda.get_device_name() if options.device == "cuda" else cpu_name(),
        num_cores=num_usable_cores(),
        costs=ranks[0]["costs"],
        network=ranks[0]["network"],
        image_layers=ranks[0]["image_layers"],
        turns={name: [turns for rank in ranks if (turns := rank["turns"][name])] for name in names},
    )


def _measure(options: BenchOptions, arms: Mapping[str, BuildArm], progress: bool) -> dict[str, Any]:
    """What one rank does: probes, then the strategies in turns, starting with another one in each round."""
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, names = distributed.get_rank(), list(arms)
    device = device_of(options, rank)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(options.num_threads("ddp"))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    total = 1 + options.rounds * len(names)
    with progress_bar(total=total, name="probing", show=progress and rank == 0) as bar:
        batches = [make_batch(options, 0, shares).to(device) for shares in (2 * options.ranks, options.ranks)]
        costs = probe_costs(_make_trainer(options, rank, Strategy()), batches)
        network = probe_network(device)
        sizes: Any = {"batch_size": options.batch_size / 2, "num_micro_batches": options.micro_batches}
        plan = predict("branch", costs, network, num_devices=2, **sizes)
        bar.update()
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                bar.set_description(name)
                if rank == 0 or name not in ALONE:
                    cut, is_first = plan.image_layers, number == 0
                    turns[name].append(_turn(options, name, arms[name], rank, cut, measures=is_first))
                gc.collect()
                distributed.barrier()
                bar.update()
    distributed.destroy_process_group()
    return {"costs": costs, "network": network, "image_layers": plan.image_layers, "turns": turns}


def _turn(
    options: BenchOptions, name: str, build: BuildArm, rank: int, cut: int | None, *, measures: bool
) -> dict[str, Any]:
    """Construct a strategy, warm it up and time it; memory is counted in a step of its own."""
    device, values = device_of(options, rank), []
    torch.set_num_threads(options.num_threads(name))
    arm = build(options, rank, cut)
    arm.step()
    if name not in ALONE:
        distributed.barrier()
    marks, cpu_s = [clock(device)], time.process_time()
    for _ in range(options.steps):
        values.append(arm.step())
        marks.append(clock(device))
    cpu_s = time.process_time() - cpu_s
    steps_s = [after - before for before, after in pairwise(marks)]
    found: dict[str, Any] = {"steps_s": steps_s, "cpu_s": cpu_s, "values": values}
    if measures:
        with LiveBytes(device_type=device.type).add(*arm.held) as live:
            arm.step()
        found["peak_bytes"] = live.peak_bytes
    return found
