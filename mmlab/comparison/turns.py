"""The runs of a comparison: one per scheduler, trained in turns, epoch by epoch.

While a run waits, its weights and optimizer state are bytes in host memory, and its trainer is gone. So the
current run has the device to itself, and the memory measured is its own. A turn begins with a new model that
loads this state; none of that is timed.

A run writes what its trainer emits, with the plan's prediction beside each measured step, and reduces every
epoch to figures. Peak memory is measured separately, on the run's costliest batch: on a CPU by counting live
tensors, which is too slow for every step. A run on a CPU also counts them in the costliest step of its first
epoch, and in one step of `COUNT_EVERY`.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.comparison import preparation
from mmlab.comparison.options import ComparisonOptions
from mmlab.comparison.result import ArmResult, Comparison
from mmlab.comparison.run import Run
from mmlab.comparison.sizing import Sized, largest_batches
from mmlab.errors import DataError
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import progress_bar
from mmlab.pricing.step_prices import peak_of, take_first_step
from mmlab.runs.control import Control
from mmlab.runs.events import PROCESS_RSS, RunEvent
from mmlab.runs.follow import RunState
from mmlab.runs.meters import LiveBytes
from mmlab.runs.summaries import after_warmup, summarize
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import ROUNDING
from mmlab.schedule.plan import BatchPlan
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import BatchShape

COUNT_EVERY = 64  # steps, on a CPU: counting live tensors can double a short step
NUM_NEGATIVES = 31  # negatives that the training loss is normalised to, whatever the batch size
_RUN_KEYS = ("samples_per_s", "data_wait_ratio", "text_waste", "image_waste", "combined_waste")
_MEDIAN_KEYS = (*_RUN_KEYS, "step_s", "planned_combined_waste", "predicted_samples_per_s")
_SUM_KEYS = ("batches_over_budget", "shape_mismatches", "num_unlearnt_samples")  # added up over the epochs
_RETRIEVAL_KEYS = ("image_to_text_r1", "text_to_image_r1", "chance_r1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSetup:
    """What all runs of a comparison share."""

    options: ComparisonOptions
    config: dict[str, Any]  # the comparison's description in its results
    train_set: Any  # a `MultimodalDataset`, or a `ConversationDataset`
    held_out_set: Any
    folder: Path | None
    control: Control
    sized: Sized  # schedulers and predictions; the latter are written beside every run's steps

    def make_trainer(self, plan: BatchPlan, *, total_steps: int, emit: Any = None) -> FusionTrainer:
        """A model with the comparison's initial weights, packed where the plan is, and its trainer."""
        gc.collect()  # frees the trainer before this one: trainers are in reference cycles
        options = self.options
        model = preparation.model_of(options, self.train_set)
        return FusionTrainer(
            preparation.packed_if_planned(model, plan, self.train_set),
            precision=options.precision,
            device=options.device,
            lr=options.lr,
            total_steps=total_steps,
            objectives={"contrastive": Contrastive(num_negatives=NUM_NEGATIVES)},
            seed=options.seed,
            emit=emit,
            memory=None if plan.limits.streams is not None else self.sized.memory,
        )

    def expected(self, plan: BatchPlan) -> NDArray[np.float64]:
        """What each batch adds to the progress of a run: predicted seconds, or tokens and patches."""
        _, time = self.sized.prices(plan)
        return preparation.costs_of(plan) if time is None else time.batch_s(plan)

    def peak_of_one_step(self, plan: BatchPlan, rows: Sequence[int]) -> tuple[int, str]:
        """Peak bytes of one training step on these samples, and how they were counted.

        Call it between turns only. A first step creates the optimizer's state, so that the figure is that of
        a steady step.
        """
        batch = self.train_set.collate([self.train_set[row] for row in rows])
        on_gpu = self.options.device.startswith("cuda")
        gc.collect()
        # bytes that the caller holds
        before_bytes = torch.cuda.memory_allocated(self.options.device) if on_gpu else 0
        trainer = self.make_trainer(plan, total_steps=2)
        take_first_step(trainer, batch)
        peak_bytes = peak_of(trainer.train_step, [batch], (trainer.model, trainer.optimizer))
        source = "torch allocator" if on_gpu else "live tensors"
        return peak_bytes - before_bytes, f"{source}, costliest batch"


class ComparisonRun:
    """One scheduler with its own model, loader and events."""

    def __init__(self, name: str, scheduler: Scheduler, setup: ComparisonSetup) -> None:
        options = setup.options
        self.name, self._scheduler, self._setup = name, scheduler, setup
        planner, weights = preparation.with_sampling(scheduler, setup.train_set, options, progress=False)
        self._loader = PlannedLoader(
            setup.train_set,
            planner,
            num_workers=options.num_workers,
            pin_memory=options.device.startswith("cuda"),
            augment=preparation.augmentation(options.augment),
        )
        self._loader.weights = weights
        plans = [planner.plan(setup.train_set.sizes, epoch=epoch) for epoch in range(options.epochs)]
        self._total_steps = sum(map(len, plans))
        self._planned_cost = sum(float(setup.expected(plan).sum()) for plan in plans)
        self._saved = _saved(self._make_trainer())  # state of model, optimizer and schedule
        self._epoch = RunState()  # this epoch's step events
        self._planned: list[tuple[BatchShape, float]] = []  # planned shapes and costs of this epoch's batches
        self._shape_mismatches = 0  # of this epoch
        self._counted: set[int] = set()  # steps of this epoch in which live tensors are counted
        self._num_steps = self._num_counted = 0  # so far, those of this epoch included
        self._trainer: FusionTrainer | None = None  # while it trains
        self.epochs: list[dict[str, float]] = []
        self._largest: dict[str, tuple[float, list[int]]] = {}  # batches so far
        self._peaks: dict[tuple[int, ...], tuple[int, str]] = {}  # of these batches, by their samples

    def begin(self) -> Run:
        """Write the run's start event; leaving the context that is returned writes how the run ended."""
        folder = self._setup.folder
        self._run = Run(None if folder is None else folder / "runs" / self.name, control=self._setup.control)
        self._run.start(
            run_name=self.name,
            scheduler=self.name,
            config=self._setup.config,
            num_steps=self._total_steps,
            num_epochs=self._setup.options.epochs,
            planned_cost=self._planned_cost,
        )
        return self._run

    def run_epoch(self, epoch: int, held_out: PlannedLoader) -> None:
        """Train one epoch and evaluate.

        Raises:
            KeyboardInterrupt: the epoch was stopped before its end.
        """
        self._loader.set_epoch(epoch)
        plan = self._loader.plan
        self._epoch, self._shape_mismatches = RunState(), 0
        self._planned = list(zip(plan.shapes, self._setup.expected(plan).tolist(), strict=True))
        trainer = self._make_trainer()
        trainer.load_state_dict(torch.load(io.BytesIO(self._saved), map_location="cpu", weights_only=False))
        memory, _ = self._setup.sized.prices(plan)
        needed = preparation.costs_of(plan) if memory is None else plan.costs(memory)
        self._counted = self._steps_to_count(needed)
        self._trainer = trainer
        self._choose_counting()
        self._run.fit(trainer, self._loader, num_epochs=1)
        self._trainer = None
        if self._setup.control.stopped:
            raise KeyboardInterrupt
        for measure, batch in largest_batches(plan, memory).items():
            self._largest[measure] = max(batch, self._largest.get(measure, batch))
        held_out_values = trainer.evaluate(held_out)
        self.epochs.append(self._measure(plan, held_out_values))
        self._run.write("eval", **held_out_values)
        self._saved = _saved(trainer)

    def result(self, num_epochs: int) -> ArmResult:
        """Medians over the epochs that every run finished, and the peak memory of the costliest batch."""
        epochs, last = self.epochs[:num_epochs], self.epochs[num_epochs - 1]
        for _, rows in self._largest.values():
            if tuple(rows) not in self._peaks:
                self._peaks[tuple(rows)] = self._setup.peak_of_one_step(self._loader.plan, rows)
        figures: dict[str, Any] = {key: last.get(key) for key in _RETRIEVAL_KEYS}
        figures["peak_bytes"], figures["peak_source"] = max(self._peaks.values())
        figures |= {key: int(sum(epoch[key] for epoch in epochs)) for key in _SUM_KEYS}
        keys = [key for key in _MEDIAN_KEYS if key in last]
        figures |= {key: float(np.median([epoch[key] for epoch in epochs])) for key in keys}
        return ArmResult(
            scheduler=self.name,
            options={key: repr(value) for key, value in vars(self._scheduler).items()},
            num_samples=int(epochs[0]["num_samples"]),
            num_batches=int(epochs[0]["num_batches"]),
            peak_over_budget=max(epoch["peak_over_budget"] for epoch in epochs),
            final_loss=last["held_out_loss"],
            epochs=epochs,
            **figures,
        )

    def _make_trainer(self) -> FusionTrainer:
        return self._setup.make_trainer(self._loader.plan, total_steps=self._total_steps, emit=self._take)

    def _measure(self, plan: BatchPlan, held_out: Mapping[str, float]) -> dict[str, float]:
        """Figures of the epoch that was trained last."""
        found, steps, shares = summarize(self._epoch), self._epoch, self._shares_of_limit(plan)
        step_s = steps.column("step_s") - steps.column("data_wait_s")
        losses, samples = steps.column("loss"), steps.column("num_samples")
        learnt = ~np.isnan(losses)  # the rest had no negatives
        if not learnt.any():
            raise DataError(
                "no batch holds two different images, so a contrastive loss has no negatives; "
                "give a larger batch size or budget, or more images"
            )
        predicted = {}
        if (time := self._setup.sized.prices(plan)[1]) is not None:
            predicted["predicted_samples_per_s"] = float(samples.sum()) / time.epoch_s(plan)
        return {
            "num_batches": found["steps"],
            "num_samples": found["samples"],
            "shape_mismatches": self._shape_mismatches,
            **predicted,
            "step_s": float(np.median(after_warmup(step_s))),
            **{key: found[key] for key in _RUN_KEYS},
            # the room that packs leave is not computed
            "planned_combined_waste": 0.0 if plan.limits.streams else plan.report().combined_waste,
            "train_loss": float(np.average(losses[learnt], weights=samples[learnt])),
            "num_unlearnt_samples": int(samples[~learnt].sum()),
            "held_out_loss": held_out["loss"],
            **{key: held_out[key] for key in _RETRIEVAL_KEYS if key in held_out},
            "peak_over_budget": float(shares.max()),
            "batches_over_budget": int((shares > ROUNDING).sum()),
        }

    def _shares_of_limit(self, plan: BatchPlan) -> NDArray[np.float64]:
        """(M,) how much of the limit each batch takes: of the bytes at equal memory, else of the budget.

        Packs whose bytes cannot be predicted have a budget of their own.
        """
        sized = self._setup.sized
        memory, _ = sized.prices(plan)
        if sized.budget is None and memory is not None:
            return plan.costs(memory) / (sized.limit_bytes or 0.0)
        return preparation.costs_of(plan) / (sized.budget or plan.limits.budget or 0.0)

    def _steps_to_count(self, costs: NDArray[np.float64]) -> set[int]:
        """The epoch's costliest step, and others spread evenly over the costs.

        One in `COUNT_EVERY` steps of the run so far. Never the run's first step: the optimizer has no state
        yet.
        """
        if self._setup.options.device.startswith("cuda"):
            return set()
        steady = np.argsort(-costs, kind="stable")
        steady = steady[(steady > 0) | (self._num_steps > 0)]
        self._num_steps += len(costs)
        num_allowed = min(1 + self._num_steps // COUNT_EVERY - self._num_counted, len(steady))
        self._num_counted += max(0, num_allowed)
        return set(steady[np.linspace(0, len(steady) - 1, max(0, num_allowed)).astype(int)].tolist())

    def _choose_counting(self) -> None:
        """Switch counting live tensors on or off for the next step."""
        if (trainer := self._trainer) is not None:
            chosen = self._epoch.count() in self._counted
            if chosen and not trainer.optimizer.state:  # fp16 has skipped all steps so far
                chosen, self._counted = False, self._counted | {self._epoch.count() + 1}
            trainer.meter.live = LiveBytes().add(trainer.model, trainer.optimizer) if chosen else None

    def _take(self, event: RunEvent) -> None:
        """Write an event of the trainer; steps get the plan's prediction beside the measurement."""
        if event.kind == "step":
            planned, cost = self._planned[self._epoch.count()]
            values = {**event.values, "predicted_cost": cost}
            if self._setup.sized.limit_bytes is not None:
                values["limit_bytes"] = self._setup.sized.limit_bytes
            if values["memory_source"] == PROCESS_RSS:  # not the step's own: only counted steps have a peak
                values["memory_source"] = "live tensors"
                del values["peak_bytes"]
            measured = (values["num_samples"], values["num_tokens"], values["height"], values["width"])
            self._shape_mismatches += measured != tuple(planned)
            event = dataclasses.replace(event, values=values)
            self._epoch.apply([event])
            self._choose_counting()
        self._run.emit(event)


def result_of(runs: Sequence[ComparisonRun], setup: ComparisonSetup, *, interrupted: bool) -> Comparison:
    """The results over the epochs that every run has finished."""
    finished = min(len(run.epochs) for run in runs)
    arms = [run.result(finished) for run in runs]
    return Comparison(config=setup.config, arms=arms, interrupted=interrupted, folder=setup.folder)


def take_turns(
    runs: Sequence[ComparisonRun], setup: ComparisonSetup, progress: bool, spare_disk: ExitStack
) -> bool:
    """Train every run epoch by epoch, in rotating order; returns True if the user, or a full disk, interrupted.

    Results are written whenever every run has finished an epoch: a kill or an error loses no epoch that all have
    finished.

    Args:
        spare_disk: space on the disk, set free before the runs' ends are written.
    """
    num_epochs = setup.options.epochs
    held_out = preparation.held_out_loader(setup.held_out_set)
    try:
        total = num_epochs * len(runs)
        with ExitStack() as stack, progress_bar(total=total, unit="epoch", show=progress) as bar:
            for run in runs:
                stack.enter_context(run.begin())
            stack.callback(spare_disk.close)
            for epoch in range(num_epochs):
                for turn in range(len(runs)):
                    run = runs[(turn + epoch) % len(runs)]
                    bar.set_description(f"{run.name}, epoch {epoch + 1}/{num_epochs}")
                    try:
                        run.run_epoch(epoch, held_out)
                    except Exception as error:
                        error.add_note(f"while scheduler {run.name} trained")
                        raise
                    bar.update()
                if epoch + 1 < num_epochs and setup.folder is not None:
                    result_of(runs, setup, interrupted=True).save_numbers(setup.folder)
    except KeyboardInterrupt:
        return True
    except OSError as error:
        if not all(run.epochs for run in runs):
            raise
        warnings.warn(f"stopped early, epochs that every run finished are kept: {error}", stacklevel=4)
        return True
    return False


def _saved(trainer: FusionTrainer) -> bytes:
    buffer = io.BytesIO()
    torch.save(trainer.state_dict(), buffer)
    return buffer.getvalue()
