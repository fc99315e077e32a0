"""Widgets for the notebooks: explore plans with sliders, run a comparison and watch it.

Both panels are ipywidgets around functions that are public elsewhere (`preview`, `start_compare`), and can be
used without a front-end. The run is another process and the panel follows its files, so the kernel stays
free; the picture is redrawn every two seconds at most, which costs the kernel a tenth of a second each time.
An error in a callback or in the following thread is shown in the panel, where it can be copied.
"""

from __future__ import annotations

import html
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import numpy as np
from matplotlib.figure import Figure

from mmlab.background import BackgroundRun, start_compare
from mmlab.charts import PALETTE, to_png
from mmlab.comparison import Comparison
from mmlab.errors import RunError
from mmlab.monitor import RunState
from mmlab.overview import SHOWN_SCHEDULERS
from mmlab.schedule import SCHEDULERS, make_scheduler, preview

if TYPE_CHECKING:
    from mmlab.types import SampleSizes

REFRESH_S = 2.0
MAX_EXPLORED = 16_384  # samples that a slider's answer is worked out from; more would take too long
_WIDE = {"description_width": "9rem"}
_PER_CENT = ("text_waste", "image_waste", "combined_waste", "straggler", "collision_ratio")


class PlanExplorer(widgets.VBox):
    """Sliders beside a table: what would each scheduler's batches waste on these samples?

    Answers at once also for a large data set, because it plans 16,384 samples of it, drawn by image; the table says so.
    `preview` plans them all.

    Args:
        sizes: the samples, with image sizes as the model will see them (`records.sizes(policy)`).
        schedulers: names to begin with.
    """

    def __init__(self, sizes: SampleSizes, schedulers: Sequence[str] = SHOWN_SCHEDULERS) -> None:
        self._num_samples, self._sizes = len(sizes), _some_images(sizes, MAX_EXPLORED)
        self._mean_cost = make_scheduler("random", batch_size=1).plan(self._sizes).report().mean_cost
        self.schedulers = _choose_schedulers(schedulers, without=("memory",))
        self.samples = _slider("budget, samples", 32, 4, 256)
        self.window = widgets.SelectionSlider(
            options=[2**power for power in range(8, 15)],
            value=2**14,
            description="budget's window",
            continuous_update=False,
            style=_WIDE,
        )
        self.text_step = _slider("bucket, tokens", 8, 1, 64)
        self.classes = _slider("bucket, aspects", 4, 1, 16)
        self.ranks = _slider("ranks", 1, 1, 16)
        self.table = widgets.HTML()
        self.message = widgets.HTML()
        sliders = [self.samples, self.window, self.text_step, self.classes, self.ranks]
        for control in (self.schedulers, *sliders):
            control.observe(_shown_in(self.message, lambda change: self._update()), "value")
        super().__init__([widgets.HBox([self.schedulers, widgets.VBox(sliders)]), self.message, self.table])
        self._update()

    def _update(self) -> None:
        self.message.value = ""
        found = preview(
            self._sizes,
            self.schedulers.value,
            budget=self.samples.value * self._mean_cost,
            ranks=self.ranks.value,
            window=self.window.value,
            text_step=self.text_step.value,
            classes_per_octave=self.classes.value,
        )
        table = found.table[["num_batches", *_PER_CENT, "peak_over_budget", "randomness"]]
        shares = table.columns[1:-2]
        style = table.style.format("{:.2f}").format("{:.0f}", ["num_batches"]).format("{:.1%}", shares)
        style = style.format_index(lambda name: str(name).replace("_", " "), axis="columns")
        style = style.bar(shares, vmin=0, vmax=0.5, color="#E69F00", width=80)
        style = style.bar(["randomness"], vmin=0, vmax=1, color="#56B4E9", width=80)
        head = f"Budget {found.budget:.0f} padded tokens a batch."
        if len(self._sizes) < self._num_samples:
            head += f" Estimated from {len(self._sizes):,} of {self._num_samples:,} samples."
        self.table.value = f"<p>{head}</p>{style.to_html(table_uuid=str(id(self)))}"


class CompareDashboard(widgets.VBox):
    """Choose schedulers, press Start, watch them side by side; Stop ends the run cleanly after a step.

    `start()`, `stop()` and `wait()` do the same from code, and none but `wait()` waits. Starting while a run is going
    on does nothing.

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
        self.schedulers = _choose_schedulers(
            options.pop("schedulers", SHOWN_SCHEDULERS),
            without=("memory", "packed"),
        )
        self.batch_size = _slider("batch size", options.pop("batch_size", 32), 2, 256)
        self.epochs = _slider("epochs", options.pop("epochs", 3), 1, 20)
        self.precision = widgets.Dropdown(
            options=["fp32", "bf16", "fp16"],
            value=options.pop("precision", "fp32"),
            description="precision",
            style=_WIDE,
        )
        self._options = options
        self.start_button = widgets.Button(description="Start", button_style="primary", icon="play")
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.progress = widgets.FloatProgress(value=0.0, max=1.0, description="not started", style=_WIDE)
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none"))
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
            self.picture.layout.display = "none"
            self.progress.value, self.progress.bar_style = 0.0, ""
            self.progress.description = "starting"
            started_s = time.time()
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
            follow = _shown_in(self.message, lambda run: self._follow(run, started_s))
            self._follower = threading.Thread(target=follow, args=(self._run,), daemon=True)
            self._follower.start()

    def stop(self) -> None:
        """Stop cleanly after the step in hand; the epochs that every scheduler finished are kept."""
        if self._run is not None and self._run.state == "running":
            self.stop_button.disabled, self.progress.description = True, "stopping"
            threading.Thread(target=self._run.stop, daemon=True).start()

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

    def _follow(self, run: BackgroundRun, started_s: float) -> None:
        """In a thread of its own: redraw while the run goes on, then show its result."""
        states: dict[str, RunState] = {}
        try:
            while run.state == "running":
                self._refresh(run, states, started_s)
                run.sleep(REFRESH_S)
            self._refresh(run, states, started_s)
            self.result.value = run.wait()._repr_html_()
        finally:
            self.progress.description = run.state
            self.progress.bar_style = {"done": "success", "stopped": "warning"}.get(run.state, "danger")
            self.start_button.disabled, self.stop_button.disabled = False, True

    def _refresh(self, run: BackgroundRun, states: dict[str, RunState], started_s: float) -> None:
        num_new = 0
        for folder in sorted((run.folder / "runs").glob("*/")):
            state = states.get(folder.name, RunState(folder))
            num_new += state.refresh()
            start = state.event("start")
            if (
                start is not None and start.time_s >= started_s
            ):  # else left by an earlier run, soon moved aside
                states[folder.name] = state
        done = sum(len(state.column("step")) for state in states.values())
        if not num_new or not done:
            return
        planned = sum(state.latest("start")["num_steps"] for state in states.values())
        self.progress.value = done / planned
        if not self.stop_button.disabled:
            self.progress.description = f"{done} / {planned} steps"
        self.picture.value, self.picture.layout.display = to_png(live_figure(states), dpi=80), None


def live_figure(states: dict[str, RunState]) -> Figure:
    """Runs overlaid: loss, cost of each batch and throughput against samples seen, memory against time."""
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


def _choose_schedulers(names: Sequence[str], *, without: Sequence[str]) -> widgets.SelectMultiple:
    offered = [name for name in SCHEDULERS if name not in without]
    return widgets.SelectMultiple(
        options=offered,
        value=tuple(names),
        rows=len(offered),
        description="schedulers",
        style=_WIDE,
    )


def _slider(name: str, value: int, low: int, high: int) -> widgets.IntSlider:
    """A slider that reports its value when it is let go."""
    return widgets.IntSlider(value, low, high, description=name, continuous_update=False, style=_WIDE)


def _some_images(sizes: SampleSizes, num_samples: int) -> SampleSizes:
    """All samples of as many randomly drawn images as make about so many samples."""
    if len(sizes) <= num_samples:
        return sizes
    group = np.where(sizes.group < 0, -1 - np.arange(len(sizes)), sizes.group)  # unknown: an image of its own
    images, counts = np.unique(group, return_counts=True)
    order = np.random.default_rng(0).permutation(len(images))
    drawn = images[order[np.cumsum(counts[order]) <= num_samples]]
    return sizes.take(np.flatnonzero(np.isin(group, drawn)))


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
