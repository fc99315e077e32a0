"""Reads how much memory is in use and how busy the device is, and counts the live bytes of tensors.

`DeviceMeter` uses the best source available and names it: for an NVIDIA GPU NVML (for AMD, Apple and Intel
devices torch's own figures), then torch's allocator; for a CPU, or when these fail, this process's resident
memory and CPU time. A source that fails (no driver, no permission, a GPU that disappears) is replaced by the
next one for that reading, and the reading keeps the reason. A process's figures are never called a GPU's.
`LiveBytes` counts the bytes of live tensors exactly, on any device: so a step's peak can be measured on a
CPU, where no allocator keeps statistics.

Costs: a reading takes 0.05 ms on a CPU; with NVML about 1 ms of CPU time: do it in the
monitor's thread, never in the training loop. `LiveBytes` adds about 12 us to each operation and never
synchronises.
Does not: count memory of worker processes, nor (`LiveBytes`) scratch memory inside one operation.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmlab.errors import first_line
from mmlab.machine import num_usable_cores, process_rss_bytes, total_memory_bytes
from mmlab.runs.events import PROCESS_RSS
from mmlab.runs.nvml import Gpu

Held = torch.Tensor | torch.nn.Module | torch.optim.Optimizer

_START = (time.perf_counter(), time.process_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """Memory and utilisation of a device at one moment, each with its source."""

    device: str
    memory_bytes: int  # in use: by all processes (NVML), by this process (the other sources)
    memory_total_bytes: int
    memory_source: str  # "NVML", "torch accelerator", "torch allocator", "process RSS"
    # 0-1: share of time that a kernel ran (NVML), share of this process's cores (process CPU)
    utilization_ratio: float
    utilization_source: str  # "NVML", "torch", "process CPU"
    allocated_bytes: int | None  # by live tensors, as torch's allocator counts; None on a CPU
    reserved_bytes: int | None  # taken from the device by torch's allocator; None on a CPU
    # power, clocks, temperature, ...: keys of a `device` event, where NVML gives them
    details: Mapping[str, Any]
    notes: tuple[str, ...]  # why a better source was not used


def read_device(device: str | torch.device) -> DeviceReading:
    """One reading; the process's CPU share covers the time since this module was imported.

    >>> reading = read_device("cpu")
    >>> reading.memory_source, reading.utilization_source, reading.notes
    ('process RSS', 'process CPU', ())

    Raises:
        RuntimeError: torch knows no such device. One that is not there is read as its process, and the notes say so.
    """
    with DeviceMeter(device) as meter:
        meter.since = _START
        return meter.read()


class DeviceMeter(AbstractContextManager["DeviceMeter"]):
    """Reads one device repeatedly; the process's CPU share covers the time since the last reading.

    Use from one thread. For a CUDA device, creating it opens NVML and initialises CUDA in this process. Close
    it, or use it as a context manager.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.since = (time.perf_counter(), time.process_time())  # of the last reading: wall clock, CPU time
        self._gpu: Any = None
        self._no_nvml = ""
        if self.device.type == "cuda" and torch.version.hip is None:
            try:
                self._gpu = Gpu(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            except Exception as error:  # any driver error: every reading has it as a note
                self._no_nvml = first_line(error)

    def read(self) -> DeviceReading:
        """Read memory and utilisation now, each from the first source that works."""
        notes: list[str] = []
        memory: dict[str, Callable[[], tuple[int, int]]] = {}
        use: dict[str, Callable[[], float]] = {}
        allocator: dict[str, Any] = {}
        if self.device.type == "cuda" and torch.version.hip is None:
            memory["NVML"] = lambda: self._nvml().memory()
            use["NVML"] = lambda: self._nvml().utilization()
        elif self.device.type != "cpu":
            memory["torch accelerator"] = self._accelerator_memory
            use["torch"] = lambda: torch.cuda.utilization(self.device) / 100
        if self.device.type == "cuda":
            memory["torch allocator"] = self._torch_memory
            allocator = torch.cuda.memory_stats(self.device)  # empty before CUDA is used
        memory[PROCESS_RSS] = lambda: (process_rss_bytes(), total_memory_bytes())
        use["process CPU"] = self._process_use
        (memory_bytes, total_bytes), memory_source = _first(memory, "memory", notes)
        utilization_ratio, utilization_source = _first(use, "utilization", notes)
        details: dict[str, Any] = {}
        if memory_source == "NVML":
            details, missing = self._gpu.details(os.getpid())
            notes += missing
        return DeviceReading(
            device=str(self.device),
            memory_bytes=memory_bytes,
            memory_total_bytes=total_bytes,
            memory_source=memory_source,
            utilization_ratio=utilization_ratio,
            utilization_source=utilization_source,
            allocated_bytes=allocator.get("allocated_bytes.all.current"),
            reserved_bytes=allocator.get("reserved_bytes.all.current"),
            details=details,
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Release NVML."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _nvml(self) -> Any:
        if self._gpu is None:
            raise RuntimeError(self._no_nvml)
        return self._gpu

    def _torch_memory(self) -> tuple[int, int]:
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_reserved(self.device), total_bytes

    def _accelerator_memory(self) -> tuple[int, int]:
        """Used and total bytes of AMD, Apple and Intel devices, where this torch supports it."""
        free_bytes, total_bytes = torch.accelerator.get_memory_info(self.device)
        return total_bytes - free_bytes, total_bytes

    def _process_use(self) -> float:
        now = (time.perf_counter(), time.process_time())
        wall_s, cpu_s = now[0] - self.since[0], now[1] - self.since[1]
        self.since = now
        return min(1.0, cpu_s / (max(wall_s, 1e-9) * num_usable_cores()))


def step_memory(device: torch.device, live: LiveBytes | None = None) -> dict[str, Any]:
    """Memory values of a `step` event: peak since its reset, and its source (docs/internals/memory.md)."""
    rss_bytes = process_rss_bytes()
    if live is not None:
        return {"rss_bytes": rss_bytes, "peak_bytes": live.peak_bytes, "memory_source": "live tensors"}
    if device.type != "cuda":
        return {"rss_bytes": rss_bytes, "peak_bytes": rss_bytes, "memory_source": PROCESS_RSS}
    # one query: each of torch's shortcuts would make its own
    found = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = found["allocated_bytes"]["all"]
    return {
        "rss_bytes": rss_bytes,
        "peak_bytes": allocated["peak"],
        "allocated_bytes": allocated["current"],
        "reserved_bytes": found["reserved_bytes"]["all"]["current"],
        "memory_source": "torch allocator",
    }


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors, exactly: each storage once, from when it is first seen until it is freed.

    A storage is first seen when an operation inside the context takes or returns it, or earlier by `add`. It works
    through forward, backward and the optimizer, and notices what is freed after the context has ended. Tensors without
    a storage (sparse ones) and scratch memory inside one operation are not counted.

    >>> a = torch.zeros(100)
    >>> with LiveBytes() as live:
    ...     _ = live.add(a)
    ...     b = a + 1
    ...     c = b[:10]
    ...     del b, c
    >>> live.current_bytes, live.peak_bytes
    (400, 800)

    Args:
        granule_bytes: each storage counts as a multiple of this, as an allocator rounds; 1 or more.
        device_type: count tensors of this type of device only, "cuda" or "cpu"; None counts all.
    """

    def __init__(self, *, granule_bytes: int = 1, device_type: str | None = None) -> None:
        super().__init__()
        self.granule_bytes, self.device_type = granule_bytes, device_type
        self.current_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # bytes of each live storage, by its id
        self._refs: dict[int, weakref.ref] = {}
        self._lock = threading.RLock()  # tensors are freed in any thread, in the middle of anything

    def add(self, *things: Held) -> LiveBytes:
        """Count tensors, a module's parameters, buffers and gradients, an optimizer's state, from now on."""
        for thing in things:
            self._see(_held_by(thing))
        return self

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._see(tensors_in(args))
        out = func(*args, **kwargs)
        self._see(tensors_in((out, *kwargs.values())))
        return out

    def _see(self, tensors: Iterable[torch.Tensor]) -> None:
        with self._lock:
            for tensor in tensors:
                if type(tensor) not in _PLAIN:  # of a DTensor, the part of this rank
                    tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor.layout != torch.strided:
                    continue
                storage = tensor.untyped_storage()
                key = id(storage)  # torch gives one object for a storage for as long as it lives
                if key not in self._sizes:
                    kind = tensor.device.type
                    if kind == "meta" or self.device_type not in (None, kind):
                        continue
                    self._refs[key] = weakref.ref(storage, partial(self._forget, key))
                num_bytes = -(-storage.nbytes() // self.granule_bytes) * self.granule_bytes
                self.current_bytes += num_bytes - self._sizes.get(key, 0)  # a storage may have been resized
                self._sizes[key] = num_bytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: int, _: weakref.ref) -> None:
        with self._lock:
            self.current_bytes -= self._sizes.pop(key)
            del self._refs[key]


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in lists and tuples of them at any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _first(sources: dict[str, Callable[[], Any]], what: str, notes: list[str]) -> tuple[Any, str]:
    """Value and name of the first source that works; `notes` gets others' errors. The last must not fail."""
    *candidates, last = sources
    for name in candidates:
        try:
            return sources[name](), name
        except Exception as error:  # any driver error: it is noted and the next source takes over
            notes.append(f"{what} not from {name}: {first_line(error)}")
    return sources[last](), last


def _held_by(thing: Held) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.nn.Module):
        yield from tensors_in([parameter, parameter.grad] for parameter in thing.parameters())
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors_in([*state.values()] for state in thing.state.values())
    else:
        yield thing
