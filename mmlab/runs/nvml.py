"""Readings of one NVIDIA GPU through NVML: memory, utilisation, power, temperature, clock.

A value that the driver refuses is left out, and the reason kept: containers hide other processes, virtual GPUs
have no clock. A value that the device does not support is not requested again.

Costs about 1 ms of CPU time a reading: call it in a thread of its own, never in the training loop. Needs the
driver's library, not torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mmlab.errors import first_line


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
            process_id: the process whose share of memory to report.
        """
        found: dict[str, Any] = {}
        missing = dict(self._unsupported)
        for key, read in _DETAILS.items():
            if key in self._unsupported:
                continue
            try:
                found[key] = read(self._nvml, self._handle, process_id)
            except Exception as error:  # any driver error: the value is left out and the reason kept
                missing[key] = f"no {key} from NVML: {first_line(error)}"
                if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    self._unsupported[key] = missing[key]
        return {key: value for key, value in found.items() if value is not None}, list(missing.values())


def _process_bytes(nvml: Any, gpu: Any, process_id: int) -> int | None:
    """Bytes that the process holds; None if the driver does not know it: container process ids may differ."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return next((process.usedGpuMemory for process in processes if process.pid == process_id), None)


# key of a `device` event -> how to read it, in the unit of the key table; None if there is no value
_DETAILS: Mapping[str, Callable[[Any, Any, int], Any]] = {
    "power_w": lambda nvml, gpu, _: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda nvml, gpu, _: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda nvml, gpu, _: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "process_bytes": _process_bytes,
}
