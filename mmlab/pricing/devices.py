"""Public specifications of devices, and the time of a traced step on one: a roofline over its operations.

An operation takes as long as its arithmetic at the peak rate or its bytes at the full bandwidth, whichever is
longer (Williams, Waterman and Patterson 2009), and at least as long as its launch. Kernels reach neither
peak, so a prediction from specifications alone is a lower bound rather than a forecast; `Device.calibrated`
fits the three rates to measured steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, unknown_name
from mmlab.pricing.trace import StepTrace

_LAUNCH_S = 5e-6  # an assumption, not a specification: eager torch launches some 200,000 kernels a second
# what a step on a GPU does besides its kernels takes as long as so many launches: on an H200, with four models,
# 640 on one day and 750 on another (docs/internals/gpu.md)
_STEP_LAUNCHES = 700
# how strongly calibration holds each rate to its initial value: a rate that is off by a factor of e counts like an
# error of 14 % in every step; launch time, an assumption, is free
_STIFFNESS = np.array([0.02, 0.02, 0.0])


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline needs to know of a device.

    Args:
        flops_per_s: peak of dense arithmetic, by precision: "fp32", "tf32", "bf16", "fp16".
        bytes_per_s: bandwidth of its memory.
        memory_bytes: size of its memory.
        launch_s: least time from one operation to the next; a step on a GPU takes that of 700 operations besides.
        source: where the figures come from.
        kind: "cuda" or "cpu": the kernels that a step is traced with. On a CPU an operation's launch adds to
            its work; on a GPU it is hidden behind the work of the operation before.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    source: str
    launch_s: float = _LAUNCH_S
    kind: str = "cuda"

    def check_precision(self, precision: str) -> None:
        """Check that the device supports a precision.

        Raises:
            OptionError: it is not supported; the message names those that are.
        """
        if precision not in self.flops_per_s:
            raise OptionError(f"{self.name} does not support {precision}, only {', '.join(self.flops_per_s)}")

    def seconds(self, trace: StepTrace, precision: str = "fp32") -> float:
        """How long a traced step takes.

        Args:
            precision: of the training; under "tf32", 32-bit operations run at the TF32 rate.
        """
        return float(self._seconds(self._rates(), _demands([trace], self, precision))[0])

    def calibrated(
        self, traces: Sequence[StepTrace], measured_s: Sequence[float], precision: str = "fp32"
    ) -> Device:
        """The same device with rates fitted to measured steps.

        Arithmetic (all precisions by one factor), bandwidth and launch time are chosen to minimise the mean
        square of log(predicted / measured seconds) (Powell 1964). Arithmetic and bandwidth are held near where
        they were, as in ridge regression: a small model reaches less of the peak than a large one, and rates
        fitted freely to it would make the large one look slow. Steps as heavy as those you want to predict
        calibrate best.

        Args:
            traces: of the steps, with `StepTracer(model, device=self.kind)`.
            measured_s: seconds of each.
        """
        from scipy.optimize import minimize

        demands, begun = _demands(traces, self, precision), np.log(self._rates())

        def loss(logs: NDArray[np.float64]) -> float:
            gaps = np.log(self._seconds(np.exp(logs), demands) / np.asarray(measured_s))
            return float((gaps**2).mean() + _STIFFNESS @ (logs - begun) ** 2)

        arithmetic, bandwidth, launch_s = np.exp(minimize(loss, begun, method="Powell").x).tolist()
        return replace(
            self,
            flops_per_s={name: arithmetic * peak for name, peak in self.flops_per_s.items()},
            bytes_per_s=bandwidth,
            launch_s=launch_s,
            source=f"{self.source}, calibrated by {len(traces)} measured steps",
        )

    def _rates(self) -> NDArray[np.float64]:
        """Factor on the arithmetic rates, bytes a second, seconds a launch."""
        return np.array([1.0, self.bytes_per_s, self.launch_s])

    def _seconds(self, rates: NDArray[np.float64], demands: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        arithmetic, bandwidth, launch_s = rates
        work_s = [np.maximum(peak_s / arithmetic, num_bytes / bandwidth) for peak_s, num_bytes in demands]
        if self.kind == "cpu":
            return np.array([(each + launch_s).sum() for each in work_s])
        return np.array([np.maximum(each, launch_s).sum() + _STEP_LAUNCHES * launch_s for each in work_s])


def _demands(traces: Sequence[StepTrace], device: Device, precision: str) -> list[NDArray[np.float64]]:
    """For each trace, (2, n): seconds of arithmetic at the peak rate, and bytes, of each kernel."""
    device.check_precision(precision)
    peaks = {**device.flops_per_s, "fp32": device.flops_per_s["tf32" if precision == "tf32" else "fp32"]}
    found = []
    for trace in traces:
        kernels = [work for work in trace.work if work.num_bytes]
        peak_s = [work.flops / peaks.get(work.precision, peaks["fp32"]) for work in kernels]
        found.append(np.array([peak_s, [work.num_bytes for work in kernels]]))
    return found


def find_device(name: str) -> Device:
    """A device of `DEVICES` by name, ignoring case and spaces.

    >>> find_device("a100 80gb").name
    'A100 80GB'
    >>> find_device("A100").memory_bytes
    80000000000

    Raises:
        OptionError: no such device.
    """
    plain = _plain(name)
    for device in DEVICES:
        if plain in (_plain(device.name), _plain(device.name).removesuffix("80gb").removesuffix("sxm")):
            return device
    raise unknown_name("device", name, [device.name for device in DEVICES])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


def _rates(fp32: float, tf32: float, half: float) -> dict[str, float]:
    """`flops_per_s` of a device with all precisions, given in 10^12."""
    return {"fp32": 1e12 * fp32, "tf32": 1e12 * tf32, "bf16": 1e12 * half, "fp16": 1e12 * half}


_SITE = "https://www.nvidia.com/en-us/data-center"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
DEVICES = (  # dense arithmetic: half of what data sheets state with sparsity
    Device("H200", _rates(67, 494.5, 989), 4800e9, 141 * 10**9, f"{_SITE}/h200/"),
    Device("H100 SXM", _rates(67, 494.5, 989), 3350e9, 80 * 10**9, f"{_SITE}/h100/"),
    Device("A100 80GB", _rates(19.5, 156, 312), 2039e9, 80 * 10**9, f"{_SITE}/a100/"),
    Device("L40S", _rates(91.6, 183, 362), 864e9, 48 * 10**9, f"{_SITE}/l40s/"),
    Device("L4", _rates(30.3, 60, 121), 300e9, 24 * 10**9, f"{_SITE}/l4/"),
    Device("RTX 4090", _rates(82.6, 82.6, 165.2), 1008e9, 24 * 10**9, _ADA),
    Device("T4", {"fp32": 8.1e12, "fp16": 65e12}, 300e9, 16 * 10**9, f"{_SITE}/tesla-t4/"),
)
