"""Watch a run: a thread that samples the device, and a state that folds a run's events into what views need.

`DeviceMonitor` writes (in the training process), `RunState` reads (in any process, from the run's files). Neither ever
holds up the training loop.

Costs: a sample takes 0.1 ms of CPU time, about 1 ms with NVML (and 40 ms of waiting); each `device` event carries the
CPU time that the thread has used. `RunState` keeps 8 bytes a number in memory: about 20 MB for 100,000 steps.
Does not: draw. Opening a run needs no torch.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import OptionError, unknown_name
from mmlab.machine import process_rss_bytes
from mmlab.runs.events import EVENT_FILES, RunEvent, read_events

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class DeviceMonitor:
    """Emit a `device` event at once, every `interval_s`, and at the end, from a thread of its own.

    A context manager. The device's readings (NVML included) are taken in that thread only, and `emit` is called from
    it: it must be safe to call from any thread, as `RunLog.emit` is. When a better source of readings fails, one
    `warning` event says so. If the thread itself fails, a `warning` event carries the traceback, sampling ends,
    the run goes on, and leaving the context issues a RuntimeWarning.

    Args:
        emit: takes each event.
        device: torch device to read.
        interval_s: seconds from one sample to the next; above 0.

    Raises:
        OptionError: `interval_s` is not above 0.
    """

    def __init__(
        self,
        emit: Callable[[RunEvent], object],
        *,
        device: str | torch.device,
        interval_s: float = 0.5,
        rank: int = 0,
    ) -> None:
        if not interval_s > 0:
            raise OptionError(f"interval_s: expected seconds above 0, found {interval_s}")
        from mmlab.runs.meters import DeviceMeter

        self.error: Exception | None = None  # what ended the thread before its time
        self._emit, self._interval_s, self._rank = emit, interval_s, rank
        self._make_meter = partial(DeviceMeter, device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmlab-device-monitor", daemon=True)

    def __enter__(self) -> DeviceMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            warnings.warn("the device monitor hangs in a reading of the device", RuntimeWarning, stacklevel=2)
        if self.error is not None:
            warnings.warn(f"the device monitor failed: {self.error!r}", RuntimeWarning, stacklevel=2)

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # a thread has nobody to raise to: __exit__ and the event show it
            self.error = error
            with suppress(Exception):  # when `emit` itself is what fails, __exit__ is left to show it
                self._warn(
                    f"the device monitor failed, sampling has ended: {error!r}",
                    traceback=traceback.format_exc(),
                )

    def _sample_until_stopped(self) -> None:
        told: set[str] = set()  # each note is told once, however often it comes and goes
        failing = False
        with self._make_meter() as meter:
            while True:
                started = time.perf_counter()
                reading = meter.read()
                if news := [note for note in reading.notes if note not in told]:
                    told |= set(news)
                    self._warn("; ".join(news))
                elif failing and not reading.notes:
                    self._warn("every source of device readings answers again")
                failing = bool(reading.notes)
                values = {
                    "device": reading.device,
                    "memory_bytes": reading.memory_bytes,
                    "memory_total_bytes": reading.memory_total_bytes,
                    "memory_source": reading.memory_source,
                    "utilization_ratio": reading.utilization_ratio,
                    "utilization_source": reading.utilization_source,
                    "allocated_bytes": reading.allocated_bytes,
                    "reserved_bytes": reading.reserved_bytes,
                    **reading.details,
                    "rss_bytes": process_rss_bytes(),
                    "reading_s": time.perf_counter() - started,
                    "monitor_cpu_s": time.thread_time(),
                }
                self._emit(RunEvent.now("device", -1, values, self._rank))
                if self._stop.is_set():
                    return
                self._stop.wait(max(0.0, self._interval_s - (time.perf_counter() - started)))

    def _warn(self, message: str, **values: Any) -> None:
        self._emit(
            RunEvent.now("warning", -1, {"message": message, "source": "monitor", **values}, self._rank)
        )


class RunState:
    """A run as its event files tell it so far: the latest values, and a column of numbers for every key.

    Not thread-safe: use one for each view.

    >>> state = RunState()
    >>> state.fold([RunEvent("step", 1, 0, 10.0, {"loss": 2.5})])
    >>> state.fold([RunEvent("step", 2, 0, 10.5, {"loss": 2.0, "lr": 0.1})])
    >>> state.column("loss"), state.column("lr"), state.column("time_s")
    (array([2.5, 2. ]), array([nan, 0.1]), array([10. , 10.5]))
    >>> state.latest("step")["loss"], state.status
    (2.0, 'running')

    Args:
        folder: a run's folder; `refresh` reads what is new in it. It need not exist yet.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        # waiting, then running or paused, then the end event's status: done, stopped, failed
        self.status = "waiting"
        self.warnings: list[RunEvent] = []
        self.num_events = 0
        self._offsets: dict[Path, int] = {}
        self._latest: dict[tuple[str, int], RunEvent] = {}
        self._columns: dict[tuple[str, int], dict[str, array[float]]] = {}

    def refresh(self) -> int:
        """Fold what was written since the last call; returns the number of new events.

        Raises:
            DataError: a file was written anew, or holds a line that is not an event.
        """
        if self.folder is None:
            return 0
        num_before = self.num_events
        for path in sorted(self.folder.glob(EVENT_FILES)):
            events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            self.fold(events)
        return self.num_events - num_before

    def fold(self, events: Iterable[RunEvent]) -> None:
        """Take in events, in order."""
        for event in events:
            self.num_events += 1
            self._latest[event.kind, event.rank] = event
            self._append(event)
            if event.kind == "warning":
                self.warnings.append(event)
            if event.kind == "end":
                self.status = event.values["status"]
            elif event.kind == "pause":
                self.status = "paused"
            elif event.kind in ("start", "resume") or self.status == "waiting":
                self.status = "running"

    def event(self, kind: str, rank: int = 0) -> RunEvent | None:
        """The latest event of a kind, or None."""
        return self._latest.get((kind, rank))

    def latest(self, kind: str, rank: int = 0) -> dict[str, Any]:
        """The latest values of a kind of event; empty before the first."""
        event = self.event(kind, rank)
        return {} if event is None else dict(event.values)

    def ranks(self) -> list[int]:
        """The ranks that have written anything."""
        return sorted({rank for _, rank in self._latest})

    def keys(self, kind: str = "step", rank: int = 0) -> list[str]:
        """The keys that `column` has for a kind of event."""
        return list(self._columns.get((kind, rank), {}))

    def column(self, key: str, kind: str = "step", rank: int = 0, start: int = 0) -> NDArray[np.float64]:
        """A key's numbers, one for each event of a kind: NaN where an event lacks it. Also `step` and `time_s`.

        Args:
            start: number of events to leave out, for a view that has them already.

        Returns:
            (N - start,) a copy.

        Raises:
            OptionError: no event of this kind has the key, though there are some.
        """
        columns = self._columns.get((kind, rank), {})
        if not columns:
            return np.empty(0)
        if key not in columns:
            raise unknown_name(f"key of {kind} events", key, columns)
        return np.array(columns[key][start:])

    def _append(self, event: RunEvent) -> None:
        columns = self._columns.setdefault(
            (event.kind, event.rank), {"step": array("d"), "time_s": array("d")}
        )
        num_events = len(columns["step"])
        numbers = {key: float(value) for key, value in event.values.items() if isinstance(value, int | float)}
        numbers |= {"step": event.step, "time_s": event.time_s}
        for key in numbers.keys() - columns.keys():
            columns[key] = array("d", [nan]) * num_events
        for key, column in columns.items():
            column.append(numbers.get(key, nan))
