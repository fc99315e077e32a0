"""Several runs on disk, followed together: which there are, how far they are, a table and a figure of them.

Everything is worked out from the runs' event files alone, so it is the same for a run of this process, of another one,
of several ranks, or of last week. How long is left follows from what the plans still cost, not from how many steps
they have: with batches of different cost, a step is no measure of time.

Costs: a look for news is one `stat` a file; a figure takes a tenth of a second. Does not: write, or need torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError
from mmlab.machine import GIB, IDENTITY, process_runs
from mmlab.runs.events import EVENT_FILES
from mmlab.runs.figures import PALETTE
from mmlab.runs.folders import ASIDE
from mmlab.runs.monitor import RunState

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_WARMUP_STEPS = 2  # of a run, not representative
_RECENT_STEPS = 200  # that a speed is taken from


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of some runs is done, and how long the rest will take at the speed measured so far."""

    done_ratio: float  # 0-1; NaN where it is not known yet
    left_s: float  # NaN where it is not known yet


class Runs:
    """Follow every run below a folder. Not thread-safe.

    Args:
        folder: a run's folder, or one above; runs that were moved aside (`previous-N`) do not count. It need not be
            there yet.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.states: dict[str, RunState] = {}  # by folder, relative to the one given

    def refresh(self) -> int:
        """Read what is new; returns the number of new events. Runs that are gone are forgotten."""
        there = {
            path.parent
            for path in self.folder.rglob(EVENT_FILES)
            if not any(part.startswith(ASIDE) for part in path.relative_to(self.folder).parts)
        }
        known = {name: state for name, state in self.states.items() if state.folder in there}
        for path in there:
            name = path.relative_to(self.folder).as_posix() if path != self.folder else path.resolve().name
            known.setdefault(name, RunState(path))
        self.states = dict(sorted(known.items()))
        return sum(self._refresh(name) for name in list(self.states))

    def _refresh(self, name: str) -> int:
        try:
            return self.states[name].refresh()
        except (DataError, FileNotFoundError):  # written anew, or moved aside this moment: begin again
            self.states[name] = RunState(self.states[name].folder)
            return 0


def status_of(state: RunState) -> str:
    """The run's status: waiting, running, paused, done, stopped, failed; or killed, if its process is gone."""
    start = state.event("start")
    if start is None or state.status not in ("running", "paused") or "process_id" not in start.values:
        return state.status
    identity = {key: start.values.get(key) for key in IDENTITY}
    return state.status if process_runs(identity) else "killed"


def progress_of(states: Sequence[RunState]) -> Progress:
    """How far these runs are together, which take turns or follow each other.

    >>> from mmlab.runs.events import RunEvent
    >>> state = RunState()
    >>> state.fold([RunEvent("start", 0, 0, 0.0, {"planned_cost": 100.0, "num_epochs": 1})])
    >>> state.fold([RunEvent("step", n, 0, n, {"predicted_cost": 10.0, "step_s": 1.0}) for n in (1, 2, 3)])
    >>> state.fold([RunEvent("step", 4, 0, 9.0, {"predicted_cost": 30.0, "step_s": 3.0})])
    >>> progress_of([state])
    Progress(done_ratio=0.6, left_s=4.0)
    """
    speeds = np.array([_speed(state) for state in states])
    if not len(states) or not np.isfinite([_planned(state) for state in states]).all():
        return Progress(nan, nan)
    planned, done = sum(_planned(state) for state in states), sum(_done(state) for state in states)
    if all(state.status in ("done", "stopped", "failed") for state in states):
        complete = all(state.status == "done" for state in states)
        return Progress(1.0 if complete else min(1.0, done / planned), 0.0)
    known = speeds[np.isfinite(speeds)]
    if not len(known):
        return Progress(min(1.0, done / planned), nan)
    speeds[~np.isfinite(speeds)] = known.mean()  # of runs that have not begun
    evaluations_s = [
        state.column("eval_s", "eval").mean() for state in states if "eval_s" in state.keys("eval")
    ]
    evaluation_s = float(np.mean(evaluations_s)) if evaluations_s else 0.0
    left_s = 0.0
    for state, speed in zip(states, speeds, strict=True):
        epochs = state.latest("start").get("num_epochs", 0) - len(state.column("step", "eval"))
        left_s += max(0.0, _planned(state) - _done(state)) / speed + max(0, epochs) * evaluation_s
    return Progress(min(1.0, done / planned), float(left_s))


def table_of(states: Mapping[str, RunState]) -> pd.DataFrame:
    """A row a run: how far it is, how fast, what of it was padding and waiting, its latest losses."""
    import pandas as pd

    return pd.DataFrame([{"run": name, **figures_of(state)} for name, state in states.items()]).set_index(
        "run"
    )


def figures_of(state: RunState, rank: int = 0) -> dict[str, Any]:
    """What a row says of one rank of a run; None where nothing is known."""
    step, device = state.latest("step", rank), state.latest("device", rank)
    seconds, samples = _column(state, "step_s", rank), _column(state, "num_samples", rank)
    timed = slice(_WARMUP_STEPS if len(seconds) > _WARMUP_STEPS else 0, None)
    timed_s = seconds[timed].sum()
    found: dict[str, Any] = {
        "status": status_of(state),
        "steps": len(seconds),
        "planned_steps": state.latest("start", rank).get("num_steps"),
        "epoch": step.get("epoch"),
        "samples": int(np.nansum(samples)),
        "samples_per_s": _ratio(samples[timed].sum(), timed_s),
        "step_s": _known(np.median(seconds[timed])) if len(seconds) else None,
        "data_wait_ratio": _ratio(_column(state, "data_wait_s", rank)[timed].sum(), timed_s),
        "rank_wait_ratio": _ratio(_column(state, "rank_wait_s", rank)[timed].sum(), timed_s),
    }
    tokens = _column(state, "num_tokens", rank) * samples
    for key in ("text_waste", "image_waste", "combined_waste"):
        found[key] = _ratio((_column(state, key, rank) * tokens).sum(), tokens.sum())
    found |= {
        "loss": step.get("loss"),
        "held_out_loss": state.latest("eval", rank).get("loss"),
        "peak_bytes": int(_column(state, "peak_bytes", rank).max()) if "peak_bytes" in step else None,
    }
    for key in ("memory_bytes", "memory_total_bytes", "memory_source", "utilization_ratio", "power_w"):
        found[key] = device.get(key)
    return found


def draw_runs(states: Mapping[str, RunState]) -> Figure:
    """Runs overlaid: loss, cost of each batch and throughput against samples seen, memory against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, cost, speed, memory = figure.subplots(1, 4)
    for index, (name, state) in enumerate(states.items()):
        style: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "label": name}
        style["linestyle"] = ("-", "--", "-.", ":")[index % 4]
        samples = _column(state, "num_samples").cumsum()
        for axis, key in ((loss, "loss"), (cost, "predicted_cost"), (speed, "samples_per_s")):
            if np.isfinite(column := _column(state, key)).any():
                axis.plot(samples, column, **style)
        if "memory_bytes" in state.keys("device"):
            seconds = state.column("time_s", kind="device")
            memory.plot(seconds - seconds[0], state.column("memory_bytes", kind="device") / GIB, **style)
    budgets = {state.latest("start").get("config", {}).get("budget") for state in states.values()} - {None}
    for budget in budgets:
        cost.axhline(budget, color="black", lw=1, ls="--")
    sources = {str(state.latest("device").get("memory_source", "")) for state in states.values()} - {""}
    loss.set(title="training loss", xlabel="samples")
    cost.set(title="cost of each batch (-- budget)", xlabel="samples", ylabel="padded tokens")
    speed.set(title="samples/s", xlabel="samples")
    memory.set(title=f"memory, {' and '.join(sorted(sources)) or 'no reading yet'}", xlabel="s", ylabel="GiB")
    if loss.lines:
        loss.legend(frameon=False, fontsize=8)
    return figure


def _planned(state: RunState) -> float:
    """Cost of the whole run, or its steps where no cost is known; NaN where neither is."""
    start = state.latest("start")
    return float(start.get("planned_cost") or start.get("num_steps") or nan)


def _done(state: RunState) -> float:
    if "planned_cost" in state.latest("start"):
        return float(np.nansum(_column(state, "predicted_cost")))
    step = state.event("step")
    return 0.0 if step is None else float(step.step)


def _speed(state: RunState) -> float:
    """Cost (or steps) a second, of the recent steps; NaN before the first."""
    seconds = _column(state, "step_s")
    recent = slice(max(min(_WARMUP_STEPS, len(seconds) - 1), len(seconds) - _RECENT_STEPS), None)
    total_s = seconds[recent].sum()
    if not total_s > 0:
        return nan
    by_cost = "planned_cost" in state.latest("start")
    done = np.nansum(_column(state, "predicted_cost")[recent]) if by_cost else len(seconds[recent])
    return float(done / total_s) if 0 < done < inf else nan


def _column(state: RunState, key: str, rank: int = 0) -> NDArray[np.float64]:
    """(N,) of each step; NaN where the run says nothing of it."""
    if key in state.keys(rank=rank):
        return state.column(key, rank=rank)
    return np.full(len(state.column("step", rank=rank)), nan)


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 and isfinite(part) else None
