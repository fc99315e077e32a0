"""The arms of a comparison: one scheduler each, with its own model, loader and events, training in turns.

An arm writes what its trainer emits, with the plan's prediction beside each measured step, and reduces every
epoch to figures. Peak memory is measured apart, on the arm's costliest batch: on a CPU by counting live
tensors, which is too slow for every step.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mmlab.comparison.preparation import costs_of, suit
from mmlab.comparison.results import ArmResult
from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import DataError
from mmlab.loading.loader import PlannedLoader, collate
from mmlab.machine import this_process
from mmlab.model.presets import build_model
from mmlab.runs.control import Control
from mmlab.runs.events import RunEvent, RunLog
from mmlab.runs.meters import LiveBytes, peak_bytes, reset_peak_bytes
from mmlab.runs.monitor import DeviceMonitor
from mmlab.schedule.base import Scheduler
from mmlab.schedule.dense import Memory
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import BatchShape

EVAL_BATCH_SIZE = 32
WARMUP_STEPS = 2  # steps at the start of every turn that are not timed
_MEDIAN_KEYS = (
    "samples_per_s",
    "step_s",
    "data_wait_ratio",
    "text_waste",
    "image_waste",
    "combined_waste",
    "planned_combined_waste",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all arms share."""

    config: dict[str, Any]
    train_set: MultimodalDataset
    held_out_set: MultimodalDataset
    folder: Path | None
    control: Control
    memory: Memory | None = (
        None  # a scheduler that knows what a step needs: its predictions stand beside every arm's
    )

    def make_trainer(self, plan: BatchPlan, *, total_steps: int, emit: Any = None) -> FusionTrainer:
        """A fresh model with the comparison's initial weights, packed where the plan is, and its trainer."""
        config = self.config
        torch.manual_seed(config["seed"])
        model = suit(build_model(config["model"], vocab_size=len(self.train_set.tokenizer)), plan)
        return FusionTrainer(
            model,
            precision=config["precision"],
            device=config["device"],
            lr=config["lr"],
            total_steps=total_steps,
            objectives={"contrastive": Contrastive(num_negatives=config["num_negatives"])},
            seed=config["seed"],
            emit=emit,
            memory=None if self.memory is None or plan.limits.streams is not None else self.memory.cost,
        )

    def peak_of_one_step(self, plan: BatchPlan, rows: Sequence[int]) -> tuple[int, str]:
        """Peak bytes of one training step on these samples with a fresh model, and what counted them.

        The step before it creates the optimizer's state, so that the figure is that of a steady step.
        """
        batch = collate([self.train_set[row] for row in rows])
        on_gpu = self.config["device"].startswith("cuda")
        before_bytes = (
            torch.cuda.memory_allocated(self.config["device"]) if on_gpu else 0
        )  # the arms' own models
        trainer = self.make_trainer(plan, total_steps=2)
        trainer.train_step([batch])
        if on_gpu:
            reset_peak_bytes(trainer.device)
            trainer.train_step([batch])
            return peak_bytes(trainer.device) - before_bytes, "torch allocator, costliest batch"
        with LiveBytes().add(trainer.model, trainer.optimizer) as live:
            trainer.train_step([batch])
        return live.peak_bytes, "live tensors, costliest batch"


class Arm:
    """One scheduler with its own model, loader and events."""

    def __init__(self, name: str, scheduler: Scheduler, bench: Bench) -> None:
        config = bench.config
        self.name, self.scheduler, self._bench = name, scheduler, bench
        self._loader = PlannedLoader(
            bench.train_set,
            scheduler,
            num_workers=config["num_workers"],
            pin_memory=config["device"].startswith("cuda"),
        )
        self._log = None if bench.folder is None else RunLog(bench.folder / "runs" / name)
        total_steps = config["epochs"] * len(self._loader)
        self._trainer = bench.make_trainer(self._loader.plan, total_steps=total_steps, emit=self._take)
        self._steps: list[dict[str, Any]] = []  # values of this epoch's step events
        self._planned: list[tuple[BatchShape, float]] = []  # shapes and costs that this epoch's plan promises
        self._costs: list[float] = []
        self._shape_mismatches = 0
        self.epochs: list[dict[str, float]] = []
        self.costliest: tuple[float, list[int]] = (-1.0, [])  # cost and samples of the costliest batch so far
        start = {
            "run_name": name,
            "scheduler": name,
            "config": config,
            "num_steps": total_steps,
            "num_epochs": config["epochs"],
            "planned_cost": config["epochs"] * float(costs_of(self._loader.plan).sum()),
            **this_process(),
        }
        self._write(RunEvent.now("start", 0, start))

    def run_epoch(self, epoch: int, held_out: PlannedLoader) -> None:
        """Train one epoch and evaluate.

        Raises:
            KeyboardInterrupt: the epoch was stopped before its end.
        """
        self._loader.set_epoch(epoch)
        plan = self._loader.plan
        costs = costs_of(plan)
        self._steps, self._planned = [], list(zip(plan.shapes, costs.tolist(), strict=True))
        with DeviceMonitor(self._write, device=self._bench.config["device"]):
            self._trainer.fit(self._loader, num_epochs=1, control=self._bench.control)
        if self._bench.control.stopped:
            raise KeyboardInterrupt
        self._costs += costs.tolist()
        dearest = int(costs.argmax())
        rows = plan.columns.order[plan.columns.starts[dearest] : plan.columns.ends[dearest]]
        self.costliest = max(self.costliest, (float(costs[dearest]), rows.tolist()))
        held_out_values = self._trainer.evaluate(held_out)
        self.epochs.append(self._measure(plan, held_out_values))
        self._write(RunEvent.now("eval", self._trainer.step, held_out_values))

    def finish(self, status: str, details: Mapping[str, str]) -> None:
        """Write the run's last event and close its file."""
        self._write(RunEvent.now("end", self._trainer.step, {"status": status, **details}))
        if self._log is not None:
            self._log.close()

    def result(self, num_epochs: int) -> ArmResult:
        """Medians over the epochs that every arm finished, and the peak memory of the costliest batch."""
        epochs = self.epochs[:num_epochs]
        budget = self._bench.config["budget"]
        peak_bytes, peak_source = self._bench.peak_of_one_step(self._loader.plan, self.costliest[1])
        medians = {key: float(np.median([epoch[key] for epoch in epochs])) for key in _MEDIAN_KEYS}
        last = epochs[-1]
        return ArmResult(
            scheduler=self.name,
            options={key: repr(value) for key, value in vars(self.scheduler).items()},
            num_samples=len(self._bench.train_set),
            num_batches=int(epochs[0]["num_batches"]),
            peak_over_budget=self.costliest[0] / budget,
            batches_over_budget=int(sum(cost > budget * (1 + 1e-9) for cost in self._costs)),
            shape_mismatches=self._shape_mismatches,
            peak_bytes=peak_bytes,
            peak_source=peak_source,
            num_unlearnt_samples=int(sum(epoch["num_unlearnt_samples"] for epoch in epochs)),
            final_loss=last["held_out_loss"],
            image_to_text_r1=last["image_to_text_r1"],
            text_to_image_r1=last["text_to_image_r1"],
            chance_r1=last["chance_r1"],
            epochs=epochs,
            **medians,
        )

    def _measure(self, plan: BatchPlan, held_out: Mapping[str, float]) -> dict[str, float]:
        timed = self._steps[WARMUP_STEPS:] or self._steps
        total_s = sum(step["step_s"] for step in timed)
        wait_s = sum(step["data_wait_s"] for step in timed)
        learnt = [step for step in self._steps if not math.isnan(step["loss"])]  # the rest had no negatives
        if not learnt:
            raise DataError(
                f"no batch of {self.name!r} holds two different images, so there is nothing to tell apart; "
                "give a larger batch size or budget, or more images"
            )
        losses, weights = [step["loss"] for step in learnt], [step["num_samples"] for step in learnt]
        return {
            "num_batches": len(self._steps),
            "samples_per_s": sum(step["num_samples"] for step in timed) / total_s,
            "step_s": float(np.median([step["step_s"] - step["data_wait_s"] for step in timed])),
            "data_wait_ratio": wait_s / total_s,
            **_epoch_waste(self._steps),
            "planned_combined_waste": plan.report().combined_waste,
            "train_loss": float(np.average(losses, weights=weights)),
            "num_unlearnt_samples": len(self._bench.train_set) - sum(weights),
            "held_out_loss": held_out["loss"],
            "image_to_text_r1": held_out["image_to_text_r1"],
            "text_to_image_r1": held_out["text_to_image_r1"],
            "chance_r1": held_out["chance_r1"],
        }

    def _take(self, event: RunEvent) -> None:
        """What the trainer emits: steps get the plan's prediction beside the measurement."""
        if event.kind in ("start", "end"):  # of one turn; the arm writes its own
            return
        if event.kind == "step":
            planned, cost = self._planned[len(self._steps)]
            values = {**event.values, "predicted_cost": cost}
            if self._bench.memory is not None:
                values["limit_bytes"] = self._bench.memory.budget
            measured = (values["num_samples"], values["num_tokens"], values["height"], values["width"])
            self._shape_mismatches += measured != tuple(planned)
            event = dataclasses.replace(event, values=values)
            self._steps.append(values)
        self._write(event)

    def _write(self, event: RunEvent) -> None:
        if self._log is not None:
            self._log.emit(event)


def take_turns(arms: list[Arm], bench: Bench, progress: bool) -> bool:
    """Every arm trains epoch after epoch, in an order that rotates; True when the user interrupted."""
    num_epochs = bench.config["epochs"]
    held_out = PlannedLoader(
        bench.held_out_set, make_scheduler("sorted", batch_size=EVAL_BATCH_SIZE), num_workers=0
    )
    status, details = "failed", {}
    with tqdm(total=num_epochs * len(arms), unit="epoch", disable=None if progress else True) as bar:
        try:
            for epoch in range(num_epochs):
                for turn in range(len(arms)):
                    arm = arms[(turn + epoch) % len(arms)]
                    bar.set_description(f"{arm.name}, epoch {epoch + 1}/{num_epochs}")
                    arm.run_epoch(epoch, held_out)
                    bar.update()
            status = "done"
        except KeyboardInterrupt:
            status = "stopped"
        except Exception as error:
            details = {"message": str(error), "traceback": traceback.format_exc()}
            raise
        finally:
            for arm in arms:
                arm.finish(status, details)
    return status == "stopped"


def _epoch_waste(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Padding shares of a whole epoch from those of its steps, each weighted by its padded size."""
    tokens = np.array([step["num_samples"] * step["num_tokens"] for step in steps], dtype=float)
    costs = np.array([step["predicted_cost"] for step in steps], dtype=float)
    weights = {"text_waste": tokens, "image_waste": costs - tokens, "combined_waste": costs}
    return {key: float(np.average([step[key] for step in steps], weights=weights[key])) for key in weights}
