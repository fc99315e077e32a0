"""The data that a page gets about a run: rows of float32 columns, facts, and notes for a person."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.machine import GIB
from mmlab.runs.events import PROCESS_RSS, RunEvent
from mmlab.runs.figures import to_bytes
from mmlab.runs.folders import is_aside
from mmlab.runs.follow import ACTIVE, RunState
from mmlab.runs.summaries import draw_runs, duration, progress_of, summarize, verdict_of

TRACKS: Mapping[str, tuple[str, ...]] = {  # kinds of event that are drawn, and the columns of each
    "step": (
        "step", "time_s", "num_samples", "padded_tokens", "padded_patches", "loss", "samples_per_s", "step_s",
        "data_wait_s", "combined_waste", "peak_bytes", "predicted_bytes", "limit_bytes",
        "allocated_bytes", "reserved_bytes", "lr",
    ),
    "device": (
        "time_s", "memory_bytes", "memory_total_bytes", "allocated_bytes", "reserved_bytes", "utilization_ratio",
    ),
    "eval": ("step", "time_s", "loss"),
}  # fmt: skip


def columns_of(run: RunState, track: str, rank: int, start: int, stop: int) -> NDArray[np.float32]:
    """(C, N) rows of a track; seconds count from the run's first event, so that float32 is precise enough."""
    columns = run.rows(TRACKS[track], track, rank, start, stop)
    if track == "device":
        columns[TRACKS[track].index("utilization_ratio")] = run.utilization(rank, start, stop)
    columns[TRACKS[track].index("time_s")] -= run.first_s
    return columns.astype(np.float32)


def facts_of(run: RunState) -> dict[str, Any]:
    """What is shown of a run beside its numbers; `pauses` are pairs of seconds, the second None until it ends."""
    step, device = run.latest("step"), run.latest("device")
    return {
        "id": run.id,
        "name": run.name,
        "ranks": [rank for rank in run.ranks() if any(run.count(track, rank) for track in TRACKS)],
        "status": run.status,
        "pauses": [[a - run.first_s, b - run.first_s if isfinite(b) else None] for a, b in run.pauses()],
        "memory_source": device.get("memory_source"),
        "peak_source": step.get("memory_source"),
        "utilization_source": device.get("utilization_source"),
    }


def earlier_of(runs: Sequence[RunState], begins: bool = False) -> list[RunState]:
    """The runs that were moved aside, drawn pale as a reference, if others are shown as well or a new one begins."""
    aside = [run for run in runs if is_aside(run.name.partition("/")[0])]
    return aside if begins or len(aside) < len(runs) else []


_GAUGED = ("utilization_ratio", "memory_bytes", "memory_total_bytes")


def tile_of(run: RunState, earlier: Iterable[RunState] = ()) -> dict[str, Any]:
    """A run's figures in words, over all steps of its first rank; gauges for several ranks and for GPUs.

    Args:
        earlier: reference runs; its speed is compared with those of the same scheduler.
    """
    found = summarize(run)
    speed, counted = found["samples_per_s"], found["peak_steps"]
    busy = run.utilization()
    busy = busy[np.isfinite(busy)]
    on_gpu = run.latest("device").get("utilization_source") == "NVML"
    left_s = progress_of([run]).left_s if run.status in ACTIVE else nan
    of_rank = ", rank 0" if len(run.ranks()) > 1 else ""
    figures = {
        f"samples/s{of_rank}": speed and f"{speed:.4g}",
        "waste": _per_cent(found["combined_waste"]),
        **_peak_of(run, found["peak_bytes"]),
        "peak counted in": 0 < counted < found["steps"] and f"{counted} of {found['steps']} steps",
        "GPU busy" if on_gpu else "CPU busy": _per_cent(busy.mean() if len(busy) else None),
        "waiting": _per_cent(found["data_wait_ratio"]),
        "left": duration(left_s) if isfinite(left_s) else None,
    }
    for before in earlier:
        speed_before = summarize(before)["samples_per_s"]
        if Path(run.name).name == Path(before.name).name and speed and speed_before:
            figures[f"over {Path(before.name).parent}"] = f"{100 * (speed / speed_before - 1):+z.0f} %"
    gauges = [
        [f"{now['device']}, rank {rank}", *(now[key] for key in _GAUGED)]
        for rank in run.ranks()
        if (now := run.latest("device", rank)).keys() >= set(_GAUGED)
        and (len(run.ranks()) > 1 or now.get("memory_source") != PROCESS_RSS)
    ]
    return {"id": run.id, "figures": [item for item in figures.items() if item[1]], "gauges": gauges}


def _peak_of(run: RunState, peak: float | None) -> dict[str, str]:
    """The peak memory, beside its limit where the two can be compared; nothing without a peak."""
    step, device = run.latest("step"), run.latest("device")
    if not peak:
        return {}
    if step.get("memory_source") == PROCESS_RSS:  # limits are for tensors, not for the whole process
        return {"process": _mib(peak)}
    limit = step.get("limit_bytes")
    if limit is None and device.get("memory_source") not in (None, PROCESS_RSS):
        limit = device.get("memory_total_bytes")
    return {"peak": _mib(peak)} if limit is None else {"peak / limit": _mib(peak, limit)}


def headlines_of(runs: Sequence[RunState], begins: bool = False) -> dict[str, Any]:
    """Every run's tile, and the verdict on the runs; runs that were moved aside are only a reference."""
    earlier = earlier_of(runs, begins)
    return {
        "tiles": [tile_of(run, earlier if run not in earlier else ()) for run in runs if run.count()],
        "verdict": verdict_of(run for run in runs if run not in earlier),
    }


def saved_view(runs: list[RunState]) -> str:
    """Table and picture of runs as HTML, for a notebook that is opened without its kernel."""
    if not (runs := [run for run in runs if run.count()]):
        return "No run had ended when this was saved; run the cell to see them live."
    import pandas as pd

    found = headlines_of(runs)
    named = zip(runs, found["tiles"], strict=True)
    table = pd.DataFrame([{"": run.name, **dict(tile["figures"])} for run, tile in named])
    shown = table.style.hide().format(escape="html", na_rep="")
    drawn = draw_runs({run.name: run for run in runs}, [run.name for run in earlier_of(runs)])
    picture = base64.b64encode(to_bytes(drawn, dpi=72)).decode()
    return (
        f"<p>{html.escape(found['verdict'])}</p>{shown.to_html()}"
        f'<img alt="Loss, cost, throughput and memory of each run" src="data:image/png;base64,{picture}">'
    )


def _per_cent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{100 * ratio:.0f} %"


def _mib(*sizes: float) -> str:
    unit, name = (GIB, "GiB") if max(sizes) >= GIB else (2**20, "MiB")
    return f"{' / '.join(f'{size / unit:.3g}' for size in sizes)} {name}"


def note_of(run: RunState, event: RunEvent) -> dict[str, Any]:
    """An event that a person should see, as the page shows it."""
    said = {"out_of_memory": "operation", "decision": "reason"}.get(event.kind, "message")
    return {
        "run": run.name,
        "kind": event.kind,
        "step": event.step,
        "time_s": event.time_s,
        "text": str(event.values.get(said, ""))[:400],
        "traceback": str(event.values.get("traceback") or "")[-8000:],
    }
