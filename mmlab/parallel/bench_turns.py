"""The strategies of `mmlab bench parallel` on one rank: constructed, warmed up, timed, measured, forgotten.

Strategies take turns, so that whatever else the machine does meets all of them. Each turn builds its model from the same
seed, and memory holds one strategy at a time. A turn of several ranks joins them in a process group of its own; `single`
runs on rank 0 without a group, while the others wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from tqdm.auto import tqdm

from mmlab.machine import process_rss_bytes
from mmlab.model.fusion_model import FusionModel
from mmlab.model.presets import build_model
from mmlab.parallel.branch_strategy import BranchStrategy
from mmlab.parallel.predict import predict
from mmlab.parallel.probe import clock, costs_from, network_from, probe_network, probe_parts
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.parallel.timeline import Timeline
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from mmlab.training.strategy import Strategy
from mmlab.types import Batch

VOCAB_SIZE = 30_522  # of bert-base-uncased: its embedding is reduced like any other weight
OBJECTIVES = ("contrastive", "matching")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of the benchmark, the same for every strategy; picklable."""

    strategies: tuple[str, ...]
    model: str = "small"
    num_ranks: int = 2
    threads_per_rank: int = 1
    batch_size: int = 16  # samples of a step, over all ranks
    num_micro_batches: int = 1  # of a step, on every rank
    image_side: int = 128  # pixels
    num_tokens: int = 32
    num_steps: int = 4  # timed in a row
    num_rounds: int = 3
    device_type: str = "cpu"
    precision: str = "fp32"
    seed: int = 0
    progress: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)  # strategies besides those of `BENCH_STRATEGIES`

    def device(self, rank: int) -> torch.device:
        return torch.device(self.device_type, rank) if self.device_type == "cuda" else torch.device("cpu")

    def strategy(self, name: str) -> BenchStrategy:
        found: BenchStrategy = self.more[name] if name in self.more else BENCH_STRATEGIES[name]
        return found

    def num_threads(self, name: str) -> int:
        """Intra-op threads of one process: together every strategy has the same, but for `one core`."""
        return self.threads_per_rank * (self.num_ranks if self.strategy(name).all_cores else 1)

    def num_devices(self, name: str) -> int:
        """GPUs that a strategy uses; on a CPU, how many times the cores of one rank."""
        strategy = self.strategy(name)
        uses_all = strategy.joins or (strategy.all_cores and self.device_type == "cpu")
        return self.num_ranks if uses_all else 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A strategy that is ready to step."""

    step: Callable[[], float]  # returns the loss
    held: tuple[Any, ...]  # models, optimizers and tensors that stay between steps
    timeline: Timeline | None = None  # when each branch computed


@dataclass(frozen=True, slots=True)
class BenchStrategy:
    """How a strategy is constructed, and on what it runs."""

    build: Callable[..., Prepared]  # of a setting, a rank and the best cut of the image branch
    joins: bool = True  # needs a process group of all ranks; else it runs on rank 0 alone
    num_ranks: int | None = None  # that it needs
    all_cores: bool = False  # on a CPU its one process gets the threads of all ranks


def seeded_model(setting: Setting) -> FusionModel:
    """The model that every strategy starts from."""
    torch.manual_seed(setting.seed)
    model = build_model(setting.model, vocab_size=VOCAB_SIZE)
    model.token_head.requires_grad_(False)  # no objective here predicts hidden tokens
    return model


def make_batch(setting: Setting, rank: int = 0, num_ranks: int = 1) -> Batch:
    """A rank's share of the batch that every strategy trains on: noise, texts from half to all of the padded length."""
    size, side, length = setting.batch_size, setting.image_side, setting.num_tokens
    draw = torch.Generator().manual_seed(setting.seed)
    lengths = torch.randint((length + 1) // 2, length + 1, (size, 1), generator=draw)
    every_part = setting.num_ranks * setting.num_micro_batches
    lengths[:: max(1, size // every_part)] = length  # so that all parts are padded alike
    whole = Batch(
        pixel_values=torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=draw),
        pixel_mask=torch.ones(size, side, side, dtype=torch.bool),
        input_ids=torch.randint(0, VOCAB_SIZE, (size, length), generator=draw),
        attention_mask=torch.arange(length) < lengths,
        labels=None,
        record_ids=[str(number) for number in range(size)],
        groups=torch.arange(size),
    )
    share = size // num_ranks
    return whole.part(slice(rank * share, (rank + 1) * share))


def make_trainer(setting: Setting, rank: int, **options: Any) -> FusionTrainer:
    """A trainer on this rank's device."""
    return FusionTrainer(
        seeded_model(setting),
        objectives=OBJECTIVES,
        precision=setting.precision,
        device=setting.device(rank),
        seed=setting.seed,
        **options,
    )


def _trained(setting: Setting, rank: int, cut: int | None, *, strategy: str = "ddp") -> Prepared:
    """`FusionTrainer` on this rank's share of the samples."""
    parallel = ParallelOptions(strategy=strategy, image_layers=cut if strategy == "branch" else None)
    trainer = make_trainer(setting, rank, strategy=make_strategy(parallel))
    batch = make_batch(setting, rank % trainer.strategy.num_shares, trainer.strategy.num_shares).to(
        trainer.device
    )
    size = len(batch) // setting.num_micro_batches
    window = [batch.part(slice(start, start + size)) for start in range(0, len(batch), size)]
    timeline = None
    if isinstance(trainer.strategy, BranchStrategy) and setting.device_type == "cpu":
        timeline = trainer.strategy.branches.timeline = Timeline()
    held = (trainer.model, trainer.optimizer, *batch.tensors())
    return Prepared(lambda: trainer.train_step(window)["loss"], held, timeline)


BENCH_STRATEGIES: dict[str, BenchStrategy] = {
    "one core": BenchStrategy(_trained, joins=False),
    "single": BenchStrategy(_trained, joins=False, all_cores=True),
    "reduce": BenchStrategy(partial(_trained, strategy="reduce")),
    "ddp": BenchStrategy(_trained),
    "fsdp": BenchStrategy(partial(_trained, strategy="fsdp")),
    "branch": BenchStrategy(partial(_trained, strategy="branch"), num_ranks=2),
}


class Groups:
    """Process groups of all ranks, one after the other, over the launcher's store."""

    def __init__(self, device_type: str) -> None:
        self.backend = "nccl" if device_type == "cuda" else "gloo"
        self.store, self.rank, self.num_ranks = next(distributed.rendezvous("env://"))
        self._number = 0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The default group, inside the context; waits for all ranks."""
        self._number += 1  # keys of an earlier group lead to ports that are closed
        distributed.init_process_group(
            self.backend,
            store=distributed.PrefixStore(f"group {self._number}", self.store),
            rank=self.rank,
            world_size=self.num_ranks,
        )
        try:
            yield
        finally:
            distributed.destroy_process_group()


def measure_on_rank(setting: Setting) -> dict[str, Any]:
    """What one rank does: probes, then the strategies in turns, another one first in each round."""
    groups, names = Groups(setting.device_type), list(setting.strategies)
    torch.set_num_threads(setting.threads_per_rank)
    if setting.device_type == "cuda":
        torch.cuda.set_device(setting.device(groups.rank))
    found: dict[str, Any] = {"strategies": {name: [] for name in names}, "image_layers": None}
    show = None if setting.progress and groups.rank == 0 else True
    with tqdm(total=1 + setting.num_rounds * len(names), desc="probing", disable=show) as bar:
        found["parts"], found["links"], found["image_layers"] = _probed(setting, groups)
        bar.update()
        for number in range(setting.num_rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                bar.set_description(name)
                turn = _turn(setting, name, groups, found["image_layers"], measures=number == 0)
                found["strategies"][name] += [] if turn is None else [turn]
                bar.update()
    return found


def _probed(setting: Setting, groups: Groups) -> tuple[dict[str, Any], list[dict[str, Any]], int | None]:
    """What this rank measured of parts and links; and the best cut of the image branch by what all measured."""
    trainer = make_trainer(
        setting, groups.rank, strategy=Strategy()
    )  # without a process group it reduces nothing
    batches = [
        make_batch(setting, 0, number).to(trainer.device)
        for number in dict.fromkeys((max(2, setting.num_ranks), 1))
    ]
    with groups.joined():
        parts = probe_parts(trainer, batches, meet=distributed.barrier)
        if setting.num_ranks == 1:
            return parts, [], None
        links = probe_network(setting.device(groups.rank))
        everywhere: list[Any] = [None] * setting.num_ranks
        distributed.all_gather_object(everywhere, (parts, links))
    costs = costs_from([of_rank for of_rank, _ in everywhere])
    network, _ = network_from([of_rank for _, of_rank in everywhere])
    best = predict(
        "branch",
        costs,
        network,
        num_devices=2,
        batch_size=setting.batch_size / 2,
        num_micro_batches=setting.num_micro_batches,
    )
    return parts, links, best.image_layers


def _turn(
    setting: Setting, name: str, groups: Groups, cut: int | None, *, measures: bool
) -> dict[str, Any] | None:
    """One turn of a strategy on this rank; None if the rank has no part in it."""
    strategy, device = setting.strategy(name), setting.device(groups.rank)
    if not strategy.joins and groups.rank:
        return None
    torch.set_num_threads(setting.num_threads(name))
    with groups.joined() if strategy.joins else nullcontext():
        prepared = strategy.build(setting, groups.rank, cut)
        prepared.step()
        found = _timed(setting, prepared, device, joins=strategy.joins)
        if measures:  # in a step that is not timed
            found |= _measured(prepared, device)
        del prepared
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _timed(setting: Setting, prepared: Prepared, device: torch.device, *, joins: bool) -> dict[str, Any]:
    if joins:
        distributed.barrier()
    if prepared.timeline is not None:
        prepared.timeline.spans.clear()
    losses, marks = [], [clock(device)]
    cpu_s = time.process_time()
    for _ in range(setting.num_steps):
        losses.append(prepared.step())
        marks.append(clock(device))
    return {
        "step_s": [after - before for before, after in pairwise(marks)],
        "wall_s": marks[-1] - marks[0],
        "cpu_s": time.process_time() - cpu_s,
        "losses": losses,
        "spans": [] if prepared.timeline is None else [tuple(span) for span in prepared.timeline.spans],
    }


def _measured(prepared: Prepared, device: torch.device) -> dict[str, Any]:
    before = written_bytes()
    with LiveBytes(device_type=device.type).add(*prepared.held) as live:
        prepared.step()
    after = written_bytes()
    found: dict[str, Any] = {
        "written_bytes": None if before is None or after is None else after - before,
        "peak_bytes": live.peak_bytes,
        "memory_source": "live tensors",
        "rss_bytes": process_rss_bytes(),
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = clock(device)
            prepared.step()
            wall_s = clock(device) - started
        spans = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profile.events()
            # kernels of NCCL wait for other ranks
            if event.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in event.name.lower()
        ]
        found |= {
            "kernel_ratio": covered_ratio(spans, wall_s),
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
        found["memory_source"] = "torch allocator"
    return found


def written_bytes() -> int | None:
    """Bytes that this process has written to files and sockets so far; None if the system does not count them."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["wchar"])


def covered_ratio(spans: list[tuple[float, float]], wall_s: float) -> float:
    """Share of the time that at least one of the spans (start, end) covers.

    >>> covered_ratio([(0, 2), (1, 3), (5, 6)], 10)
    0.4
    """
    busy_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return min(1.0, busy_s / wall_s)
