"""One training run from a configuration: read, plan, train, evaluate, save; go on where an earlier run ended.

A run is a folder: `config.toml`, `tokenizer/`, one events file a rank, and `checkpoints/`. Started by `torchrun`, every
rank trains on its share of each plan, or its branch of the model, and rank 0 writes the checkpoints, under `fsdp` with
the shares of all.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from tqdm.auto import tqdm

from mmlab.comparison.config import CACHE_OPTIONS, LOADER_OPTIONS, RunConfig, load_config
from mmlab.comparison.preparation import costs_of, describe_machine, fill_cache, make_datasets
from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import DataError
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import resolve_device, this_process, versions
from mmlab.model.packing import enable_packing
from mmlab.model.presets import build_model
from mmlab.parallel.faults import START_S, TIMEOUT_S, RankWatch, broke_off, current_watch
from mmlab.parallel.launches import LAUNCH, begun_by_this_launch, join, note_launch, was_restarted
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.strategies import CollectiveFailed, ParallelOptions
from mmlab.pricing.planner import memory_scheduler
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.runs.control import Control
from mmlab.runs.events import EVENT_FILES, RunEvent, RunLog
from mmlab.runs.folders import fresh_folder
from mmlab.runs.monitor import DeviceMonitor
from mmlab.schedule.base import Scheduler
from mmlab.schedule.dense import Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.checkpoint.files import MANIFEST, check
from mmlab.training.checkpoint.keeping import Checkpoints, restore
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.base import Objective
from mmlab.training.losses.names import parse_objectives

EVAL_BATCH_SIZE = 32
_CONFIG, _CHECKPOINTS, _TOKENIZER, _MEMORY = "config.toml", "checkpoints", "tokenizer", "memory.json"
_WRITTEN = (_CONFIG, _CHECKPOINTS, _TOKENIZER, _MEMORY, LAUNCH, EVENT_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a finished run found."""

    folder: str
    status: str  # done, or stopped before the last epoch
    resumed_from: str | None  # checkpoint
    num_steps: int  # of the whole run, those before a resume included
    num_epochs: int
    loss: float | None  # of the last step that this process did
    evaluation: Mapping[str, Any]  # values of the last `eval` event
    best_checkpoint: str | None

    def __str__(self) -> str:
        found = ", ".join(
            f"{key} {self.evaluation[key]:.4g}"
            for key in ("loss", "image_to_text_r1", "text_to_image_r1", "chance_r1")
            if key in self.evaluation
        )
        stopped = "stopped after " if self.status == "stopped" else ""
        lines = [f"{self.folder}: {stopped}{self.num_epochs} epochs, {self.num_steps} steps"]
        lines += [f"resumed from {self.resumed_from}"] if self.resumed_from else []
        lines += [f"held out: {found}"] if found else []
        return "\n  ".join(
            lines + ([f"best checkpoint: {self.best_checkpoint}"] if self.best_checkpoint else [])
        )


def train(
    config: RunConfig, *, runs: str | Path = "runs", resume: str = "never", progress: bool = True
) -> TrainingResult:
    """Train as configured, in the folder `runs`/NAME.

    An interrupt, or SIGTERM where it raises, ends the run after the step in hand with a checkpoint. So does
    `mmlab.runs.control.send(folder, "stop")`, on which `train` returns; `"pause"` and `"resume"` hold it and let it go on.
    Started again by `torchrun`, a run goes on from its newest checkpoint, whatever `resume` says.

    Args:
        resume: `auto` goes on from the newest whole checkpoint in the folder, if there is one; `never` starts anew and
            moves what an earlier run left to `previous-N`; else a checkpoint, or a folder of them, to go on from.

    Raises:
        DataError: data or checkpoint cannot be used.
        OptionError: an option cannot work.
        RunError: training failed, here or on a rank that is named.
    """
    with ExitStack() as stack:
        rank, world_size = stack.enter_context(_process_group(config))
        folder = Path(runs) / config.name
        start = None if resume in ("auto", "never") else Path(resume)
        restarted = was_restarted()
        if rank == 0:
            anew = resume == "never" or (
                start is not None and folder.resolve() not in start.resolve().parents
            )
            if anew and not begun_by_this_launch(folder / LAUNCH, restarted=restarted):
                fresh_folder(folder, _WRITTEN)
            folder.mkdir(parents=True, exist_ok=True)
            note_launch(folder / LAUNCH)
        if world_size > 1:
            distributed.barrier()
        log = stack.enter_context(RunLog(folder, rank))
        if world_size > 1:
            stack.enter_context(RankWatch(log.write, timeout_s=config.parallel.get("timeout_s", TIMEOUT_S)))
        run = _Run(config, folder, log, rank=rank, world_size=world_size, progress=progress and rank == 0)
        stack.callback(run.close)
        return run.train(run.start("auto" if restarted else resume, start, own_first=restarted))


class _Run:
    """The parts of one run, joined."""

    def __init__(
        self, config: RunConfig, folder: Path, log: RunLog, *, rank: int, world_size: int, progress: bool
    ) -> None:
        self.config, self.folder, self._log = config, folder, log
        self._rank, self._world_size = rank, world_size
        self._control = Control(folder if rank == 0 else None)
        options = {**config.trainer}
        self._num_epochs = options.pop("num_epochs")
        seed = options.get("seed", 0)
        device = resolve_device(_device(options.pop("device", "auto")))
        train_set, held_out_set = _datasets(
            config, folder if rank == 0 else None, seed=seed, progress=progress
        )
        model = _model(config, len(train_set.tokenizer), seed)
        asked = options.pop("objectives", ("contrastive",))
        objectives = parse_objectives(model, asked, tokenizer=train_set.tokenizer)
        saved = folder / _MEMORY if rank == 0 else None
        parallel = ParallelOptions(
            **{key: config.parallel[key] for key in config.parallel if key != "timeout_s"}
        )
        shares = (0, 1) if parallel.strategy == "branch" else (rank, world_size)  # a branch needs all samples
        scheduler = _scheduler(config, model, objectives, device, shares[1], seed=seed, saved=saved)
        self.scheduler_name = config.scheduler.get("name", "budget")
        loading = {name: config.data[name] for name in LOADER_OPTIONS if name in config.data}
        planner: Any = _Share(whole=scheduler, rank=shares[0], seed=scheduler.seed, world_size=shares[1])
        if isinstance(scheduler, Memory) and config.scheduler.get("follow", True):
            agree = partial(ProcessGroup().largest, device=torch.device(device))
            planner = ResourceAwareScheduler(planner=scheduler, rank=shares[0], emit=log.emit, agree=agree)
        self._loader = PlannedLoader(
            train_set, planner, device=None if device == "cpu" else device, emit=log.emit, **loading
        )
        self._held_out = PlannedLoader(
            held_out_set,
            # the first batches are measured by themselves in mid-epoch: a fair sample, where sorted ones are not
            make_scheduler("random" if options.get("eval_batches") else "sorted", batch_size=EVAL_BATCH_SIZE),
            num_workers=0,
        )
        if self.scheduler_name == "packed":
            enable_packing(model)
        memory = getattr(scheduler, "cost", None) if isinstance(scheduler, Memory) else None
        self.trainer = FusionTrainer(
            model,
            device=device,
            emit=self._take,
            objectives=objectives,
            memory=memory,
            parallel=parallel,
            **options,
        )
        self._checkpoints = Checkpoints(folder / _CHECKPOINTS, emit=log.emit, **config.checkpoint)
        self._bar = tqdm(
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}", disable=None if progress else True
        )
        self._evaluation: Mapping[str, Any] = {}
        self._loss: float | None = None

    def start(self, resume: str, path: Path | None, *, own_first: bool = False) -> Path | None:
        """Go on from a checkpoint where that is wanted, and write the start event; returns the checkpoint.

        Args:
            own_first: the run's own newest one, if there is one, rather than that of `path`.
        """
        found = None
        if resume != "never":
            ranks = self.trainer.ranks
            own = self._checkpoints.newest(ranks) if own_first else None
            found = own or _saved_in(path, self._checkpoints, ranks)
            if found is not None:
                restore(self.trainer, self._loader, found)
                self._warn_of_changes()
        if self._rank == 0:
            self.config.save(self.folder / _CONFIG)
        trainer, config = self.trainer, self.config
        machine = describe_machine(str(trainer.device))
        values = {
            "run_name": config.name,
            "scheduler": self.scheduler_name,
            "model": config.model.get("preset", "small"),
            **trainer.description(),
            "num_steps": self._num_steps(),
            "num_epochs": self._num_epochs,
            "device_name": machine["device_name"],
            "world_size": self._world_size,
            **this_process(),
            "config": {**config.as_dict(), "machine": machine},
            "versions": versions(),
        }
        self._log.write("start", trainer.step, **values)
        return found

    def train(self, resumed_from: Path | None) -> TrainingResult:
        """The epochs that are left."""
        trainer = self.trainer
        self._bar.reset(self._num_epochs)
        self._bar.initial = self._bar.n = self._epochs_done()
        started, status, details = time.perf_counter(), "failed", {}
        interval_s = self.config.events.get("device_interval_s", 0.5)
        try:
            with DeviceMonitor(self._log.emit, device=trainer.device, interval_s=interval_s, rank=self._rank):
                trainer.fit(
                    self._loader,
                    num_epochs=max(0, self._num_epochs - trainer.epoch),
                    eval_loader=self._held_out,
                    checkpoints=self._checkpoints,
                    control=self._control,
                )
            status = "done" if trainer.epoch >= self._num_epochs else "stopped"
        except (KeyboardInterrupt, SystemExit):
            status = "stopped"
            raise
        except Exception as error:
            cause, watch = error, current_watch()
            if watch is not None and (
                broke_off(error) or isinstance(error, CollectiveFailed)
            ):  # in one of torch's own
                cause = watch.explained(error)
            details = {"message": str(cause), "traceback": traceback.format_exc()}
            if cause is error:
                raise
            raise cause from error
        finally:
            run_s = time.perf_counter() - started
            figures = {"num_steps": trainer.step, "run_s": run_s, "paused_s": self._control.paused_s}
            self._log.write("end", trainer.step, status=status, **figures, **details)
        best = self._checkpoints.best
        return TrainingResult(
            folder=str(self.folder),
            status=status,
            resumed_from=None if resumed_from is None else str(resumed_from),
            num_steps=trainer.step,
            num_epochs=trainer.epoch,
            loss=self._loss,
            evaluation=self._evaluation,
            best_checkpoint=None if best is None else str(best),
        )

    def close(self) -> None:
        """Leave the terminal tidy."""
        self._bar.close()

    def _num_steps(self) -> int:
        """Of the whole run, as far as this epoch's plan tells."""
        trainer = self.trainer
        known = trainer.last_epoch == self._num_epochs and trainer.saved_on == trainer.num_sharing
        if trainer.total_steps is not None and known:
            return trainer.total_steps
        return trainer.step + trainer.steps_left(self._loader, self._num_epochs)

    def _epochs_done(self) -> float:
        """The one in hand by what its batches cost: they differ, so steps are no measure of time."""
        plan, num_done = self._loader.plan, self.trainer.epoch_batches
        costs = costs_of(plan) if isinstance(plan, BatchPlan) else np.ones(len(plan))
        return self.trainer.epoch + float(costs[:num_done].sum() / max(1.0, costs.sum()))

    def _take(self, event: RunEvent) -> None:
        """Write an event and show it."""
        self._log.emit(event)
        values = event.values
        if event.kind == "step":
            self._loss = values["loss"] if math.isfinite(values["loss"]) else None
            self._bar.set_postfix_str(
                f"step {event.step}/{self.trainer.total_steps}, epoch {values['epoch']}, loss {values['loss']:.3f}, "
                f"{values['samples_per_s']:.0f} samples/s",
                refresh=False,
            )
            if not self._bar.disable:
                self._bar.update(self._epochs_done() - self._bar.n)
        elif event.kind == "eval":
            self._evaluation = {
                key: value for key, value in values.items() if isinstance(value, int) or math.isfinite(value)
            }
            self._say(f"epoch {values['epoch']}: held-out loss {values['loss']:.4f}")

    def _warn_of_changes(self) -> None:
        path = self.folder / _CONFIG
        if self._rank == 0 and path.exists() and (changes := load_config(path).changes(self.config)):
            message = f"resumed with other options than before: {'; '.join(changes)}"
            self._log.write("warning", self.trainer.step, message=message, source="training")
            self._say(message)

    def _say(self, message: str) -> None:
        if not self._bar.disable:
            self._bar.write(message, file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class _Share(Scheduler):
    """A scheduler whose plans are one rank's share."""

    whole: Scheduler
    rank: int

    def plan(self, samples: Any, *, epoch: int = 0) -> BatchPlan:
        return self.whole.plan(samples, epoch=epoch).shard(self.rank, self.world_size)

    def resume(self, samples: Any, state: Mapping[str, Any], *, world_size: int | None = None) -> BatchPlan:
        return self.whole.resume(samples, state).shard(self.rank, self.world_size)


@contextmanager
def _process_group(config: RunConfig) -> Iterator[tuple[int, int]]:
    """Rank and number of ranks, joined if `torchrun` started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        joined = distributed.is_initialized()
        yield (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
        return
    on_gpu = resolve_device(config.trainer.get("device", "auto")).startswith("cuda")
    # the last resort, behind `RankWatch`
    timeout_s = max(config.parallel.get("timeout_s", TIMEOUT_S), START_S) + 60
    join("nccl" if on_gpu else "gloo", timeout_s=timeout_s)
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        distributed.destroy_process_group()


def _device(name: str) -> str:
    """The device of this rank: under torchrun each has a GPU of its own."""
    if name in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return name


def _datasets(
    config: RunConfig, folder: Path | None, *, seed: int, progress: bool
) -> tuple[MultimodalDataset, MultimodalDataset]:
    others = ("path", *LOADER_OPTIONS, *CACHE_OPTIONS)
    options = {key: value for key, value in config.data.items() if key not in others}
    datasets = make_datasets(
        config.data["path"],
        **{"image": "aspect:128", **options},
        seed=seed,
        progress=progress,
        save_tokenizer_to=None if folder is None else folder / _TOKENIZER,
    )
    if "cache" in config.data:
        limit_gib = config.data.get("cache_limit_gib")
        fill_cache(datasets, config.data["cache"], limit_gib=limit_gib, progress=progress)
    return datasets


def _scheduler(
    config: RunConfig,
    model: torch.nn.Module,
    objectives: Mapping[str, Objective],
    device: str,
    world_size: int,
    *,
    seed: int,
    saved: Path | None,
) -> Scheduler:
    options = {"seed": seed, **config.scheduler}
    name = options.pop("name", "budget")
    if name != "memory":
        return replace(make_scheduler(name, **options), world_size=world_size)
    options.pop("follow", None)
    scheduler: Any = memory_scheduler(
        model,
        device=device,
        precision=config.trainer.get("precision", "fp32"),
        checkpointing=config.trainer.get("checkpointing", False),
        objectives=objectives,
        accumulating=config.trainer.get("accumulation_steps", 1) > 1,
        gradient_buckets=world_size > 1 and config.parallel.get("strategy", "ddp") == "ddp",
        saved=saved,
        progress=False,
        world_size=world_size,
        **options,
    )
    # what is free differs between ranks and moments; plans must not: the least counts
    least = -ProcessGroup().largest(-scheduler.budget, torch.device(device))
    return replace(scheduler, budget=int(least))


def _model(config: RunConfig, vocab_size: int, seed: int) -> torch.nn.Module:
    """The same first weights for the same seed, whatever was drawn before."""
    build: Callable[..., torch.nn.Module] = build_model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(**config.model, vocab_size=vocab_size)


def _saved_in(path: Path | None, own: Checkpoints, ranks: ProcessGroup) -> Path | None:
    """The checkpoint to go on from: the newest of this run's own, or of what was asked for."""
    if path is None:
        return own.newest(ranks)
    if (path / MANIFEST).exists():
        check(path, ranks)
        return path
    inside = path / _CHECKPOINTS
    found = Checkpoints(inside if inside.is_dir() else path).newest(ranks)
    if found is None:
        raise DataError(
            f"{path}: no checkpoint there; give a checkpoint's folder, or a folder of checkpoints"
        )
    return found
