"""A panel for notebooks: train a few steps under other settings, and see every run beside the ones before.

Each run is a `FusionTrainer` on a copy of the same model and on the same batches, in a thread of the kernel, so that
a cell or a second click can stop it. Costs the training itself, a copy of the model, and a tenth of a second every time
that the picture is drawn, once a second at most. It can be used without a front-end.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from mmlab.charts import PALETTE, to_png
from mmlab.dashboard import _shown_in
from mmlab.errors import OptionError, RunError
from mmlab.events import RunEvent
from mmlab.losses import Objective
from mmlab.precision import PRECISIONS
from mmlab.trainer import FusionTrainer
from mmlab.types import Batch
from mmlab.weighting import WEIGHTINGS, make_weighting

REFRESH_S = 1.0
_WIDE = {"description_width": "9rem"}


class TrainingPanel(widgets.VBox):
    """Precision, accumulation and the weighting of the objectives beside the curves of every run so far.

    Args:
        model: every run starts from a copy of it.
        batches: micro-batches of an epoch, in order.
        held_out: evaluated after every run.
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
        self._trainer: FusionTrainer | None = None
        self._thread: threading.Thread | None = None
        self._drawn_s = 0.0
        self.runs: dict[str, list[dict[str, Any]]] = {}  # values of the steps, by the run's name
        self.results: dict[str, dict[str, Any]] = {}  # what each run that ended has come to
        on_gpu = torch.cuda.is_available() and options.get("device") != "cpu"
        names = [name for name in PRECISIONS if on_gpu or name != "tf32"]
        self.precision = widgets.Dropdown(options=names, description="precision", style=_WIDE)
        self.accumulation = widgets.SelectionSlider(
            options=[1, 2, 4, 8], description="micro-batches a step", style=_WIDE
        )
        self.weighting = widgets.Dropdown(options=list(WEIGHTINGS), description="weighting", style=_WIDE)
        self.train_button = widgets.Button(description="Train", button_style="primary")
        self.stop_button = widgets.Button(description="Stop", disabled=True)
        self.message, self.table = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.train_button.on_click(_shown_in(self.message, lambda button: self.start()))
        self.stop_button.on_click(_shown_in(self.message, lambda button: self.stop()))
        controls = (self.precision, self.accumulation, self.weighting)
        buttons = widgets.HBox([self.train_button, self.stop_button])
        super().__init__(
            [widgets.HBox([widgets.VBox([*controls, buttons]), self.table]), self.message, self.picture]
        )

    def start(self) -> None:
        """Train with the controls' values; returns at once. A run of the same values is done anew."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.message.value = ""
        settings = (self.precision.value, self.accumulation.value, self.weighting.value)
        self.train_button.disabled, self.stop_button.disabled = True, False
        self._thread = threading.Thread(
            target=_shown_in(self.message, lambda settings: self._train(*settings)),
            args=(settings,),
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the run after the step in hand; its curve stays."""
        if self._trainer is not None:
            self._trainer.stop()

    def wait(self) -> pd.DataFrame:
        """Wait for the end of the run and return the table of all runs.

        Raises:
            RunError: nothing was started, or the run failed.
        """
        if self._thread is None:
            raise RunError("nothing is running; press Train or call start() first")
        self._thread.join()
        if self.message.value:
            raise RunError(f"the run failed, the panel says why: {self.message.value[-300:]}")
        return self.summary()

    def summary(self) -> pd.DataFrame:
        """A row a run that ended: steps, those skipped, median time of a step and the held-out losses."""
        return pd.DataFrame.from_dict(self.results, orient="index").rename_axis("run")

    def _train(self, precision: str, accumulation: int, weighting: str) -> None:
        name = f"{precision}, {accumulation} a step, {weighting}"
        self.runs.pop(name, None)
        steps = self.runs[name] = []

        def take(event: RunEvent) -> None:
            if event.kind == "step":
                steps.append(dict(event.values))
                self._draw(min_s=REFRESH_S)

        try:
            rule: Any = weighting
            if len(self._objectives) > 1:
                rule = make_weighting(
                    weighting, list(self._objectives), interval=self._interval, smoothing=0.3
                )
            self._trainer = trainer = FusionTrainer(
                copy.deepcopy(self._model),
                objectives=self._objectives,
                weighting=rule,
                precision=precision,
                accumulation_steps=accumulation,
                emit=take,
                **self._options,
            )
            trainer.fit(self._batches, num_epochs=self._num_epochs)
            self.results[name] = _result(steps, trainer.evaluate(self._held_out))
        finally:
            self._trainer = None
            self.train_button.disabled, self.stop_button.disabled = False, True
            self._draw(min_s=0)

    def _draw(self, *, min_s: float) -> None:
        if time.monotonic() - self._drawn_s >= min_s:
            self.picture.value = to_png(training_figure(self.runs), dpi=80)
            self.table.value = self.summary().to_html(float_format="{:.3f}".format) if self.results else ""
            self._drawn_s = time.monotonic()


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
