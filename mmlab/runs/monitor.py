"""Samples the device during a run, in a thread of the training process that never blocks the training loop.

Costs: a sample takes 0.1 ms of CPU time, about 1 ms with NVML; each `device` event carries the
CPU time that the thread has used.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from mmlab.errors import check_numbers
from mmlab.machine import process_rss_bytes
from mmlab.runs.events import RunEvent
from mmlab.runs.meters import DeviceMeter


class DeviceMonitor:
    """Emit a `device` event at once, every `interval_s`, and at the end, from a thread of its own.

    A context manager. The device's readings (NVML included) are taken in that thread only, and `emit` is called from
    it: it must be safe to call from any thread, as `RunLog.emit` is. When a better source of readings fails, one
    `warning` event says so. If the thread itself fails, as with a device that torch does not know, a `warning` event
    carries the traceback, sampling ends, the run continues, and leaving the context issues a RuntimeWarning.

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
        check_numbers({"interval_s": interval_s})
        self.error: Exception | None = None  # that ended the thread early
        self._emit, self._device, self._interval_s, self._rank = emit, device, interval_s, rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmlab-device-monitor", daemon=True)

    def __enter__(self) -> DeviceMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            warnings.warn("the device monitor did not stop: a reading hangs", RuntimeWarning, stacklevel=2)
        if self.error is not None:
            warnings.warn(f"the device monitor failed: {self.error!r}", RuntimeWarning, stacklevel=2)

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # nothing else would show a thread's error than __exit__ and the event
            self.error = error
            with suppress(Exception):  # if `emit` itself fails, only __exit__ shows it
                message = f"the device monitor failed, sampling has ended: {error!r}"
                self._warn(message=message, traceback=traceback.format_exc())

    def _sample_until_stopped(self) -> None:
        told: set[str] = set()  # each note is reported once, however often it comes and goes
        with DeviceMeter(self._device) as meter:
            # else the first reading would cover this thread's start alone
            self._stop.wait(min(0.05, self._interval_s))
            while True:
                started = time.perf_counter()
                values = asdict(meter.read())
                notes, details = values.pop("notes"), values.pop("details")
                if news := [note for note in notes if note not in told]:
                    told |= set(news)
                    self._warn(message="; ".join(news))
                values |= {**details, "rss_bytes": process_rss_bytes(), "monitor_cpu_s": time.thread_time()}
                values["reading_s"] = time.perf_counter() - started
                self._emit(RunEvent.now("device", -1, values, self._rank))
                if self._stop.is_set():
                    return
                self._stop.wait(max(0.0, self._interval_s - (time.perf_counter() - started)))

    def _warn(self, **values: Any) -> None:
        self._emit(RunEvent.now("warning", -1, {"source": "monitor", **values}, self._rank))
