"""A panel for notebooks: train under other settings, and see every run over the ones before, live.

Each run is a `FusionTrainer` on a copy of the same model and on the same batches, in a thread of the kernel: it works
on what the notebook has in memory, for seconds. It writes its events to a folder of its own, which the live view
below the settings follows, and is paused and stopped from there. It can be used without a front-end.

Costs the training itself and a copy of the model. The thread shares Python's lock with the kernel, so a cell that
computes slows it; `Lab` trains longer runs in a process of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from mmlab.comparison.run import Run
from mmlab.errors import OptionError, RunError
from mmlab.lab.live_panel import LivePanel
from mmlab.lab.panels import WIDE, Panel
from mmlab.runs.control import Control, send
from mmlab.runs.events import EVENT_FILES
from mmlab.runs.figures import colours_of
from mmlab.runs.folders import fresh_folder
from mmlab.runs.follow import Runs, RunState
from mmlab.runs.summaries import Progress, progress_of
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.base import Objective
from mmlab.training.options import TrainOptions, change_options
from mmlab.training.precision import PRECISIONS
from mmlab.training.weighting import WEIGHTINGS, make_weighting
from mmlab.types import Batch


class TrainingPanel(Panel):
    """Precision, accumulation and the weighting of the objectives above the live view of every run so far.

    A change of a setting is for the next run. The panel is what steers its live view (`mmlab.lab.pump.Controller`).

    Args:
        model: every run starts from a copy of it.
        batches: micro-batches of an epoch, in order.
        held_out: evaluated after every run.
        out: folder of the runs; what earlier ones left there is moved to `previous-N`.
        objectives: see `FusionTrainer`; weightings need two or more to have anything to do.
        num_epochs: passes over the batches in a run.
        interval: steps between two updates of the weights.
        options: of the trainer; the settings replace their part of them.
        changes: options of the trainer by name, instead of those in `options`.

    Raises:
        OptionError: no batches, or an option of the trainer that cannot work.
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
        options: TrainOptions | None = None,
        **changes: Any,
    ) -> None:
        if not batches:
            raise OptionError("no batches to train on; give at least one")
        self._model, self._batches, self._held_out = model, list(batches), list(held_out)
        self._objectives, self._num_epochs, self._interval = dict(objectives), num_epochs, interval
        self.options = change_options(options, changes)
        self.folder = Path(out)
        fresh_folder(self.folder, {path.parent.name for path in self.folder.glob(f"*/{EVENT_FILES}")})
        self._lock = threading.RLock()
        self._runs = Runs(self.folder)
        self._name, self._stopping = "", False  # of the latest run
        self._thread: threading.Thread | None = None
        on_gpu = torch.cuda.is_available() and self.options.device != "cpu"
        names = [name for name in PRECISIONS if on_gpu or name != "tf32"]
        chosen = self.options
        self.precision = widgets.Dropdown(
            options=names, value=chosen.precision, description="precision", style=WIDE
        )
        self.accumulation = widgets.SelectionSlider(
            options=sorted({1, 2, 4, 8, chosen.accumulation_steps}),
            value=chosen.accumulation_steps,
            description="micro-batches a step",
            style=WIDE,
        )
        self.weighting = widgets.Dropdown(
            options=list(WEIGHTINGS), value=chosen.weighting, description="weighting", style=WIDE
        )
        self.live = LivePanel(controller=self)
        settings = [self.precision, self.accumulation, self.weighting]
        super().__init__([widgets.HBox(settings, layout=widgets.Layout(flex_flow="row wrap"))], [self.live])

    @property
    def runs(self) -> dict[str, RunState]:
        """Every run so far, by the settings that tell it from the others."""
        with self._lock:
            self._runs.poll()
            return self._runs.states

    @property
    def state(self) -> str:
        """`idle`, `running`, `paused`, `stopping`, `done`, `stopped` or `failed`: of the latest run."""
        if self._thread is None:
            return "idle"
        is_alive, run = self._thread.is_alive(), self.runs.get(self._name)
        if is_alive:
            return "stopping" if self._stopping else "paused" if run and run.status == "paused" else "running"
        return "failed" if run is None else run.status

    @property
    def progress(self) -> tuple[float, float]:
        """Share of the latest run that is done, and seconds that are left; NaN where not known yet."""
        run = self.runs.get(self._name)
        return Progress() if run is None else progress_of([run])

    @property
    def error(self) -> str | None:
        """Traceback of what ended the latest run, if anything did."""
        run = self.runs.get(self._name)
        return None if run is None else run.latest("end").get("traceback")

    def start(self) -> None:
        """Train with the settings' values; returns at once. A run of the same values is done anew."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            options = dataclasses.replace(
                self.options,
                precision=self.precision.value,
                accumulation_steps=self.accumulation.value,
                weighting=self.weighting.value,
            )
            self._name, self._stopping = _name(options), False
            folder = fresh_folder(self.folder / self._name, (EVENT_FILES,))
            self._thread = threading.Thread(
                target=self._train, args=(options, folder, Control(folder)), daemon=True
            )
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
        rows = {name: _row(run) for name, run in self.runs.items() if run.event("eval") is not None}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")

    def figure(self) -> Figure:
        """Loss by objective, weights and loss scale of every run, which the live view does not draw."""
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
                self._stopping |= command == "stop"
                send(self.folder / self._name, command)

    def _train(self, options: TrainOptions, folder: Path, control: Control) -> None:
        """One run, in a thread of its own: its last event keeps an error, which the live view shows and `wait` raises."""
        names = list(self._objectives)
        weighting: Any = options.weighting
        if len(names) > 1:
            weighting = make_weighting(weighting, names, interval=self._interval, smoothing=0.3)

        with suppress(Exception), Run(folder, control=control) as run:
            run.start(
                run_name=_name(options),
                precision=options.precision,
                accumulation_steps=options.accumulation_steps,
                num_steps=self._num_epochs * -(-len(self._batches) // options.accumulation_steps),
            )
            model = copy.deepcopy(self._model)
            trainer = FusionTrainer(
                model, options, objectives=self._objectives, weighting=weighting, emit=run.emit
            )
            run.fit(trainer, self._batches, num_epochs=self._num_epochs)
            if trainer.step:
                run.write("eval", **trainer.evaluate(self._held_out))


def _name(options: TrainOptions) -> str:
    """What tells a run from the others, as a folder's name."""
    steps, rule = options.accumulation_steps, options.weighting
    parts = [options.precision] + [f"x{steps}"] * (steps > 1) + [rule] * (rule != "fixed")
    return " ".join(parts)


def _row(run: RunState) -> dict[str, Any]:
    held_out = run.latest("eval")
    losses = [name for name in ("matching_loss", "masked_language_loss") if name in held_out]
    return {
        "steps": run.count(),
        "skipped": int(run.column("skipped").sum()),
        "step, ms": 1e3 * float(np.median(run.column("step_s", start=min(1, run.count() - 1)))),
        "held-out loss": held_out["loss"],
        **{f"held-out {name.replace('_', ' ')}": held_out[name] for name in losses},
    }


def training_figure(runs: Mapping[str, RunState]) -> Figure:
    """Loss, weights and loss scale of every run over the samples that it has seen."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, weight, scale = figure.subplots(1, 3)
    begun = {name: run for name, run in runs.items() if run.count()}
    for name, colour in colours_of(begun).items():
        run = begun[name]
        seen, scales = run.column("num_samples").cumsum(), run.column("loss_scale")
        parts = [key for key in run.keys("step") if key.endswith("_loss")]
        for style, key in zip(("-", "--", ":"), parts, strict=False):
            loss.plot(seen, run.column(key), ls=style, color=colour, label=name if style == "-" else None)
            weight.plot(seen, run.column(key.replace("_loss", "_weight")), ls=style, color=colour)
        scale.step(seen, scales, where="post", color=colour)
        skipped = run.column("skipped").astype(bool)
        scale.plot(seen[skipped], scales[skipped], "x", color=colour)
    loss.set(title="loss by objective, without its weight", xlabel="samples", ylabel="nats")
    weight.set(title="weights of the objectives", xlabel="samples", ylim=(0, None))
    scale.set(title="loss scale (x: step skipped)", xlabel="samples", yscale="log")
    if begun:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure
