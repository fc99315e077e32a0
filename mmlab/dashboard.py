"""Widgets for the notebooks: explore plans with sliders, run a comparison and watch it.

Both panels are ipywidgets around functions that are public elsewhere (`preview`, `start_compare`), and can be
used without a front-end. The run is another process and the panel follows its files, so the kernel stays
free; the picture is redrawn every two seconds at most, which costs the kernel a tenth of a second each time.
An error in a callback or in the following thread is shown in the panel, where it can be copied.
"""

from __future__ import annotations

import html
import io
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from mmlab.background import BackgroundRun, start_compare
from mmlab.comparison import PALETTE, Comparison
from mmlab.errors import RunError
from mmlab.monitor import RunState
from mmlab.schedule import SCHEDULERS, preview

if TYPE_CHECKING:
    from mmlab.types import SampleSizes

REFRESH_S = 2.0
_WIDE = {"description_width": "8rem"}


class PlanExplorer(widgets.VBox):
    """Sliders beside a table: what would each scheduler's batches waste on these samples?

    Args:
        sizes: the samples, with image sizes as the model will see them (`records.sizes(policy)`).
        schedulers: names to begin with.
    """

    def __init__(
        self, sizes: SampleSizes, schedulers: Sequence[str] = ("random", "sorted", "bucket", "budget")
    ) -> None:
        self._sizes = sizes
        self._mean_cost = preview(sizes, ["random"], epochs=1).budget / 32
        self.schedulers = widgets.SelectMultiple(
            options=sorted(SCHEDULERS),
            value=tuple(schedulers),
            rows=len(SCHEDULERS),
            description="schedulers",
            style=_WIDE,
        )
        self.samples = widgets.IntSlider(
            32, 4, 256, description="budget, samples", continuous_update=False, style=_WIDE
        )
        self.ranks = widgets.IntSlider(1, 1, 16, description="ranks", continuous_update=False, style=_WIDE)
        self.table = widgets.HTML()
        self.message = widgets.HTML()
        for control in (self.schedulers, self.samples, self.ranks):
            control.observe(_shown_in(self.message, lambda change: self._update()), "value")
        super().__init__(
            [
                widgets.HBox([self.schedulers, widgets.VBox([self.samples, self.ranks])]),
                self.message,
                self.table,
            ]
        )
        self._update()

    def _update(self) -> None:
        self.message.value = ""
        budget = self.samples.value * self._mean_cost
        found = preview(self._sizes, self.schedulers.value, budget=budget, ranks=self.ranks.value, epochs=2)
        self.table.value = f"<p>budget {budget:.0f} padded tokens a batch</p>" + found.table.to_html(
            border=0, float_format="{:.3f}".format
        )


class CompareDashboard(widgets.VBox):
    """Choose schedulers, press Start, watch them side by side; Stop ends the run cleanly after a step.

    `start()`, `stop()` and `wait()` do the same from code. Starting while a run is going on does nothing.

    Args:
        data: what `mmlab.compare` takes.
        out: folder for the results; a comparison already there is moved aside.
        options: further options of `mmlab.compare`, such as `epochs=2` or `limit=200`; those with a control
            set it.
    """

    def __init__(self, data: Any, *, out: str | Path = "runs/notebook", **options: Any) -> None:
        self._data, self._out = data, Path(out)
        self._run: BackgroundRun | None = None
        self._follower: threading.Thread | None = None
        self._lock = threading.Lock()
        self.schedulers = widgets.SelectMultiple(
            options=sorted(SCHEDULERS),
            value=tuple(options.pop("schedulers", ("random", "sorted", "bucket", "budget"))),
            rows=len(SCHEDULERS),
            description="schedulers",
            style=_WIDE,
        )
        self.batch_size = widgets.IntSlider(
            options.pop("batch_size", 32), 2, 256, description="batch size", style=_WIDE
        )
        self.epochs = widgets.IntSlider(options.pop("epochs", 3), 1, 20, description="epochs", style=_WIDE)
        self.precision = widgets.Dropdown(
            options=["fp32", "bf16", "fp16"],
            value=options.pop("precision", "fp32"),
            description="precision",
            style=_WIDE,
        )
        self._options = options
        self.start_button = widgets.Button(description="Start", button_style="primary", icon="play")
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.progress = widgets.FloatProgress(0.0, 0.0, 1.0, description="waiting", style=_WIDE)
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.result = widgets.HTML()
        self.message = widgets.HTML()
        self.start_button.on_click(_shown_in(self.message, lambda button: self.start()))
        self.stop_button.on_click(_shown_in(self.message, lambda button: self.stop()))
        controls = widgets.VBox([self.batch_size, self.epochs, self.precision])
        super().__init__(
            [
                widgets.HBox([self.schedulers, controls]),
                widgets.HBox([self.start_button, self.stop_button, self.progress]),
                self.message,
                self.picture,
                self.result,
            ]
        )

    def start(self) -> None:
        """Start the comparison in another process; returns at once."""
        with self._lock:
            if self._run is not None and self._run.state == "running":
                return
            self.message.value = self.result.value = ""
            self._run = start_compare(
                self._data,
                self.schedulers.value,
                out=self._out,
                batch_size=self.batch_size.value,
                epochs=self.epochs.value,
                precision=self.precision.value,
                **self._options,
            )
            self.start_button.disabled, self.stop_button.disabled = True, False
            follow = _shown_in(self.message, self._follow)
            self._follower = threading.Thread(target=follow, args=(self._run,), daemon=True)
            self._follower.start()

    def stop(self) -> None:
        """Stop cleanly after the step in hand; the epochs that every scheduler finished are kept."""
        if self._run is not None:
            self.progress.description = "stopping"
            self._run.stop()

    def wait(self) -> Comparison:
        """Wait for the end and return the comparison.

        Raises:
            RunError: nothing was started, or the run failed (`BackgroundRun.wait` says what else).
        """
        if self._run is None or self._follower is None:
            raise RunError("nothing is running; press Start or call start() first")
        try:
            return self._run.wait()
        finally:
            self._follower.join()

    def _follow(self, run: BackgroundRun) -> None:
        """In a thread of its own: redraw while the run goes on, then show its result."""
        states: dict[str, RunState] = {}
        try:
            self.progress.description = "starting"
            while run.state == "running":
                self._refresh(run, states)
                run.sleep(REFRESH_S)
            self._refresh(run, states)
            self.result.value = run.wait()._repr_html_()
        finally:
            self.progress.description = run.state
            self.start_button.disabled, self.stop_button.disabled = False, True

    def _refresh(self, run: BackgroundRun, states: dict[str, RunState]) -> None:
        for folder in sorted((run.folder / "runs").glob("*/")):
            states.setdefault(folder.name, RunState(folder))
        changed = [state.refresh() for state in states.values()]
        if not any(changed):
            return
        done = sum(len(state.column("step")) for state in states.values())
        planned = sum(state.latest("start").get("num_steps", 0) for state in states.values())
        self.progress.value = done / max(1, planned)
        self.progress.description = f"{done} / {planned} steps"
        self.picture.value = _png(live_figure(states))


def live_figure(states: dict[str, RunState]) -> Figure:
    """Runs overlaid on one axis of samples seen: loss, cost of each batch, throughput, memory of the process or device."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, cost, speed, memory = figure.subplots(1, 4)
    for index, (name, state) in enumerate(sorted(states.items())):
        style: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "label": name}
        style["linestyle"] = ("-", "--", "-.", ":")[index % 4]
        if len(state.column("step")):
            samples = state.column("num_samples").cumsum()
            loss.plot(samples, state.column("loss"), **style)
            cost.plot(samples, state.column("predicted_cost"), **style)
            speed.plot(samples, state.column("samples_per_s"), **style)
        if len(state.column("step", kind="device")):
            seconds = state.column("time_s", kind="device")
            memory.plot(seconds - seconds[0], state.column("memory_bytes", kind="device") / 2**30, **style)
    budgets = {state.latest("start").get("config", {}).get("budget") for state in states.values()} - {None}
    for budget in budgets:
        cost.axhline(budget, color="black", lw=1, ls="--")
    sources = sorted(
        {str(state.latest("device").get("memory_source", "")) for state in states.values()} - {""}
    )
    loss.set(title="training loss", xlabel="samples")
    cost.set(title="cost of each batch (-- budget)", xlabel="samples", ylabel="padded tokens")
    speed.set(title="samples/s", xlabel="samples")
    memory.set(title=f"memory, {' and '.join(sources) or 'no reading yet'}", xlabel="s", ylabel="GiB")
    if states:
        loss.legend(frameon=False, fontsize=8)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()


def _shown_in(message: widgets.HTML, act: Callable[[Any], object]) -> Callable[[Any], None]:
    """`act`, with any error shown in `message` instead of vanishing with the callback or the thread."""

    def acting(argument: Any) -> None:
        try:
            act(argument)
        except Exception as error:
            details = html.escape(traceback.format_exc())
            message.value = (
                f"<b>{html.escape(type(error).__name__)}: {html.escape(str(error))}</b>"
                f"<details><summary>traceback</summary><pre>{details}</pre></details>"
            )

    return acting
