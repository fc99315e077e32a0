"""`TrainerSetup`: a trainer's parts, and the work around its steps: schedule, evaluation, checkpoints."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from mmlab.errors import DataError, OptionError, RunError, check_is, check_name, check_state
from mmlab.machine import resolve_device, signals_held
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.compiling import compiled
from mmlab.model.huggingface import accept_batches
from mmlab.model.parameters import freeze, parameter_groups, parts_of, trainable_parameters, warn_of_modes
from mmlab.runs.control import Control
from mmlab.runs.events import RunEvent
from mmlab.runs.meters import LiveBytes
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.evaluation import Vocabulary, check_meaning, evaluate, nonfinite_samples
from mmlab.training.losses.base import Objective
from mmlab.training.losses.contrastive import AllRanksContrastive, over_all_ranks
from mmlab.training.losses.names import parse_objectives
from mmlab.training.options import TrainOptions
from mmlab.training.out_of_memory import Result, retried
from mmlab.training.precision import Precision, StepResult
from mmlab.training.randomness import RandomStream
from mmlab.training.split import Window, running_statistics
from mmlab.training.step_meter import StepMeter, StepValues, clock, key_of
from mmlab.training.strategy import SAVES, Strategy, alone
from mmlab.training.weighting import Weighting, make_weighting
from mmlab.types import Batch, CostModel

# attributes of a trainer that a checkpoint keeps
_PROGRESS = ("step", "epoch", "epoch_batches", "num_samples", "total_steps", "last_epoch", "schedule")


class TrainerSetup:
    """The parts of `mmlab.training.loop.FusionTrainer`, which documents the arguments.

    Attributes:
        step, epoch, epoch_batches: optimizer steps and epochs done, and batches done in this epoch.
        total_steps: length of the learning rate's schedule; None if it is not known yet.
        schedule: None, or from where the rest of the schedule is stretched, see `learning_rate`: an optimizer step, its
            position in the schedule before, and that schedule's length.
        saved_with: number of ranks, and of micro-batches in a step, of the run that this one resumes.
        objectives, goals: objectives by name as asked for; and as this rank computes them, with the negatives of all ranks
            where that was asked for (`gathers` is then True).
        splits: whether a step that runs out of memory is run again in parts.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TrainOptions | None = None,
        *,
        objectives: Sequence[str] | Mapping[str, Objective] | None = None,
        weighting: str | Weighting | None = None,
        strategy: Strategy | None = None,
        emit: Callable[[RunEvent], object] | None = None,
        memory: CostModel | None = None,
        live: LiveBytes | None = None,
        **changes: Any,
    ) -> None:
        if objectives is not None and not isinstance(objectives, Mapping):
            changes["objectives"] = objectives
        if weighting is not None and not isinstance(weighting, Weighting):
            changes["weighting"] = weighting
        for name in changes:
            check_name("option of the trainer", name, TrainOptions.__dataclass_fields__)
        self.options = replace(options or TrainOptions(), **changes)
        check_is("strategy", strategy, Strategy, "a strategy, as make_strategy() gives", optional=True)
        check_is("memory", memory, "__call__", "a memory model, as fit_memory() gives", optional=True)
        self.strategy = strategy or alone()
        self._emit = emit or (lambda event: None)
        self._make_model(model, objectives if isinstance(objectives, Mapping) else self.options.objectives)
        self.weighting = self._make_weighting(weighting)
        self._make_optimizer()
        self.random = RandomStream([self.device])
        self._order = RandomStream([self.device])  # for loaders that draw their order from torch's generator
        self.meter = StepMeter(
            self.device, memory=memory, live=live, packed=getattr(self.model, "is_packed", False)
        )
        if live is not None:
            if self.options.compile:
                raise OptionError("live counts operations one by one; it cannot see into compile=True")
            live.add(self.model, self.optimizer)
        self.step = self.epoch = self.epoch_batches = self.num_samples = self.last_epoch = 0
        self.num_out_of_memory, self.phase = 0, "forward"
        self.total_steps = self.options.total_steps
        self.schedule: list[Any] | None = None
        self.saved_with = self.strategy.num_shares, self.options.accumulation_steps
        self._num_ranks_changed = False
        self._stopping = threading.Event()
        self.vocabulary = Vocabulary()  # of the loader that `fit` trains on
        # the modules that were in training mode before the last evaluation; empty before the first
        self.trained_modules: list[nn.Module] = []

    def _make_model(self, model: nn.Module, asked: Sequence[str] | Mapping[str, Objective]) -> None:
        options = self.options
        self.device = torch.device(resolve_device(options.device or "auto"))
        self.precision = Precision(options.precision, self.device)
        model = accept_batches(model)
        freeze(model, options.freeze)
        warn_of_modes(model)
        if options.checkpointing:
            enable_checkpointing(model)
        if options.channels_last:
            model.to(memory_format=torch.channels_last)
        self.objectives = parse_objectives(model, asked)
        self.goals = self.objectives
        if self.strategy.num_shares > 1:
            self.goals = {name: over_all_ranks(goal, self.device) for name, goal in self.objectives.items()}
        self.gathers = any(isinstance(goal, AllRanksContrastive) for goal in self.goals.values())
        policy = options.on_out_of_memory
        if policy == "split" and self.gathers:
            raise OptionError(
                "negatives from all ranks: the ranks exchange embeddings in every micro-batch, so that one alone cannot "
                "run it again in parts; use on_out_of_memory='auto', and plan smaller batches"
            )
        can_split = "splits" not in self.strategy.refused and not self.gathers
        self.splits = policy == "split" or (policy == "auto" and can_split)
        self.strategy.check(scales=self.precision.scales, splits=self.splits, compiles=bool(options.compile))
        self.model = self.strategy.prepare(model, self)
        self.statistics = running_statistics(self.model)
        backend = "inductor" if options.compile is True else str(options.compile)
        self._call = compiled(self.model, self.device, backend) if options.compile else self.model

    def _make_weighting(self, asked: str | Weighting | None) -> Weighting:
        if isinstance(asked, Weighting):
            if asked.shares.keys() != self.objectives.keys():
                raise OptionError(
                    f"weighting is of {', '.join(asked.shares)}, not of {', '.join(self.objectives)}"
                )
            return asked
        return make_weighting(self.options.weighting, list(self.objectives))

    def _make_optimizer(self) -> None:
        options = self.options
        self.parameters, self._parts = trainable_parameters(self.model), parts_of(self.model)
        self.precision.check(self.parameters)
        groups = parameter_groups(self.model, weight_decay=options.weight_decay)
        self.optimizer = torch.optim.AdamW(
            self.strategy.optimizer_groups(groups), lr=options.lr, fused=self.device.type in ("cpu", "cuda")
        )

    def _not_finite(self, window: Window, means: Mapping[str, float], result: StepResult) -> None:
        """Name the samples at fault, and raise or continue, by `on_nonfinite`."""
        window.reset()
        culprit = "no sample by itself: the gradient overflowed"
        if self.strategy.requires_equal_steps:
            culprit = "some sample of this step: under fsdp they cannot be looked at one by one"
        else:
            self.strategy.gather_weights()
            found = self.strategy.gather_objects(
                lambda: nonfinite_samples(self, window.learnable), "look for samples that are not finite"
            )
            if ids := dict.fromkeys(chain(*found)):
                culprit = f"samples {', '.join(ids)}"
        message = f"step {self.step}: loss {dict(means)}, gradient norm {result.grad_norm}; not finite for {culprit}"
        if self.options.on_nonfinite == "raise" or not result.skipped:
            raise RunError(f"{message}; fix or remove them, lower lr, or use on_nonfinite='skip'")
        self._emit_event("warning", {"message": message, "source": "trainer"})

    def retry(self, work: Callable[[], Result]) -> Result:
        """What `work`, which can be called again, returns; see `retried`."""
        return retried(work, self.device, lambda failure: self.ran_out("step", failure, 1))

    def ran_out(self, phase: str, failure: str, num_parts: int) -> None:
        """Record that memory ran out; the work is done again in `num_parts` parts."""
        self.num_out_of_memory += 1
        self._emit_event("out_of_memory", {"phase": phase, "operation": failure, "num_parts": num_parts})

    def seed(self, draw: int) -> None:
        """Seed a step's draws: 0 is for the window, a micro-batch's number (from 1) for its objectives."""
        self.random.seed(self._stream(self.step, draw))

    def _stream(self, moment: int, draw: int = 0) -> str:
        """Name of a random stream: of a draw in a step (`moment` from 0) or an epoch's order (below 0)."""
        rank = self.strategy.rank if self.strategy.num_shares > 1 else 0
        return f"{self.options.seed} {moment} {draw} {rank}"

    def learning_rate(self, step: int) -> float:
        """Learning rate at a step: linear warm-up, then a cosine to zero at `total_steps`, or constant `lr`.

        An epoch of another length, or a resume on other ranks or with other `accumulation_steps`, changes the number of
        steps left; the rest of the schedule is stretched over them.
        """
        position, length = self._position(step)
        return self.options.lr * warmup_cosine(position, length, self.options.warmup_ratio)

    def _position(self, step: int) -> tuple[float, int | None]:
        """Position in the schedule at a step, and the schedule's length; both in steps of the schedule as first planned."""
        if self.schedule is None or self.total_steps is None:
            return step, self.total_steps
        first_step, first_position, length = self.schedule
        done = (step - first_step) / max(1, self.total_steps - first_step)  # share of the stretched rest
        return first_position + done * (length - first_position), int(length)

    def _plan_schedule(self, loader: Iterable[Batch], last_epoch: int) -> None:
        """Work out the schedule's length, unless it was given or comes from the run that is resumed."""
        num_shares = self.strategy.num_shares
        planned_for = _planned_for(loader, num_shares)
        if planned_for % num_shares:
            raise OptionError(
                f"the batches are planned for {planned_for} rank, so each of {num_shares} would train all samples: "
                f"make_scheduler(..., world_size={num_shares}), of whose plan a PlannedLoader takes this rank's share"
            )
        samples_of_step = num_shares, self.options.accumulation_steps
        # the steps that the run has done were of more or fewer samples than those to come
        steps_differ = self.step > 0 and self.saved_with != samples_of_step
        has_length = self.total_steps is not None and last_epoch == self.last_epoch
        if self.options.total_steps is None and (steps_differ or not has_length):
            self._set_length(loader, last_epoch, stretches=steps_differ and has_length)
        self._num_ranks_changed = self.step > 0 and self.saved_with[0] != num_shares
        self.last_epoch, self.saved_with = last_epoch, samples_of_step

    def _set_length(self, loader: Iterable[Batch], last_epoch: int, *, stretches: bool) -> None:
        """End the schedule with the steps left, stretched from where it stands or anew."""
        self.schedule = [self.step, *self._position(self.step)] if stretches else None
        self.total_steps = self.step + self.steps_left(loader, last_epoch)

    def steps_left(self, loader: Iterable[Batch], last_epoch: int) -> int:
        """Optimizer steps until `last_epoch` epochs are done, if all are as long as this one."""
        if last_epoch <= self.epoch:
            return 0
        if not hasattr(loader, "__len__"):
            raise OptionError(f"a {type(loader).__name__} has no length for the schedule: give total_steps")
        num_batches, each = len(loader), self.options.accumulation_steps  # type: ignore[arg-type]
        rest = math.ceil((num_batches - self.epoch_batches) / each)
        whole = math.ceil(getattr(loader, "whole_epoch", num_batches) / each)
        return rest + (last_epoch - self.epoch - 1) * whole

    def evaluate(self, loader: Iterable[Batch], *, by_objective: bool = False) -> StepValues:
        """Measure on held-out samples, whose batches the ranks share; collective.

        How samples are batched matters only to a `LossModel` whose loss compares them. The model stays in evaluation
        mode.

        Args:
            by_objective: also return the mean of each objective, computed as in training, batch by batch.

        Returns:
            The values of an `eval` event: `loss`, the contrastive loss of each pair among a fixed number of
            candidates, or a `LossModel`'s own loss; and recall at k in both directions over all pairs, if the
            model gives embeddings (CLIP does).

        Raises:
            DataError: no batch; or no pair, where the model gives embeddings.
            OptionError: the loader gives each rank its share alone; its token ids or labels are other ones than in training,
                or token ids that the model does not know.
        """
        self._check_eval_loader(loader)
        started = clock(self.device)
        self.strategy.note(self.step, "evaluating")
        self.strategy.gather_weights()
        with self.precision.kernels():
            measured = evaluate(self, loader, by_objective=by_objective)
        measured |= {key_of(name, "loss"): mean for name, mean in measured.get("by_objective", {}).items()}
        return {"epoch": self.epoch, "eval_s": clock(self.device) - started, **measured}

    def into_evaluation(self) -> nn.Module:
        """The model in evaluation mode; the next step puts its modules back into the modes they had."""
        if self.model.training:
            self.trained_modules = [module for module in self.model.modules() if module.training]
        return self.model.eval()

    def check_words(self, *batches: Batch) -> None:
        """Raise OptionError for token ids that the model does not know; on a GPU they would end the process."""
        num_words = getattr(self.model, "num_words", None)
        if num_words is None:
            return
        largest = max(batch.host.input_ids.numpy().max(initial=0) for batch in batches)
        if largest >= num_words:
            remedy = "make it with vocab_size=len(tokenizer), or call resize_token_embeddings"
            raise OptionError(f"token id {largest} in a model of {num_words} words: {remedy}")

    def _check_eval_loader(self, loader: Any) -> None:
        """Raise OptionError for batches that the ranks share already, or whose token ids or labels mean something else."""
        check_meaning(self, loader)
        if self.strategy.world_size > 1 and _planned_for(loader, 1) > 1:
            raise OptionError(
                "an evaluation itself shares the batches among the ranks: plan those of eval_loader with world_size=1"
            )

    @contextmanager
    def _stoppable(
        self, checkpoints: Checkpoints | None, control: Control | None
    ) -> Iterator[Callable[[], bool]]:
        """Hold back interrupts; yields a function that waits while paused and says whether to stop."""
        self._stopping.clear()
        control = control or Control(None)
        ending = (signal.SIGTERM, signal.SIGHUP)  # what their handlers raise would be lost in a finalizer
        held = [number for number in ending if checkpoints is not None or callable(signal.getsignal(number))]
        with signals_held(signal.SIGINT, *held) as caught:
            yield lambda: control.wait_if_paused_or_stop(
                lambda: caught or self._stopping.is_set(), agree=self.strategy.largest, emit=self._emit_event
            )

    def stop(self) -> None:
        """End `fit` after the current step; safe to call from any thread."""
        self._stopping.set()

    def _save(self, checkpoints: Checkpoints | None, loader: Any, found: StepValues | None = None) -> None:
        """Rank 0 writes a checkpoint while the others wait; if sharded, every rank writes its share."""
        if checkpoints is None:
            return
        self.strategy.note(self.step, SAVES)
        state = self.state_dict()
        if hasattr(loader, "start_batch"):  # the loader can resume by itself
            state["loader"] = loader.state_dict()
        checkpoints.start_interval()  # on every rank, or those that do not write ask for another at once
        if self.strategy.saves_on_every_rank or self.strategy.rank == 0:
            ranks = self.strategy if self.strategy.saves_on_every_rank else None
            saved = checkpoints.save(state, values=found, ranks=ranks)
        if self.strategy.rank == 0:
            self._emit_event("checkpoint", saved)
        self.strategy.largest(0.0)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to continue bitwise; `torch.load(..., weights_only=True)` can read it.

        Under `fsdp` weights and moments are this rank's shares (`DTensor`), for `Checkpoints` to write. Under
        `branch` this is a collective, and every rank gets the whole state.
        """
        return {
            **self.strategy.state_dict(self.model, self.optimizer),
            "trained": {name: weight.requires_grad for name, weight in self.model.named_parameters()},
            "precision": self.precision.state_dict(),
            "weighting": self.weighting.state_dict(),
            "progress": {
                **{name: getattr(self, name) for name in _PROGRESS},
                "world_size": self.strategy.num_shares,
                "accumulation_steps": self.options.accumulation_steps,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        Raises:
            DataError: it is not the state of a trainer, or its run trained other weights of this model.
        """
        check_state("trainer", state, "model", "optimizer", "trained", "precision", "weighting", "progress")
        # the optimizer's moments are kept by a weight's index among the trained weights: they would go to other weights
        for name, weight in self.model.named_parameters():
            if (was_trained := state["trained"].get(name, weight.requires_grad)) != weight.requires_grad:
                before = "trained" if was_trained else "frozen"
                raise DataError(f"{name} was {before} in the saved run; give the same freeze")
        self.strategy.load_state_dict(self.model, self.optimizer, state)
        self.precision.load_state_dict(state["precision"])
        self.weighting.load_state_dict(state["weighting"])
        progress = state["progress"]
        for name in _PROGRESS:
            setattr(self, name, progress[name])
        self.saved_with = progress["world_size"], progress["accumulation_steps"]
        self.total_steps = self.options.total_steps or self.total_steps

    def description(self) -> StepValues:
        """The trainer's values in a `start` event."""
        return {
            "objective": " + ".join(self.objectives),
            "precision": self.precision.name,
            "device": str(self.device),
            "seed": self.options.seed,
            "accumulation_steps": self.options.accumulation_steps,
            "num_steps": self.total_steps,
            "num_parameters": sum(weight.numel() for weight in self.parameters),
        }

    def _emit_event(self, kind: str, values: StepValues) -> None:
        self._emit(RunEvent.now(kind, self.step, values, self.strategy.rank))


def _planned_for(loader: Any, otherwise: int) -> int:
    """The number of ranks that a loader's batches are planned for, where a scheduler plans them."""
    return getattr(getattr(loader, "scheduler", None), "world_size", otherwise)


def warmup_cosine(step: float, total_steps: int | None, warmup_ratio: float) -> float:
    """Factor on the learning rate at a step: linear warm-up, then a cosine to zero at `total_steps`; 1 without one.

    >>> [round(warmup_cosine(step, 10, 0.2), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if total_steps is None:
        return 1.0
    num_warmup = math.ceil(round(warmup_ratio * total_steps, 6))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))
