"""A panel for notebooks: train under other settings, and see every run over the ones before, live.

Each run is a `FusionTrainer` on a copy of the same model and on the same batches, in a thread of the kernel: it works
on what the notebook has in memory, for seconds. It writes its events to a folder of its own, which the live view
below the settings follows, and is paused and stopped from there. It can be used without a front-end.

Costs the training itself and a copy of the model. The thread shares Python's lock with the kernel, so a cell that
computes slows it; `Lab` trains longer runs in a process of their own.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from mmlab.errors import OptionError, RunError
from mmlab.lab.live_panel import LivePanel
from mmlab.lab.panels import WIDE, Panel
from mmlab.runs.control import Control, send
from mmlab.runs.events import EVENT_FILES, RunEvent, RunLog
from mmlab.runs.figures import PALETTE
from mmlab.runs.folders import fresh_folder
from mmlab.runs.monitor import DeviceMonitor
from mmlab.schedule.cost import PaddedTokens
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.base import Objective
from mmlab.training.precision import PRECISIONS
from mmlab.training.weighting import WEIGHTINGS, make_weighting
from mmlab.types import Batch


class TrainingPanel(Panel):
    """Precision, accumulation and the weighting of the objectives above the live view of every run so far.

    A change of a setting is for the next run. The panel is what steers its live view (`mmlab.lab.live_panel.Controller`).

    Args:
        model: every run starts from a copy of it.
        batches: micro-batches of an epoch, in order.
        held_out: evaluated after every run.
        out: folder of the runs; what earlier ones left there is moved to `previous-N`.
        objectives: see `FusionTrainer`; weightings need two or more to have anything to do.
        num_epochs: passes over the batches in a run.
        interval: steps between two updates of the weights.
        options: further ones of `FusionTrainer`.

    Raises:
        OptionError: no batches.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        held_out: Sequence[Batch],
        *,
        out: str | Path,
        objectives: Mapping[str, Objective],
        num_epochs: int = 1,
        interval: int = 5,
        **options: Any,
    ) -> None:
        if not batches:
            raise OptionError("no batches to train on; give at least one")
        self._model, self._batches, self._held_out = model, list(batches), list(held_out)
        self._objectives, self._num_epochs, self._interval = dict(objectives), num_epochs, interval
        self._options = options
        costs = [PaddedTokens()(batch.shape) for batch in self._batches]
        self._costs = np.concatenate([[0.0], np.cumsum(costs * num_epochs)])  # before the n-th batch of a run
        self.folder = Path(out)
        fresh_folder(self.folder, {path.parent.name for path in self.folder.glob(f"*/{EVENT_FILES}")})
        self.error: str | None = None  # traceback of what ended the latest run
        self.progress = (
            nan,
            nan,
        )  # share of the latest run that is done, seconds left by what its batches cost
        self.runs: dict[str, list[dict[str, Any]]] = {}  # values of the steps, by the run's name
        self.results: dict[str, dict[str, Any]] = {}  # what each run that ended has come to
        self._lock = threading.Lock()
        self._status, self._name = "idle", ""
        self._num_done, self._spent_s = 0, 0.0  # batches of the latest run, and what their steps took
        self._thread: threading.Thread | None = None
        on_gpu = torch.cuda.is_available() and options.get("device") != "cpu"
        names = [name for name in PRECISIONS if on_gpu or name != "tf32"]
        self.precision = widgets.Dropdown(options=names, description="precision", style=WIDE)
        self.accumulation = widgets.SelectionSlider(
            options=[1, 2, 4, 8], description="micro-batches a step", style=WIDE
        )
        self.weighting = widgets.Dropdown(options=list(WEIGHTINGS), description="weighting", style=WIDE)
        self.live = LivePanel(controller=self)
        settings = [self.precision, self.accumulation, self.weighting]
        super().__init__([widgets.HBox(settings, layout=widgets.Layout(flex_flow="row wrap"))], [self.live])

    @property
    def state(self) -> str:
        """`idle`, `running`, `paused`, `stopping`, `done`, `stopped` or `failed`: of the latest run."""
        return self._status

    def start(self) -> None:
        """Train with the settings' values; returns at once. A run of the same values is done anew."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            settings = (self.precision.value, self.accumulation.value, self.weighting.value)
            self._name = _name(*settings)
            folder = fresh_folder(self.folder / self._name, (EVENT_FILES,))
            self._status, self.error, self.progress = "running", None, (nan, nan)
            self._num_done, self._spent_s = 0, 0.0
            arguments = (self._name, folder, Control(folder), *settings)
            self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Hold the run after the step in hand."""
        self._tell("pause")

    def resume(self) -> None:
        """Let a paused run go on."""
        self._tell("resume")

    def stop(self) -> None:
        """End the run after the step in hand; its curve stays."""
        self._tell("stop")

    def wait(self) -> pd.DataFrame:
        """Wait for the end of the run and return the table of all runs. An interrupt stops the run.

        Raises:
            RunError: nothing was started, or the run failed.
        """
        if self._thread is None:
            raise RunError("nothing is running; press Start or call start() first")
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
            raise
        if self.error:
            raise RunError(f"the run failed:\n{self.error}")
        return self.summary()

    def summary(self) -> pd.DataFrame:
        """A row a run that ended: steps, those skipped, median time of a step and the held-out losses."""
        return pd.DataFrame.from_dict(self.results, orient="index").rename_axis("run")

    def figure(self) -> Figure:
        """What the live view does not draw: loss by objective, weights and loss scale of every run."""
        return training_figure(self.runs)

    def close(self) -> None:
        """Let go of the runs' files; a run that is going on is stopped."""
        if hasattr(self, "live"):
            self.stop()
            self.live.close()
        super().close()

    def _tell(self, command: str) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                send(self.folder / self._name, command)
                if command == "stop":
                    self._status = "stopping"

    def _run(
        self, name: str, folder: Path, control: Control, precision: str, accumulation: int, weighting: str
    ) -> None:
        steps: list[dict[str, Any]] = []
        self.runs.pop(name, None)
        self.results.pop(name, None)
        self.runs[name] = steps
        status, details = "failed", {}
        with RunLog(folder) as log:

            def take(event: RunEvent) -> None:
                log.emit(event)
                if event.kind == "step":
                    steps.append(dict(event.values))
                    self._count(event.values)
                elif event.kind in ("pause", "resume") and self._status != "stopping":
                    self._status = "paused" if event.kind == "pause" else "running"

            try:
                rule: Any = weighting
                if len(self._objectives) > 1:
                    names = list(self._objectives)
                    rule = make_weighting(weighting, names, interval=self._interval, smoothing=0.3)
                trainer = FusionTrainer(
                    copy.deepcopy(self._model),
                    objectives=self._objectives,
                    weighting=rule,
                    precision=precision,
                    accumulation_steps=accumulation,
                    emit=take,
                    **self._options,
                )
                num_steps = self._num_epochs * -(-len(self._batches) // accumulation)
                log.write("start", 0, run_name=name, **{**trainer.description(), "num_steps": num_steps})
                with DeviceMonitor(log.emit, device=trainer.device):
                    trainer.fit(self._batches, num_epochs=self._num_epochs, control=control)
                if steps:
                    found = trainer.evaluate(self._held_out)
                    log.write("eval", trainer.step, **found)
                    self.results[name] = _result(steps, found)
                status = "stopped" if control.stopped else "done"
            except (
                Exception
            ) as error:  # a thread has nobody to raise to: the live view shows it, wait() raises
                self.error = traceback.format_exc()
                details = {"message": str(error), "traceback": self.error}
            log.write("end", len(steps), status=status, num_steps=len(steps), **details)
        self._status = status

    def _count(self, step: Mapping[str, Any]) -> None:
        """Work out how far the run is."""
        self._num_done += step["num_batches"]
        self._spent_s += step["step_s"]
        done = float(self._costs[self._num_done] / self._costs[-1])
        self.progress = (done, self._spent_s * (1 - done) / done)


def _name(precision: str, accumulation: int, weighting: str) -> str:
    """What tells a run from the others, as a folder's name."""
    parts = [precision] + [f"x{accumulation}"] * (accumulation > 1) + [weighting] * (weighting != "fixed")
    return " ".join(parts)


def _result(steps: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> dict[str, Any]:
    frame = pd.DataFrame(steps)
    losses = [name for name in ("matching_loss", "masked_language_loss") if name in found]
    return {
        "steps": len(frame),
        "skipped": int(frame["skipped"].sum()),
        "step, ms": 1e3 * float(frame["step_s"].iloc[1:].median()),
        "held-out loss": found["loss"],
        **{f"held-out {name.replace('_', ' ')}": found[name] for name in losses},
    }


def training_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Loss, weights and loss scale of every run over the samples that it has seen."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, weight, scale = figure.subplots(1, 3)
    for number, (name, steps) in enumerate(runs.items()):
        if not steps:
            continue
        frame, colour = pd.DataFrame(steps), PALETTE[number % len(PALETTE)]
        seen = frame["num_samples"].cumsum()
        keys = [key for key in steps[0] if key.endswith("_loss")]
        for style, key in zip(("-", "--", ":"), keys, strict=False):
            loss.plot(seen, frame[key], ls=style, color=colour, label=name if style == "-" else None)
            weight.plot(seen, frame[key.replace("_loss", "_weight")], ls=style, color=colour)
        scale.step(seen, frame["loss_scale"], where="post", color=colour)
        skipped = frame["skipped"].astype(bool)
        scale.plot(seen[skipped], frame["loss_scale"][skipped], "x", color=colour)
    loss.set(title="loss by objective, without its weight", xlabel="samples", ylabel="nats")
    weight.set(title="weights of the objectives", xlabel="samples", ylim=(0, None))
    scale.set(title="loss scale (x: step skipped)", xlabel="samples", yscale="log")
    if any(runs.values()):
        loss.legend(frameon=False, fontsize="small")
    return figure
