"""`FusionTrainer`: the training loop, with exact accumulation, mixed precision and one event a step.

The gradient of an optimizer step is that of the window's samples taken together: each objective's sum is divided by
its count over the *whole* window of micro-batches, also in the last, shorter one. (A contrastive loss still finds
its negatives inside each micro-batch, of one rank or of all; see `mmlab.training.losses`.) Dropout and negatives are drawn from
torch's generators, seeded from (seed, step), so no generator state is kept and a resumed run draws the same. Clocks are
read after the device has finished.

Costs beside the model: AdamW's two moments a weight, a window of batches in host memory, one synchronisation a step.
It does not print: effects leave through `emit(event)`, checkpoints through `mmlab.training.checkpoint.Checkpoints`.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmlab.errors import DataError, OptionError, RunError
from mmlab.machine import require_device, signals_held
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.compiling import Compiled
from mmlab.model.huggingface import taking_batches
from mmlab.model.parameters import freeze as freeze_parameters
from mmlab.model.parameters import learning, parameter_groups, parts_of
from mmlab.parallel.branch import BranchRanks
from mmlab.parallel.faults import DATA, EVALUATES, SAVES, STEP
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.strategies import ParallelOptions, make_strategy
from mmlab.runs.control import Control
from mmlab.runs.events import RunEvent
from mmlab.runs.meters import LiveBytes, step_memory
from mmlab.training.evaluation import evaluate, offending
from mmlab.training.gradient import StepGradient
from mmlab.training.losses.all_ranks import AllRanks
from mmlab.training.losses.base import Objective
from mmlab.training.losses.names import OBJECTIVES, parse_objectives
from mmlab.training.optimizer import RestartableAdamW, warmup_cosine
from mmlab.training.options import TrainOptions, change_options, check_weighting
from mmlab.training.out_of_memory import Result, retried
from mmlab.training.padding import measure_padding
from mmlab.training.precision import NormsOfParts, Precision, Shares, StepResult, part_norms
from mmlab.training.state import WeightsAndMoments, by_sharing
from mmlab.training.weighting import Weighting, make_weighting
from mmlab.training.window import Window
from mmlab.types import Batch, CostModel

if TYPE_CHECKING:
    from mmlab.training.checkpoint.keeping import Checkpoints

StepValues = dict[str, Any]  # keys of mmlab.runs.events.EVENT_KEYS


class FusionTrainer:
    """Trains a `FusionModel`, a module of your own that takes a `batch`, or any module whose forward returns `.loss`.

    Args:
        model: a module whose forward takes one argument `batch` gets the `Batch` and its output goes to the
            objectives; any other is wrapped in `LossModel`.
        options: see `TrainOptions`; `changes` are options by name that replace those.
        objectives: names, or objects by name, in place of the options'.
        weighting: a name, or a `Weighting`, in place of the options'.
        parallel: how the ranks that `torchrun` started share a step: a name in `mmlab.parallel.strategies.STRATEGIES`,
            or `ParallelOptions`. In a single process it changes nothing.
        emit: takes each `RunEvent`, for example `RunLog(folder).emit`.
        memory: predicts a step's peak in bytes; the prediction is logged beside what was measured.
        live: counts live tensors during each step, exactly but slowly; the way to a peak on a CPU.

    Raises:
        OptionError: an unknown objective, a device that is not there, a precision that it does not support, or a number
            out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TrainOptions | None = None,
        *,
        objectives: Sequence[str] | Mapping[str, Objective] | None = None,
        weighting: str | Weighting | None = None,
        parallel: str | ParallelOptions = "ddp",
        emit: Callable[[RunEvent], object] | None = None,
        memory: CostModel | None = None,
        live: LiveBytes | None = None,
        **changes: Any,
    ) -> None:
        named = None if objectives is None or isinstance(objectives, Mapping) else tuple(objectives)
        if named is not None:
            changes["objectives"] = named
        if isinstance(weighting, str):
            changes["weighting"] = weighting
        self.options = chosen = change_options(options, changes)
        objectives = objectives if isinstance(objectives, Mapping) else chosen.objectives
        weighting = weighting if isinstance(weighting, Weighting) else chosen.weighting
        (eval_every, eval_batches, device, precision) = (
            chosen.eval_every,
            chosen.eval_batches,
            chosen.device,
            chosen.precision,
        )
        weighting_on, lr, weight_decay = chosen.weighting_on, chosen.lr, chosen.weight_decay
        warmup_ratio, total_steps = chosen.warmup_ratio, chosen.total_steps
        accumulation_steps, max_grad_norm = chosen.accumulation_steps, chosen.max_grad_norm
        lr_factors, layer_decay, freeze = chosen.lr_factors, chosen.layer_decay, chosen.freeze
        checkpointing, compile, channels_last = chosen.checkpointing, chosen.compile, chosen.channels_last
        on_out_of_memory, on_nonfinite, seed = chosen.on_out_of_memory, chosen.on_nonfinite, chosen.seed
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        require_device(str(self.device))
        self.precision = Precision.parse(precision, self.device)
        self.ranks, shared = ProcessGroup(), ParallelOptions.parse(parallel)
        self._engine = make_strategy(shared, self.ranks, self.device)
        splits = on_out_of_memory == "split" or (on_out_of_memory == "auto" and self._engine.splits)
        self._engine.check(scales=self.precision.scales, splits=splits, compiles=bool(compile))
        self.model = taking_batches(model)
        if not self._engine.requires_equal_steps:  # else no device may have room for all of it
            self.model.to(self.device)
        freeze_parameters(self.model, freeze)
        if checkpointing:
            enable_checkpointing(self.model)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self._engine.prepare(self.model)
        self.objectives = parse_objectives(self.model, objectives)
        self.branches: BranchRanks | None = None  # where the ranks are a branch each
        if shared.strategy == "branch" and self.ranks.world_size > 1:
            self.branches = BranchRanks(
                self.model,
                objectives=self.objectives,
                precision=self.precision,
                device=self.device,
                ahead=shared.ahead,
                image_layers=shared.image_layers,
                ranks=self.ranks,
            )
        if isinstance(weighting, str):
            bounds = {} if len(self.objectives) > 1 else {"min_share": 0.0, "max_share": 1.0}
            weighting = make_weighting(weighting, list(self.objectives), **bounds)
        self.weighting, self.weighting_on = weighting, weighting_on
        check_weighting(weighting, weighting_on)
        self.eval_every, self.eval_batches = eval_every, eval_batches
        self.parameters = learning(self.model)
        self.precision.check(self.parameters)
        groups = parameter_groups(
            self.model, weight_decay=weight_decay, lr_factors=lr_factors, layer_decay=layer_decay
        )
        self._norms_of: NormsOfParts | None = None if self.branches is None else self.branches.part_norms
        if self._engine.requires_equal_steps:
            shares = Shares(self.ranks.world_size, lambda numbers: self.ranks.sums(numbers, self.device))
            self._norms_of = partial(part_norms, shares=shares)
        self.optimizer = RestartableAdamW(
            by_sharing(groups) if self._engine.requires_equal_steps else groups,
            lr=lr,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self._weights_and_moments = WeightsAndMoments(
            self.model, self.optimizer, groups, self._engine, self.branches, self.device
        )
        self.lr, self.warmup_ratio, self.total_steps = lr, warmup_ratio, total_steps
        self.accumulation_steps, self.max_grad_norm, self.seed = accumulation_steps, max_grad_norm, seed
        self.on_nonfinite, self._parts = on_nonfinite, parts_of(self.model)
        self.step = self.epoch = self.num_samples = self.last_epoch = 0
        self.epoch_batches = 0  # done in the current epoch
        self._fixed_schedule = total_steps is not None
        self.schedule: list[float] | None = None  # what `total_steps` was stretched from, see `learning_rate`
        self.saved_on = self.num_sharing  # that of the run whose checkpoint this one goes on from
        self._resumed_on_others = False
        self.memory, self._live = memory, live
        if live is not None:
            if compile:
                raise OptionError(
                    "live counts tensors operation by operation; it cannot see into compile=True"
                )
            live.add(self.model, self.optimizer)
        self.num_out_of_memory = 0
        all_ranks = AllRanks.of(self.objectives, self.ranks, self.device)
        self._window = Window(
            self.model,
            self.objectives,
            self.precision,
            self.device,
            seed=self._seed_draw,
            on_failure=self._ran_out,
            recover=splits,
            forward=self._compiled(compile) if compile else None,
            all_ranks=all_ranks,
            engine=self._engine,
        )
        self._gradient = StepGradient(
            model=self.model,
            objectives=self.objectives,
            precision=self.precision,
            device=self.device,
            ranks=self.ranks,
            engine=self._engine,
            window=self._window,
            all_ranks=all_ranks,
            branches=self.branches,
            parameters=self.parameters,
            parts=self._parts,
            norms_of=self._norms_of or part_norms,
            seed=self._seed_draw,
            retried=self._retried,
        )
        self._emit = emit or (lambda event: None)
        self._stopping = threading.Event()

    @property
    def num_sharing(self) -> int:
        """Ranks that share the samples out among themselves."""
        return self.ranks.world_size if self.branches is None else 1

    def train_step(self, batches: Sequence[Batch], *, data_wait_s: float = 0.0) -> StepValues:
        """One optimizer step over a window of micro-batches, which may be on the CPU.

        Reseeds torch's generators. A micro-batch without anything to learn from (every count zero) is left out, and a
        window of such batches is a skipped step.

        Args:
            data_wait_s: time spent waiting for the batches, to be reported and counted into `step_s`.

        Returns:
            The values of a `step` event.

        Raises:
            RunError: the loss, or under fp32 and bf16 the gradient, is not finite; the weights are as before the
            step.
        """
        started = self._start_step()
        self.ranks.note(self.step, STEP)
        self.ranks.begin_step(self.device)
        num_failures, doing = self.num_out_of_memory, f"step {self.step}"
        counted = self._gradient.count(batches, doing)
        if self._live is not None:
            self._live.add(*(tensor for batch in counted.learnt for tensor in batch.tensors()))
        weights, norms = self.weighting.weights(), None
        predicted_bytes = None if self.memory is None else max(self.memory(batch.shape) for batch in batches)
        with self._live or nullcontext(), self.precision.arithmetic():
            if self.weighting.wants_grad_norms(self.step + 1):
                norms = self._gradient.norms_by_objective(counted, doing)
            reduce = self._engine.should_overlap(predicted_bytes, self.step)
            means, num_parts = self._gradient.compute(counted, weights, doing, reduce=reduce)
            if not math.isfinite(sum(means.values())):  # its gradient may look sound all the same
                self.model.zero_grad(set_to_none=True)
            result = self._retried(
                lambda: self.precision.step(self.optimizer, self._parts, self.max_grad_norm, self._norms_of)
            )
        if not math.isfinite(sum(means.values())) or (result.skipped and means and not self.precision.scales):
            self._not_finite(counted.learnt, means, result)
        self.step += 1
        if self.weighting_on == "training":
            self.weighting.update(self.step, means, norms)
        self.epoch_batches += len(batches)
        num_samples = sum(map(len, batches))
        self.num_samples += num_samples
        waste = measure_padding(batches, packed=getattr(self.model, "is_packed", False))
        step_s = self._clock() - started + data_wait_s
        shapes = [batch.shape for batch in batches]
        return {
            "epoch": self.epoch,
            "num_samples": num_samples,
            "num_batches": len(batches),
            "num_tokens": max(shape.num_tokens for shape in shapes),
            "height": max(shape.height for shape in shapes),
            "width": max(shape.width for shape in shapes),
            "loss": sum(weights[name] * mean for name, mean in means.items()) if means else math.nan,
            **{f"{name}_loss": mean for name, mean in means.items() if name in OBJECTIVES},
            **{f"{name}_weight": weights[name] for name in means if name in OBJECTIVES},
            "lr": self.learning_rate(self.step - 1),
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "loss_scale": result.loss_scale,
            **{f"{part}_grad_norm": norm for part, norm in result.part_norms.items()},
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "samples_per_s": num_samples / step_s,
            **waste,
            **({} if predicted_bytes is None else {"predicted_bytes": int(predicted_bytes)}),
            **step_memory(self.device, self._live),
            "num_parts": num_parts,
            "num_out_of_memory": self.num_out_of_memory - num_failures,
            **self._gradient.waiting(batches),
        }

    def _compiled(self, backend: bool | str) -> Compiled:
        def warn(message: str) -> None:
            self._emit_event("warning", {"message": message, "source": "compile"})

        name = "inductor" if backend is True else str(backend)
        return Compiled(self.model, self.device, backend=name, on_limit=warn)

    def _not_finite(self, batches: Sequence[Batch], means: Mapping[str, float], result: StepResult) -> None:
        """Name the samples at fault, and raise or go on, as asked."""
        self._window.forget()
        ids, whom = [], "no sample by itself: the gradient overflowed"
        if self._engine.requires_equal_steps:
            whom = "some sample of this step: under fsdp they cannot be looked at one by one"
        else:
            self._weights_and_moments.gather()
            ids = offending(self.model, batches, self.precision, self.device)
        if ids:
            whom = f"samples {', '.join(ids)}"
        message = (
            f"step {self.step}: loss {dict(means)}, gradient norm {result.grad_norm}; not finite for {whom}"
        )
        if self.on_nonfinite == "raise" or not result.skipped:
            raise RunError(f"{message}; mend or remove them, lower lr, or use on_nonfinite='skip'")
        self._emit_event("warning", {"message": message, "source": "trainer"})

    def _retried(self, work: Callable[[], Result]) -> Result:
        return retried(work, self.device, lambda failure: self._ran_out("step", failure, 1))

    def _ran_out(self, phase: str, failure: str, num_parts: int) -> None:
        self.num_out_of_memory += 1
        self._engine.be_careful(self.step)
        values = {"phase": phase, "operation": failure, "num_parts": num_parts}
        self._emit_event("out_of_memory", values)

    def fit(
        self,
        loader: Iterable[Batch],
        *,
        num_epochs: int = 1,
        eval_loader: Iterable[Batch] | None = None,
        checkpoints: Checkpoints | None = None,
        control: Control | None = None,
    ) -> list[StepValues]:
        """Train for `num_epochs` epochs; after a resume in mid-epoch the first of them is the rest of that epoch.

        At each epoch's start `loader.set_epoch(epoch)` is called where it exists. `stop()`, or an interrupt from the
        keyboard, ends the loop after the step or evaluation in hand, with the trainer's state intact; the interrupt is
        then raised again. A second one ends it at once. torch's generators are left as they were found.

        Args:
            loader: gives the batches of one epoch each time it is iterated; it needs a length where `total_steps` is
                not given.
            eval_loader: evaluated after every epoch, and in between where `eval_every` says so.
            checkpoints: saves when due, after every epoch, and when `stop()`, an interrupt or SIGTERM ends the loop.
            control: pauses and stops the loop between two steps, as somebody asks by a file; of several ranks that
                of rank 0 holds. Time spent in a pause is in no step's figures.

        Returns:
            The values of every step, in order.

        Raises:
            OptionError: weights that follow held-out losses, and no `eval_loader`.
        """
        if self.weighting_on == "held_out" and eval_loader is None:
            raise OptionError("weighting_on='held_out' follows held-out losses: give fit an eval_loader")
        self._stopping.clear()
        control = control or Control(None)
        history: list[StepValues] = []
        held = (signal.SIGINT,) if checkpoints is None else (signal.SIGINT, signal.SIGTERM)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), signals_held(*held) as signals:
            self._plan_schedule(loader, self.epoch + num_epochs)
            while self.epoch < self.last_epoch and not self._asked_to_stop(signals, control):
                for batches, data_wait_s in self._windows(loader):
                    history.append(self.train_step(batches, data_wait_s=data_wait_s))
                    self._emit_event("step", history[-1])
                    if eval_loader is not None and self.eval_every and not self.step % self.eval_every:
                        self._evaluate_midway(eval_loader)
                    if hasattr(loader, "observe"):
                        loader.observe(history[-1])
                    stopping = self._asked_to_stop(signals, control)
                    if stopping or (checkpoints is not None and self._agreed(checkpoints.due(self.step))):
                        self._save(checkpoints, loader)
                    if stopping:
                        return history
                self._emit_event("epoch", {"epoch": self.epoch, "num_steps": self.step})
                self.epoch, self.epoch_batches = self.epoch + 1, 0
                found = {} if eval_loader is None else self._evaluate_in_fit(eval_loader)
                self._save(checkpoints, loader, found)
        return history

    def _evaluate_midway(self, loader: Iterable[Batch]) -> None:
        """Evaluate between two steps, and leave torch's generators and the modules' modes as they are."""
        training = [module for module in self.model.modules() if module.training]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._evaluate_in_fit(islice(iter(loader), self.eval_batches))
        for module in training:
            module.training = True

    def _evaluate_in_fit(self, loader: Iterable[Batch]) -> StepValues:
        """Evaluate, say so, and let the weights follow where they are to."""
        measured = self._measure(loader, by_objective=self.weighting_on == "held_out")
        means = measured.pop("by_objective", {})
        if means:  # of the same samples on every rank, but devices round differently
            counted = self.ranks.sums([means.get(name, math.nan) for name in self.objectives], self.device)
            means = {
                name: total / self.ranks.world_size
                for name, total in zip(self.objectives, counted, strict=True)
                if not math.isnan(total)
            }
            self.weighting.update(self.step, means)
        self._emit_event("eval", measured)
        return measured

    def _plan_schedule(self, loader: Iterable[Batch], last_epoch: int) -> None:
        """Work out the schedule's length, unless it was given, or this is the rest of a run that has one."""
        others = self.saved_on != self.num_sharing and self.step > 0
        if not self._fixed_schedule and (self.total_steps is None or last_epoch != self.last_epoch or others):
            if others and self.total_steps is not None and last_epoch == self.last_epoch:
                place, length = self._place(self.step)
                self.schedule = [self.step, place, length or 0]
            self.total_steps = self.step + self.steps_left(loader, last_epoch)
        self.last_epoch, self.saved_on = last_epoch, self.num_sharing
        self._resumed_on_others = others

    def steps_left(self, loader: Iterable[Batch], last_epoch: int) -> int:
        """Until so many epochs are done, if all are as long as this one."""
        if last_epoch <= self.epoch:
            return 0
        num_batches = len(loader)  # type: ignore[arg-type]
        whole = math.ceil(getattr(loader, "whole_epoch", num_batches) / self.accumulation_steps)
        rest = math.ceil((num_batches - self.epoch_batches) / self.accumulation_steps)
        return rest + (last_epoch - self.epoch - 1) * whole

    def _asked_to_stop(self, signals: Sequence[int], control: Control) -> bool:
        """Whether any rank wants to stop; waits while the run is paused."""
        return control.wait_if_paused_or_stop(
            lambda: signals or self._stopping.is_set(),
            agree=lambda level: self.ranks.largest(level, self.device),
            emit=self._emit_event,
        )

    def _agreed(self, wanted: bool) -> bool:
        """Whether any rank wants it."""
        return self.ranks.largest(float(wanted), self.device) > 0

    def _save(
        self, checkpoints: Checkpoints | None, loader: Iterable[Batch], found: StepValues | None = None
    ) -> None:
        """Rank 0 writes a checkpoint and the others wait for it; what is shared out every rank writes."""
        if checkpoints is not None:
            self.ranks.note(self.step, SAVES)
            state = self.state_dict()
            if hasattr(loader, "start_batch"):  # it can go on by itself
                state["loader"] = loader.state_dict()  # type: ignore[attr-defined]
            checkpoints.start_interval()  # on every rank, or those that do not write ask for the next one at once
            if self._engine.requires_equal_steps or self.ranks.rank == 0:
                saved = checkpoints.save(
                    state, values=found, ranks=self.ranks if self._engine.requires_equal_steps else None
                )
            if self.ranks.rank == 0:
                self._emit_event("checkpoint", saved)
            self._agreed(False)

    def stop(self) -> None:
        """End `fit` after the step in hand; safe to call from any thread."""
        self._stopping.set()

    def evaluate(self, loader: Iterable[Batch], *, num_candidates: int = 32) -> StepValues:
        """Measure on held-out samples; how they are batched matters only to a `LossModel` with a loss of that kind.

        Args:
            num_candidates: size of the candidate sets behind `loss`.

        Under `fsdp` and `branch` a collective.

        Returns:
            The values of an `eval` event: `loss`, the contrastive loss of each pair among a fixed number of
            candidates, or a `LossModel`'s own loss; and recall at k both ways over all pairs, where the model gives
            embeddings (CLIP does).

        Raises:
            DataError: retrieval without a single pair.
        """
        return self._measure(loader, num_candidates=num_candidates)

    def _measure(
        self, loader: Iterable[Batch], *, num_candidates: int = 32, by_objective: bool = False
    ) -> StepValues:
        started = self._clock()
        self.ranks.note(self.step, EVALUATES)
        self._weights_and_moments.gather()
        measured = evaluate(
            self.model,
            loader,
            self.precision,
            self.device,
            num_candidates=num_candidates,
            objectives=self.objectives,
            by_objective=by_objective,
            on_failure=lambda failure: self._ran_out("evaluation", failure, 2),
            run=self._engine.evaluate,
        )
        means = measured.get("by_objective", {})
        measured |= {f"{name}_loss": mean for name, mean in means.items() if name in OBJECTIVES}
        return {"epoch": self.epoch, "eval_s": self._clock() - started, **measured}

    def learning_rate(self, step: int) -> float:
        """Of a step: linear warm-up, then a cosine to zero at `total_steps`; `lr` throughout without a schedule.

        After a resume on another number of ranks, which take another number of steps, what was left of the schedule is
        stretched over those.
        """
        place, length = self._place(step)
        return self.lr * warmup_cosine(place, length, self.warmup_ratio)

    def _place(self, step: int) -> tuple[float, int | None]:
        """Where the schedule is at a step, and its length, in steps of the ranks that began."""
        if self.schedule is None or self.total_steps is None:
            return step, self.total_steps
        first, place, length = self.schedule
        return place + (step - first) * (length - place) / max(1, self.total_steps - first), int(length)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bitwise; `torch.load(..., weights_only=True)` can read it.

        Under `fsdp` its weights and moments are this rank's shares (`DTensor`), for `Checkpoints` to write. Where ranks
        train a branch each a collective, and all have the whole of it.
        """
        return {
            **self._weights_and_moments.state_dict(),
            "precision": self.precision.state_dict(),
            "weighting": {**self.weighting.state_dict(), "on": self.weighting_on},
            "progress": {
                **{name: getattr(self, name) for name in _PROGRESS},
                "world_size": self.num_sharing,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`.

        Raises:
            OptionError: its objectives' weights follow other losses than this trainer's.
        """
        followed = state["weighting"].get("on", "training")
        if followed != self.weighting_on:
            raise OptionError(
                f"the checkpoint's weights follow {followed} losses; use weighting_on={followed!r} to go on from it"
            )
        self._weights_and_moments.load_state_dict(state)
        self.precision.load_state_dict(state["precision"])
        self.weighting.load_state_dict(state["weighting"])
        progress = state["progress"]
        for name in _PROGRESS:
            setattr(self, name, progress[name])
        self.saved_on = progress["world_size"]

    def description(self) -> StepValues:
        """What a `start` event says of the trainer."""
        return {
            "objective": " + ".join(self.objectives),
            "precision": self.precision.name,
            "device": str(self.device),
            "seed": self.seed,
            "accumulation_steps": self.accumulation_steps,
            "num_steps": self.total_steps,
            "num_parameters": sum(weight.numel() for weight in self.parameters),
        }

    def _emit_event(self, kind: str, values: StepValues) -> None:
        self._emit(RunEvent(kind, self.step, self.ranks.rank, time.time(), values))

    def _windows(self, loader: Iterable[Batch]) -> Iterator[tuple[list[Batch], float]]:
        """Windows of micro-batches, the last one shorter where need be, each with the time spent waiting for it."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        started = time.perf_counter()
        self._seed(-1 - self.epoch)  # a loader may draw its order from torch's generator
        goes_on = getattr(loader, "start_batch", 0) > 0  # by itself, behind the batches that are done
        if self.epoch_batches and not goes_on and self._resumed_on_others:
            raise DataError(
                "the checkpoint was written by another number of ranks in mid-epoch, and this loader cannot tell which "
                "samples are left; use PlannedLoader, or as many ranks as before"
            )
        batches = islice(iter(loader), 0 if goes_on else self.epoch_batches, None)
        self.ranks.note(self.step, DATA)
        while window := list(islice(batches, self.accumulation_steps)):
            yield window, time.perf_counter() - started
            started = time.perf_counter()
            self.ranks.note(self.step, DATA)

    def _start_step(self) -> float:
        """Set the learning rate and start the clock; the window seeds."""
        started = self._clock()
        if not self.model.training:
            self.model.train()
        lr = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._live is not None:
            self._live.reset_peak()
        return started

    def _seed(self, moment: int, draw: int = 0) -> None:
        """Seed torch's generators for a draw of one step (from 0) or for one epoch's order (below 0)."""
        rank = self.ranks.rank
        if self.branches is not None:  # they take the same batches, whose order may be drawn too
            rank = 0
        name = f"{self.seed} {moment} {draw} {rank}".encode()
        key = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(key)

    def _seed_draw(self, draw: int) -> None:
        self._seed(self.step, draw)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


_PROGRESS = ("step", "epoch", "epoch_batches", "num_samples", "total_steps", "last_epoch", "schedule")
