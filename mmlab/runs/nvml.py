"""What NVIDIA's driver tells of one GPU, through NVML: memory, use, power, temperature, clocks, PCIe traffic.

Whatever the driver refuses is left out, with the reason: laptops have no power limit, containers hide other processes,
virtual GPUs have no clocks. A reading that the device does not support is not asked for again.

Costs: about 1 ms of CPU time a reading, and 40 ms of waiting, because the driver counts PCIe traffic for 20 ms each
way: call it in a thread of its own, never in the training loop. Needs the driver's library, not torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

KIB = 1024
_REASONS = {  # bits of nvmlDeviceGetCurrentClocksEventReasons
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
    0x100: "display clocks",
}
_IDLE = 0x1


class Gpu:
    """One GPU by its UUID. Use from one thread; close it.

    Args:
        nvml: the driver's bindings; `pynvml` unless given.

    Raises:
        Exception: whatever the driver says when it cannot be opened, or has no such GPU.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
        self._nvml = nvml
        try:
            # by UUID: NVML counts every GPU of the machine, torch those that CUDA_VISIBLE_DEVICES leaves
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            nvml.nvmlShutdown()
            raise
        self._unsupported: dict[str, str] = {}  # name of the reading -> why

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.nvmlShutdown()

    def memory(self) -> tuple[int, int]:
        """Bytes in use by everybody, and bytes that there are."""
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return info.used, info.total

    def utilization(self) -> float:
        """Share of the time since the driver's last sample in which a kernel ran."""
        return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100

    def details(self, process_id: int) -> tuple[dict[str, Any], list[str]]:
        """Further values of a `device` event, and why others are missing.

        Args:
            process_id: whose share of memory and use to tell.
        """
        raw: dict[str, Any] = {}
        for name, read in _RAW.items():
            if name in self._unsupported:
                continue
            try:
                raw[name] = read(self._nvml, self._handle)
            except (
                Exception
            ) as error:  # whatever the driver says: the reading is left out and the reason kept
                code = getattr(error, "value", None)
                if code == self._nvml.NVML_ERROR_NOT_FOUND:  # no process has been sampled yet
                    continue
                reason = (
                    f"no {name.replace('_', ' ')} from NVML: {type(error).__name__}: {error}".splitlines()[0]
                )
                if code == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    self._unsupported[name] = reason
                else:
                    raw[f"{name}_failed"] = reason
        failed = [raw.pop(name) for name in list(raw) if name.endswith("_failed")]
        return details_of(raw, process_id), [*self._unsupported.values(), *failed]


_RAW: Mapping[str, Callable[[Any, Any], Any]] = {
    "memory_use": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "power": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu),
    "power_limit": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
    "temperature": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_clock": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "throttling": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    "pcie_sent": lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES),
    "pcie_received": lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES),
    "processes": lambda nvml, gpu: [
        (process.pid, process.usedGpuMemory) for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    ],
    "process_use": lambda nvml, gpu: [
        (sample.pid, sample.timeStamp, sample.smUtil)
        for sample in nvml.nvmlDeviceGetProcessUtilization(gpu, 0)
    ],
}


def details_of(raw: Mapping[str, Any], process_id: int) -> dict[str, Any]:
    """The driver's raw answers as values of an event, in the units of the key table; what is missing stays missing.

    >>> details_of({"power": 312_500, "throttling": 0x24, "processes": [(7, 2**30), (8, None)]}, process_id=7)
    {'power_w': 312.5, 'throttle_reasons': 'power cap, temperature', 'process_bytes': 1073741824}
    """
    found: dict[str, Any] = {}
    scaled = {
        "memory_use": ("memory_utilization_ratio", 0.01),
        "power": ("power_w", 0.001),
        "power_limit": ("power_limit_w", 0.001),
        "temperature": ("temperature_c", 1),
        "sm_clock": ("sm_clock_mhz", 1),
        "memory_clock": ("memory_clock_mhz", 1),
        "pcie_sent": ("pcie_sent_bytes_per_s", KIB),
        "pcie_received": ("pcie_received_bytes_per_s", KIB),
    }
    for name, (key, factor) in scaled.items():
        if name in raw:
            found[key] = raw[name] * factor
    if "throttling" in raw:
        found["throttle_reasons"] = throttle_reasons(raw["throttling"])
    mine = [used for process, used in raw.get("processes", ()) if process == process_id and used is not None]
    if mine:
        found["process_bytes"] = mine[0]
    samples = [(at, use) for process, at, use in raw.get("process_use", ()) if process == process_id]
    if samples:
        found["process_utilization_ratio"] = max(samples)[1] / 100
    return found


def throttle_reasons(bits: int) -> str:
    """Why the clocks are below what they could be, for a person; empty when nothing holds them back.

    >>> throttle_reasons(0x1), throttle_reasons(0x60), throttle_reasons(0x1000)
    ('', 'temperature, hardware temperature', 'reason 0x1000')
    """
    bits &= ~_IDLE
    names = [name for bit, name in _REASONS.items() if bits & bit]
    unknown = bits & ~sum(_REASONS)
    return ", ".join(names + ([f"reason {unknown:#x}"] if unknown else []))
