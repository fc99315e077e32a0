"""What a page is told of a run: rows of float32 columns, facts, and notes for a person."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.runs.events import RunEvent
from mmlab.runs.follow import RunState

TRACKS: Mapping[str, tuple[str, ...]] = {  # kinds of event that are drawn, and the columns of each
    "step": (
        "step", "time_s", "num_samples", "num_tokens", "height", "width", "loss", "samples_per_s", "step_s",
        "data_wait_s", "combined_waste", "peak_bytes", "predicted_bytes", "limit_bytes",
        "allocated_bytes", "reserved_bytes", "lr",
    ),
    "device": (
        "time_s", "memory_bytes", "memory_total_bytes", "allocated_bytes", "reserved_bytes", "utilization_ratio",
    ),
    "eval": ("step", "time_s", "loss"),
}  # fmt: skip


def columns_of(run: RunState, track: str, rank: int, start: int, stop: int) -> NDArray[np.float32]:
    """(C, N) rows of a track; seconds count from the run's first event, or float32 could not tell steps apart."""
    columns = run.rows(TRACKS[track], track, rank, start, stop)
    columns[TRACKS[track].index("time_s")] -= run.first_s
    return columns.astype(np.float32)


def facts_of(run: RunState) -> dict[str, Any]:
    """What is shown of a run beside its numbers."""
    start, step, device = (run.latest(kind) for kind in ("start", "step", "device"))
    return {
        "id": run.id,
        "name": run.name,
        "ranks": [rank for rank in run.ranks() if any(run.count(track, rank) for track in TRACKS)],
        "status": run.status,
        "first_s": run.first_s if isfinite(run.first_s) else None,
        "device": start.get("device") or device.get("device"),
        "memory_source": device.get("memory_source"),
        "peak_source": step.get("memory_source"),
        "utilization_source": device.get("utilization_source"),
    }


def note_of(run: RunState, event: RunEvent) -> dict[str, Any]:
    """What a person should see of a run."""
    said = {"out_of_memory": "operation", "decision": "reason"}.get(event.kind, "message")
    return {
        "run": run.name,
        "kind": event.kind,
        "step": event.step,
        "time_s": event.time_s,
        "text": str(event.values.get(said, ""))[:400],
        "traceback": str(event.values.get("traceback") or "")[-8000:],
    }
