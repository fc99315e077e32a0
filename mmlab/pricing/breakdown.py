"""What a training step's memory is spent on, for one batch shape, on a device that need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmlab.machine import CONTEXT_BYTES
from mmlab.pricing.trace import OptimizerFactory, StepTracer
from mmlab.types import BatchShape

PARTS = ("parameters", "optimizer_state", "workspace", "gradients", "batch", "saved_activations", "transient")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes that live at the step's peak, by purpose; the parts add up to `peak_bytes`.

    Each allocation is rounded up as the device's allocator rounds it.
    """

    shape: BatchShape
    parameters: int  # and buffers
    optimizer_state: int
    workspace: int  # of cuBLAS; 0 on a CPU
    gradients: int  # of parameters, those that exist at the peak
    batch: int
    saved_activations: int  # what the forward pass saves for the backward pass, as far as it is still live
    transient: int  # the rest: what the operation at the peak works on
    peak_bytes: int
    peak_operation: str
    context_bytes: int  # not part of the peak: the CUDA context, see `CONTEXT_BYTES`; 0 on a CPU
    conditions: Mapping[str, Any]  # the setting that was priced
    assumptions: tuple[str, ...]  # numbers that the model reads from tensors, and the values assumed for them

    def __str__(self) -> str:
        size, num_tokens, height, width = self.shape
        conditions = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        rows = [(part.replace("_", " "), getattr(self, part)) for part in PARTS]
        rows += [("peak", self.peak_bytes), ("CUDA context (not in the peak)", self.context_bytes)]
        return "\n".join(
            [
                f"{size} samples of {num_tokens} tokens and {height} x {width} pixels ({conditions}); "
                f"peak in {self.peak_operation}",
                *(f"  {name:20} {num_bytes / 2**20:10,.1f} MiB" for name, num_bytes in rows),
                *(f"  assumed: {assumption}" for assumption in self.assumptions),
            ]
        )

    __repr__ = __str__


def price(
    model: nn.Module,
    shape: BatchShape | Sequence[int],
    precision: str = "fp32",
    optimizer: str | OptimizerFactory = "adamw",
    **setting: Any,
) -> MemoryBreakdown:
    """Memory that one training step on a batch of this shape needs, without using the device or the memory.

    >>> from mmlab.model import build_model
    >>> needed = price(build_model("tiny", vocab_size=100), (4, 16, 64, 64), "bf16")
    >>> needed.peak_bytes == needed.parameters + needed.optimizer_state + needed.workspace + needed.gradients + (
    ...     needed.batch + needed.saved_activations + needed.transient)
    True

    Args:
        model: any model that `FusionTrainer` accepts; it is not changed, and may be on the meta device.
        shape: (B, T, H, W).
        precision, optimizer, setting: the fields of `mmlab.pricing.trace.StepSetting`: `device`, `checkpointing`, ...

    Raises:
        OptionError: an unknown name, or an operation that cannot be priced, with the module it is in.
    """
    tracer = StepTracer(model, precision=precision, optimizer=optimizer, **setting)
    trace = tracer(shape)
    at = int(trace.live_bytes.argmax())
    in_first_step = trace.step_peak_bytes > trace.live_bytes[at]
    batch = 0 if in_first_step else trace.batch_bytes
    gradients = int(trace.gradient_bytes[-1 if in_first_step else at])
    rest = trace.peak_bytes - trace.static_bytes - batch - gradients
    saved = 0 if in_first_step else min(rest, trace.saved_bytes)
    return MemoryBreakdown(
        shape=trace.shape,
        parameters=trace.parameter_bytes,
        optimizer_state=trace.static_bytes - trace.parameter_bytes - tracer.workspace.nbytes,
        workspace=tracer.workspace.nbytes,
        gradients=gradients,
        batch=batch,
        saved_activations=saved,
        transient=rest - saved,
        peak_bytes=trace.peak_bytes,
        peak_operation=trace.peak_operation,
        context_bytes=CONTEXT_BYTES["cuda"] if tracer.setting.device == "cuda" else 0,
        conditions=tracer.setting.conditions,
        assumptions=tuple(f"{place}, {count} times" for place, count in trace.reads.items()),
    )
