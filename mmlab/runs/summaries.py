"""Summaries of runs so far: progress, a row of figures per run, a one-line verdict and a figure of several.

Everything is computed from the runs' events (`mmlab.runs.follow`). The time left is estimated from the cost
of the batches still planned, not from the number of steps: batches differ in cost, so a step is no measure of
time.

Costs: a row takes about a millisecond (of 100,000 steps ten), the figure a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmlab.runs.events import PROCESS_RSS
from mmlab.runs.figures import as_label, colours_of
from mmlab.runs.follow import RunState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARMUP_STEPS = 2  # first steps, which are not representative
FEW_STEPS = 20  # of an epoch; in fewer, what was loaded before the first timed step decides the speed
FASTER = 1.05  # how many times as fast one run must be to count as faster where their epochs overlap, or in a ranking
_RECENT_STEPS = 200  # from which a speed is computed
_DRAWN = 4000  # points of a line in a figure, about: a million would take minutes and gigabytes
_PER_SECOND = ("num_samples", "data_wait_s", "rank_wait_s")  # samples/s, and the shares of time spent waiting
_OF_DEVICE = ("memory_bytes", "memory_total_bytes", "memory_source", "utilization_ratio", "power_w")


class Progress(NamedTuple):
    """How much of some runs is done, and how long the rest will take at the speed measured so far."""

    done_ratio: float = nan  # 0-1; NaN where it is not known yet
    left_s: float = nan  # NaN where it is not known yet


def progress_of(runs: Iterable[RunState]) -> Progress:
    """The joint progress of runs that take turns or follow each other; unreadable runs do not count.

    >>> from mmlab.runs.events import RunEvent
    >>> run = RunState()
    >>> run.apply([RunEvent("start", 0, 0, 0.0, {"planned_cost": 100.0, "num_epochs": 1})])
    >>> run.apply([RunEvent("step", n, 0, n, {"predicted_cost": 10.0, "step_s": 1.0}) for n in (1, 2, 3)])
    >>> run.apply([RunEvent("step", 4, 0, 9.0, {"predicted_cost": 30.0, "step_s": 3.0})])
    >>> progress_of([run])
    Progress(done_ratio=0.6, left_s=4.0)
    """
    runs = [run for run in runs if not run.error]
    planned, done = np.array([_planned_and_done(run) for run in runs]).reshape(-1, 2).T
    if not runs or not np.isfinite(planned).all():
        return Progress()
    statuses = {run.status for run in runs}
    if statuses == {"done"}:
        return Progress(1.0, 0.0)
    done_ratio = min(1.0, float(done.sum() / planned.sum()))
    if statuses <= {"done", "stopped", "failed", "killed"}:
        return Progress(done_ratio, 0.0)
    speeds = np.array([_speed(run) for run in runs])
    known = speeds[np.isfinite(speeds)]
    if not len(known):
        return Progress(done_ratio)
    speeds[~np.isfinite(speeds)] = known.mean()  # of runs that have not begun
    evaluations_s = [run.column("eval_s", "eval").mean() for run in runs if "eval_s" in run.keys("eval")]
    num_evaluations = sum(map(_evaluations_left, runs))
    left_s = float((np.maximum(0.0, planned - done) / speeds).sum())
    return Progress(done_ratio, left_s + num_evaluations * float(np.mean(evaluations_s or [0.0])))


def _epochs_done(run: RunState) -> int:
    """Epochs that have ended, once each; of other trainers, which may not tell, those that were evaluated."""
    return np.unique(run.column_or_nan("epoch", "epoch"), equal_nan=False).size or run.count("eval")


def _evaluations_left(run: RunState) -> float:
    """As many for each epoch that is left as for each that is done."""
    num_done, num_evaluated = _epochs_done(run), run.count("eval")
    num_left = max(0, (run.latest("start").get("num_epochs") or 0) - num_done)
    return num_left * max(1.0, num_evaluated / max(1, num_done))


def after_warmup(steps: NDArray[Any]) -> NDArray[Any]:
    """A column of steps without the first ones, unless there are no others."""
    return steps[WARMUP_STEPS:] if len(steps) > WARMUP_STEPS else steps


def summarize(run: RunState, rank: int = 0) -> dict[str, Any]:
    """The figures of one rank; None where one is not known. Samples/s and shares of time are medians of finished epochs."""
    step, device = run.latest("step", rank), run.latest("device", rank)
    seconds = after_warmup(run.column_or_nan("step_s", rank=rank))
    steps, *found = run.done(("step", "num_samples", "peak_bytes", "loss"), rank)
    # on a CPU a comparison counts the peaks of some steps only; a batch of one image may have no loss
    samples, peaks, losses = (column[np.isfinite(column)] for column in found)

    of_epochs = dict(zip(_PER_SECOND, _of_epochs(run, rank), strict=True))

    def per_second(key: str) -> float | None:
        if len(of_epochs[key]):
            return _known(np.median(of_epochs[key]))
        return _ratio(after_warmup(run.column_or_nan(key, rank=rank)).sum(), seconds.sum())

    return {
        "status": run.status,
        "steps": len(steps),
        "planned_steps": run.latest("start", rank).get("num_steps"),
        "epoch": step.get("epoch"),
        "samples": int(samples.sum()),
        "samples_per_s": per_second("num_samples"),
        "step_s": _known(np.median(seconds)) if len(seconds) else None,
        "data_wait_ratio": per_second("data_wait_s"),
        "rank_wait_ratio": per_second("rank_wait_s"),
        **waste_of(run, rank),
        "loss": float(losses[-1]) if len(losses) else None,
        "held_out_loss": run.latest("eval", rank).get("loss"),
        "peak_bytes": int(peaks.max()) if len(peaks) else None,
        "peak_steps": len(peaks),
        **{key: device.get(key) for key in _OF_DEVICE},
    }


_PADDED = ("padded_tokens", "padded_patches")


def waste_of(run: RunState, rank: int = 0) -> dict[str, float | None]:
    """Padding shares of all steps together: each step is weighted by its padded texts, images, or both.

    >>> from mmlab.runs.events import RunEvent
    >>> first = {"padded_tokens": 10, "padded_patches": 1, "text_waste": 0.0, "image_waste": 0.0, "combined_waste": 0.0}
    >>> second = {"padded_tokens": 30, "padded_patches": 1, "text_waste": 0.4, "image_waste": 0.5, "combined_waste": 0.4}
    >>> run = RunState()
    >>> run.apply([RunEvent("step", step, 0, 0.0, values) for step, values in enumerate((first, second))])
    >>> {key: round(share, 3) for key, share in waste_of(run).items()}
    {'text_waste': 0.3, 'image_waste': 0.25, 'combined_waste': 0.295}

    Returns:
        Each share; None where a step lacks it.
    """
    keys = ("text_waste", "image_waste", "combined_waste")
    texts, images, *shares = run.done((*_PADDED, *keys), rank)
    weighted = zip(keys, shares, (texts, images, texts + images), strict=True)
    return {key: _ratio((share * weight).sum(), weight.sum()) for key, share, weight in weighted}


def failure_of(runs: Iterable[RunState]) -> str | None:
    """Why the first failed run of these failed: its traceback, or that its process was killed."""
    for run in runs:
        if run.status == "killed":
            return f"the process of {run.name} was killed: it ended without an error message"
        if found := run.latest("end").get("traceback"):
            return str(found)
    return None


def verdict_of(runs: Iterable[RunState]) -> str:
    """One line for a person: which run is the fastest, its gain over another one, and the spread over epochs.

    The fastest is compared with `random`, else with the first run; if it is that run itself, with the next
    fastest. The gain is that of the median epochs, as in a comparison's table. For the spread, epochs that
    alternate are paired, so that a slow phase of the machine affects both; if one run began after the other
    had ended, the line says so. `are_level` says when there is no winner. Empty before two runs have finished an epoch.

    >>> from mmlab.runs.events import RunEvent
    >>> runs = [RunState("random"), RunState("budget")]
    >>> for run, seconds in zip(runs, ((1.0, 1.2), (0.8, 0.8)), strict=True):
    ...     for epoch, step_s in enumerate(seconds):
    ...         values = {"epoch": epoch, "step_s": step_s, "num_samples": 8}
    ...         steps = [RunEvent("step", 20 * epoch + n, 0, 0.0, values) for n in range(20)]
    ...         run.apply([*steps, RunEvent("eval", 20 * epoch + 19, 0, 0.0, {})])
    >>> verdict_of(runs)
    'budget: +36 % samples/s over random (+25 to +50 % in 2 paired epochs)'
    """
    found = {run.name: (run, speeds) for run in runs if (speeds := _of_epochs(run)[0].tolist())}
    if len(found) < 2:
        return ""

    def paired(one: str, other: str) -> NDArray[np.float64]:
        """(2, E) samples/s of two runs in the epochs that both have finished."""
        return np.array([*zip(found[one][1], found[other][1], strict=False)]).T

    base = base_of(found)
    ranked = sorted(found, key=lambda name: np.divide(*np.median(paired(base, name), axis=1)))
    best, second = ranked[:2]
    rival = second if best == base else base
    fast, slow = paired(best, rival)
    gain, gains = 100 * (np.median(fast) / np.median(slow) - 1), 100 * (fast / slow - 1)
    level = [name for name in ranked[1:] if name != rival and are_level(found[best][1], found[name][1])]
    named = f"{best} (level with {', '.join(level)})" if level else best
    place = "the next fastest, " if best == base and len(found) > 2 else ""
    spread = f"{gains.min():+z.0f} to {gains.max():+z.0f} % in {len(gains)} paired epochs"
    over = f"{named}: {gain:+z.0f} % samples/s over {place}{rival}"
    ran = [found[name][0] for name in (best, rival)]
    if max(run.first_s for run in ran) > min(run.last_s for run in ran):
        compared = f"{over}, but they did not take turns: the machine may have been slower for one"
    elif len(gains) == 1:
        compared = f"{over} in one epoch; its noise is not known yet"
    elif are_level(fast, slow):
        compared = f"epochs overlap: no winner ({best} over {rival}: {spread})"
    else:
        compared = f"{over} ({spread})"
    num_steps = min(run.count() // _epochs_done(run) for run in ran)
    after, before = (summarize(run) for run in ran)
    said = [compared, too_short(num_steps)]
    padded, left = before["combined_waste"], after["combined_waste"]
    if padded is not None and max(padded, left or 0.0) < 0.05:
        said.append(f"{rival} pads {padded:.1%}: little to gain here")
    elif padded is not None and left is not None and round(100 * padded) != round(100 * left):
        said.append(f"padding {100 * padded:.0f} → {100 * left:.0f} %")
    counted = all(run.latest("step").get("memory_source") != PROCESS_RSS for run in ran)
    if counted and before["peak_bytes"] and after["peak_bytes"]:
        more = 100 * (after["peak_bytes"] / before["peak_bytes"] - 1)
        said.append("same peak memory" if abs(more) < 2 else f"peak memory {more:+.0f} %")
    return "; ".join(filter(None, said))


def base_of(names: Collection[str]) -> str:
    """The run that others are compared with: `random`, else the first."""
    return "random" if "random" in names else next(iter(names))


def too_short(num_steps: int) -> str:
    """Says that an epoch of so few steps is too short to judge speed; empty if it is not."""
    return f"an epoch of {num_steps} steps is too short to judge speed" if num_steps < FEW_STEPS else ""


def are_level(ours: Sequence[float] | NDArray[Any], theirs: Sequence[float] | NDArray[Any]) -> bool:
    """Whether the samples/s of their epochs do not rank two runs.

    They rank them if the ranges do not overlap; or if one run was over 5 % faster in every pair of epochs, first with
    first, as alternating epochs are when the whole machine is slow for one pair.
    """
    if min(ours) > max(theirs) or min(theirs) > max(ours):
        return False
    ratios = [one / other for one, other in zip(ours, theirs, strict=False)]
    return min(ratios) <= FASTER and max(ratios) >= 1 / FASTER


def _of_epochs(run: RunState, rank: int = 0) -> NDArray[Any]:
    """(3, E): `_PER_SECOND` over the seconds of each finished epoch, without its first steps."""
    epochs, *_ = columns = run.rows(("epoch", "step_s", *_PER_SECOND), "step", rank)
    known = np.argsort(epochs, kind="stable")[: np.isfinite(epochs).sum()]  # unknown ones come last
    finished = np.split(known, np.flatnonzero(np.diff(epochs[known], prepend=-1.0)))[1:][: _epochs_done(run)]
    sums = [columns[1:, after_warmup(rows)].sum(axis=1) for rows in finished]
    seconds, *amounts = np.reshape(sums, (-1, 1 + len(_PER_SECOND))).T
    return np.array(amounts) / seconds


def draw_runs(runs: Mapping[str, RunState], pale: Iterable[str] = ()) -> Figure:
    """Runs overlaid: loss, padded tokens and throughput of each step against samples seen, and memory.

    Loss and throughput are pale behind their moving averages, weighted by samples and by seconds. Memory is
    the predicted peak of each step if known, else the memory in use over time.

    Args:
        pale: names of runs to draw pale, as a reference.
    """
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    loss, tokens, _, memory = figure.subplots(1, 4)
    priced = any("predicted_bytes" in run.keys("step") for run in runs.values())
    for name, colour in colours_of(runs).items():
        dashes = ("-", "--", ":", "-.")[[line.get_color() for line in tokens.lines].count(colour) % 4]
        style: Any = {"color": colour, "ls": dashes, "lw": 1, "alpha": 0.25 if name in pale else 1}
        style["label"] = as_label(name)
        run = runs[name]
        keys = ("num_samples", *_PADDED, "loss", "samples_per_s", "step_s", "predicted_bytes")
        batch, texts, images, losses, speeds, step_s, predicted = run.done(keys)
        if not priced and "memory_bytes" in run.keys("device"):
            seconds = run.column("time_s", "device")
            memory.plot(seconds - seconds[0], run.column("memory_bytes", "device") / 2**20, **style)
        columns: Any = (losses, texts + images, speeds, predicted / 2**20)
        every = 1 + len(batch) // _DRAWN
        seen = batch.cumsum()[::every]
        for axis, column, weights in zip(figure.axes, columns, (batch, None, step_s, None), strict=True):
            if weights is not None:
                # a line added as an artist does not change the limits of its axis
                axis.add_artist(Line2D(seen, column[::every], color=colour, lw=0.5, alpha=0.15))
                sums = pd.DataFrame({"value": column * weights, "weight": weights * np.isfinite(column)})
                means = sums.fillna(0.0).ewm(span=1 + len(column) / 20).mean()  # over a twentieth of the run
                column = means["value"] / means["weight"]
            if np.isfinite(column).any():
                axis.plot(seen, np.fmax.reduceat(np.array(column), range(0, len(column), every)), **style)
    for limit in {run.latest("step").get("limit_bytes", 0) for run in runs.values() if priced} - {0}:
        memory.axhline(limit / 2**20, color="grey", lw=1, ls="--")
    sources = {str(run.latest("device").get("memory_source", "")) for run in runs.values()} - {""}
    held = f"memory, {' and '.join(sorted(sources)) or 'no reading yet'}"
    peak = "predicted peak (-- limit)" if priced else held
    titles = ("training loss", "padded tokens of a step", "samples/s", peak)
    for axis, title in zip(figure.axes, titles, strict=True):
        axis.set(title=title, xlabel="s" if axis is memory and not priced else "samples")
        axis.locator_params(axis="x", nbins=5)
        axis.spines[["top", "right"]].set_visible(False)
    memory.set_ylabel("MiB")
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, for a person.

    >>> duration(59.7), duration(3725), duration(None)
    ('1:00', '1:02:05', '-')
    """
    if seconds is None or not isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _planned_and_done(run: RunState) -> tuple[float, float]:
    """Cost of the whole run and of the steps done; in steps if no cost is known, NaN if neither is."""
    begun, start = run.event("start"), run.latest("start")
    if begun is not None and start.get("planned_cost"):
        steps, costs = run.done(("step", "predicted_cost"))
        costs = np.nan_to_num(costs)
        before = costs[steps <= begun.step].sum()  # done by the run that this one resumes
        return start["planned_cost"] + float(before), float(costs.sum())
    step = run.event("step")
    return start.get("num_steps") or nan, 0.0 if step is None else step.step


def _speed(run: RunState) -> float:
    """Cost (or steps) per second over the recent steps; NaN before the first."""
    num_steps = run.count()
    first = max(min(WARMUP_STEPS, num_steps - 1), num_steps - _RECENT_STEPS, 0)
    seconds = run.column_or_nan("step_s", start=first)
    by_cost = bool(run.latest("start").get("planned_cost"))
    done = np.nansum(run.column_or_nan("predicted_cost", start=first)) if by_cost else len(seconds)
    total_s = seconds.sum()
    return float(done / total_s) if total_s > 0 and 0 < done < inf else nan


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 and isfinite(part) else None
