"""Readings of one NVIDIA GPU through NVML: memory, utilisation, power, temperature, clocks, PCIe traffic.

A value that the driver refuses is left out, and the reason kept: laptops have no power limit, containers hide
other processes, virtual GPUs have no clocks. A value that the device does not support is not requested again.

Costs: about 1 ms of CPU time a reading, and 40 ms of waiting, because the driver counts PCIe traffic for 20 ms each
way: call it in a thread of its own, never in the training loop. Needs the driver's library, not torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mmlab.errors import first_line

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
        Exception: the driver's own error, if it cannot be opened or has no such GPU.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
        self._nvml = nvml
        try:
            # by UUID: NVML numbers every GPU of the machine, torch only those in CUDA_VISIBLE_DEVICES
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            nvml.nvmlShutdown()
            raise
        self._unsupported: dict[str, str] = {}  # key -> why it is not requested again

    def close(self) -> None:
        """Release the driver."""
        self._nvml.nvmlShutdown()

    def memory(self) -> tuple[int, int]:
        """Bytes in use by all processes, and bytes in total."""
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return info.used, info.total

    def utilization(self) -> float:
        """Share of the time since the driver's last sample in which a kernel ran."""
        return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100

    def details(self, process_id: int) -> tuple[dict[str, Any], list[str]]:
        """Further values of a `device` event, and why others are missing.

        Args:
            process_id: the process whose share of memory and utilisation to report.
        """
        found: dict[str, Any] = {}
        failed = []
        for key, read in _DETAILS.items():
            if key in self._unsupported:
                continue
            try:
                value = read(self._nvml, self._handle, process_id)
            except Exception as error:  # any driver error: the value is left out and the reason kept
                code = getattr(error, "value", None)
                reason = f"no {key} from NVML: {first_line(error)}"
                if code == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    self._unsupported[key] = reason
                elif code != self._nvml.NVML_ERROR_NOT_FOUND:
                    # NOT_FOUND only means that no process has been sampled yet
                    failed.append(reason)
                continue
            if value is not None:
                found[key] = value
        return found, [*self._unsupported.values(), *failed]


def throttle_reasons(bits: int) -> str:
    """Why the clocks are reduced, in words; empty if they are not.

    >>> throttle_reasons(0x1), throttle_reasons(0x60), throttle_reasons(0x1000)
    ('', 'temperature, hardware temperature', 'reason 0x1000')
    """
    bits &= ~_IDLE
    names = [name for bit, name in _REASONS.items() if bits & bit]
    unknown = bits & ~sum(_REASONS)
    return ", ".join(names + ([f"reason {unknown:#x}"] if unknown else []))


def _process_bytes(nvml: Any, gpu: Any, process_id: int) -> int | None:
    """Bytes that the process holds; None if the driver does not know it: container process ids may differ."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return next((process.usedGpuMemory for process in processes if process.pid == process_id), None)


def _process_use(nvml: Any, gpu: Any, process_id: int) -> float | None:
    samples = nvml.nvmlDeviceGetProcessUtilization(gpu, 0)
    own = [(sample.timeStamp, sample.smUtil) for sample in samples if sample.pid == process_id]
    return max(own)[1] / 100 if own else None


# key of a `device` event -> how to read it, in the unit of the key table; None if there is no value
_DETAILS: Mapping[str, Callable[[Any, Any, int], Any]] = {
    "memory_utilization_ratio": lambda nvml, gpu, _: nvml.nvmlDeviceGetUtilizationRates(gpu).memory / 100,
    "power_w": lambda nvml, gpu, _: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit_w": lambda nvml, gpu, _: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "temperature_c": lambda nvml, gpu, _: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda nvml, gpu, _: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu, _: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "throttle_reasons": lambda nvml, gpu, _: throttle_reasons(
        nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    ),
    "pcie_sent_bytes_per_s": lambda nvml, gpu, _: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES) * KIB
    ),
    "pcie_received_bytes_per_s": lambda nvml, gpu, _: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES) * KIB
    ),
    "process_bytes": _process_bytes,
    "process_utilization_ratio": _process_use,
}
