"""The monitor samples beside training and shows its failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.machine import num_usable_cores
from mmlab.runs.events import RunEvent
from mmlab.runs.monitor import DeviceMonitor


class Events(list[RunEvent]):
    """Takes a monitor's events and waits for them."""

    def wait_for(self, number: int) -> None:
        wait_for(lambda: len(self) >= number)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "waited for a minute"
        time.sleep(0.005)


def test_it_samples_at_its_interval_first_at_once_and_last_at_the_end() -> None:
    events = Events()
    with DeviceMonitor(events.append, device="cpu", interval_s=0.1):
        events.wait_for(4)
        inside_s = time.time()
    assert {event.kind for event in events} == {"device"}
    assert events[0].values["memory_source"] == "process RSS"
    assert events[-1].time_s >= inside_s
    times_s = [event.time_s for event in events[:-1]]
    assert all(later - earlier > 0.05 for earlier, later in pairwise(times_s))


def test_the_first_use_is_not_that_of_the_monitor_itself() -> None:
    events = Events()
    with DeviceMonitor(events.append, device="cpu", interval_s=60):
        events.wait_for(1)  # this thread sleeps meanwhile
    assert events[0].values["utilization_ratio"] * num_usable_cores() < 0.5


def test_its_own_cost_is_in_its_events_and_small() -> None:
    events = Events()
    with DeviceMonitor(events.append, device="cpu", interval_s=0.02):
        events.wait_for(20)
    cpu_s = [event.values["monitor_cpu_s"] for event in events]
    assert cpu_s == sorted(cpu_s)
    assert 0 < cpu_s[-1] / len(events) < 0.002, "seconds of CPU time a sample"


def test_a_run_shorter_than_the_interval_still_ends_at_once() -> None:
    events: list[RunEvent] = []
    started = time.perf_counter()
    with DeviceMonitor(events.append, device="cpu", interval_s=60):
        pass
    assert time.perf_counter() - started < 5
    assert events


def test_no_reading_is_taken_in_the_training_thread() -> None:
    threads = set()

    def emit(event: RunEvent) -> None:
        threads.add(threading.current_thread().name)

    with DeviceMonitor(emit, device="cpu", interval_s=0.05):
        pass
    assert threads == {"mmlab-device-monitor"}
    assert "mmlab-device-monitor" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_better_source_that_fails_is_told_once() -> None:
    events = Events()
    with DeviceMonitor(events.append, device="cuda", interval_s=0.02):
        events.wait_for(6)
    told = [event.values["message"] for event in events if event.kind == "warning"]
    assert len(told) == 1
    assert "memory not from NVML" in told[0]
    device = [event for event in events if event.kind == "device"]
    assert len(device) > 3
    assert {event.values["memory_source"] for event in device} == {"process RSS"}


def test_a_failure_in_the_thread_is_shown_and_the_run_goes_on() -> None:
    events: list[RunEvent] = []

    def emit(event: RunEvent) -> None:
        if event.kind == "device" and len(events) == 2:
            raise OSError("disk full")
        events.append(event)

    monitor = DeviceMonitor(emit, device="cpu", interval_s=0.02)
    with pytest.warns(RuntimeWarning, match="the device monitor failed: OSError"), monitor:
        wait_for(lambda: monitor.error is not None)
    assert [event.kind for event in events] == ["device", "device", "warning"]
    assert "disk full" in events[-1].values["traceback"]
    assert isinstance(monitor.error, OSError)


def test_a_log_that_can_no_longer_be_written_is_shown_at_the_end() -> None:
    def emit(event: RunEvent) -> None:
        raise OSError("disk full")

    with (
        pytest.warns(RuntimeWarning, match="the device monitor failed: OSError"),
        DeviceMonitor(emit, device="cpu"),
    ):
        pass


def test_an_interval_must_be_positive() -> None:
    for interval_s, message in ((0, "above 0, found 0"), ("a", "a number, found 'a'")):
        with pytest.raises(OptionError, match=f"interval_s must be {message}"):
            DeviceMonitor(print, device="cpu", interval_s=interval_s)  # type: ignore[arg-type]
