"""The live bytes of one training step after every operation, on a device that need not be there.

`StepTracer` clones the model onto a fake device and takes steps as `FusionTrainer` does: the same window, losses,
precision, clipping and optimizer, whose state exists already. Bytes are counted as `LiveBytes` counts them, each
storage rounded up as the device's allocator rounds it: to 512 bytes on CUDA, not at all on a CPU.

A trace costs about as long as two thousand operations take in Python (1-2 s for the base preset) and almost no
memory. It does not know scratch memory inside an operation (cuDNN's and cuBLAS's workspaces), fragmentation, nor the
CUDA context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from mmlab.errors import OptionError, unknown_name
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.huggingface import taking_batches
from mmlab.model.parameters import learning
from mmlab.pricing.fake import fake_clone, fake_device
from mmlab.pricing.values import device_asked_for
from mmlab.runs.meters import LiveBytes
from mmlab.training.losses.base import Objective
from mmlab.training.losses.names import parse_objectives
from mmlab.training.optimizer import RestartableAdamW
from mmlab.training.precision import Precision
from mmlab.training.window import Window
from mmlab.types import Batch, BatchShape

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

ALLOCATION_BYTES = {
    "cuda": 512,
    "cpu": 1,
}  # an allocation is a multiple of this; on CUDA kMinBlockSize of torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrace:
    """One training step, operation by operation; n operations, the first ones make the batch.

    Operations and their order do not depend on the shape, with few exceptions (a length that is a multiple of 16, an
    image of just the size that a vision transformer was made for).
    """

    shape: BatchShape
    live_bytes: NDArray[np.int64]  # (n,) after each operation, while its inputs and outputs live
    operations: tuple[str, ...]  # n names
    static_bytes: int  # between steps: parameters, buffers, optimizer state
    parameter_bytes: int  # of those, parameters and buffers
    batch_bytes: int
    saved_bytes: (
        int  # live between forward and backward, beyond those two: what the graph and the output keep
    )
    gradient_bytes: NDArray[np.int64]  # (n,) of the parameters, in `live_bytes`
    step_peak_bytes: (
        int  # of the first optimizer step, which makes the state; without a batch, the same for all shapes
    )
    reads: Mapping[str, int]  # numbers that the model read though pricing has none, see `fake_device`

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once."""
        return max(int(self.live_bytes.max()), self.step_peak_bytes)

    @property
    def peak_operation(self) -> str:
        """The operation at the peak."""
        if self.step_peak_bytes > self.live_bytes.max():
            return "the optimizer's first step"
        return self.operations[int(self.live_bytes.argmax())]


def trace_step(model: nn.Module, shape: BatchShape | Sequence[int], **options: Any) -> StepTrace:
    """Trace one step; for many shapes of one model make a `StepTracer`, which clones the model once.

    >>> from mmlab.model import build_model
    >>> trace = trace_step(build_model("tiny", vocab_size=100), (4, 16, 64, 64), precision="bf16")
    >>> trace.peak_bytes > trace.static_bytes + trace.saved_bytes
    True

    Args:
        shape: (B, T, H, W).
        options: those of `StepTracer`.
    """
    return StepTracer(model, **options)(BatchShape(*shape))


class StepTracer:
    """Traces steps of one model on a fake device; the model itself is left as it is.

    Args:
        model: what `FusionTrainer` accepts.
        precision: "fp32", "bf16" or "fp16".
        optimizer: "adamw" (the trainer's), "sgd" (momentum 0.9), or a function from parameters to an optimizer.
        device: "cuda" or "cpu".
        checkpointing: turn activation checkpointing on, see `enable_checkpointing`; a model that has it keeps it.
        attention: see `fake_device`.
        objectives: as the trainer takes them.
        accumulating: earlier micro-batches of the step have left their gradients.
        gradient_buckets: every weight that learns has its place in a bucket all the time, as under `ddp`.

    Raises:
        OptionError: an unknown name; when it is called: an operation that cannot be priced, with the module it is in.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: str = "fp32",
        optimizer: str | OptimizerFactory = "adamw",
        device: str = "cuda",
        checkpointing: bool = False,
        attention: str = "auto",
        objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
        accumulating: bool = False,
        gradient_buckets: bool = False,
    ) -> None:
        named = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))
        self.conditions = {  # what its prices hold for
            "precision": precision,
            "optimizer": named,
            "device": device,
            "checkpointing": checkpointing,
            "attention": attention,
            "objectives": " + ".join(objectives),
            "accumulating": accumulating,
            "gradient_buckets": gradient_buckets,
        }
        self.fake = fake_device(device, attention=attention)
        self.model = fake_clone(taking_batches(model), self.fake).train()
        if checkpointing:
            enable_checkpointing(self.model)
        with self.fake:
            self._live = _Trace(ALLOCATION_BYTES[device], self.fake.device.type)
            self.objectives = parse_objectives(self.model, objectives)
            self.precision = _MarkedPrecision(precision, self.fake.device, self._live)
            self.parameters = learning(self.model)
            self.precision.check(self.parameters)
            self.optimizer = _optimizer(optimizer, self.parameters)
            self._window = Window(
                self.model,
                self.objectives,
                self.precision,
                self.fake.device,
                seed=lambda draw: None,
                on_failure=_never,
            )
            with self._live.add(self.model):
                self.parameter_bytes = self._live.current_bytes
                self.precision.scaler.scale(torch.zeros((), device=self.fake.device))  # makes the loss scale
        self.static_bytes = self.step_peak_bytes = 0  # known after the first step
        self._accumulating, self._gradient_buckets = accumulating, gradient_buckets
        self._learnt: list[nn.Parameter] = []  # weights with a gradient, once a step has told

    def __call__(self, shape: BatchShape) -> StepTrace:
        """Trace a step over one micro-batch of this shape, in which every sample has an image and a text."""
        if self._holds and not self._learnt:
            self._trace(shape)
        return self._trace(shape)

    @property
    def _holds(self) -> bool:
        """Whether gradients are there when a micro-batch begins."""
        return self._accumulating or self._gradient_buckets

    def _trace(self, shape: BatchShape) -> StepTrace:
        live = self._live
        live.reset()
        self.fake.reads.clear()
        with self.fake, live:
            in_buckets = self._hold_gradients()
            before_bytes = live.current_bytes
            batch = self._batch(shape)
            batch_bytes = live.current_bytes - before_bytes
            self._window.gradient([batch], dict.fromkeys(self.objectives, len(batch)))
            saved_bytes = self.precision.before_backward_bytes - batch_bytes - before_bytes
            self._learnt = [weight for weight in self.parameters if weight.grad is not None]
            makers, sizes = live.born([weight.grad for weight in self._learnt if weight.grad is not None])
            if not self.static_bytes:
                self._take_first_step(sum(sizes))
            self.precision.step(self.optimizer, self.parameters, 1.0)
            del batch, in_buckets
        self.static_bytes = live.current_bytes
        num_operations = len(live.after)
        gradient_bytes = np.bincount(makers, sizes, minlength=num_operations).cumsum().astype(np.int64)
        if self._holds:
            gradient_bytes[:] = before_bytes - self.static_bytes
            self.step_peak_bytes = self._first_step_bytes + int(gradient_bytes[-1]) - sum(sizes)
        return StepTrace(
            shape=shape,
            live_bytes=np.array(live.after, dtype=np.int64),
            operations=tuple(map(str, live.operations)),
            static_bytes=self.static_bytes,
            parameter_bytes=self.parameter_bytes,
            batch_bytes=batch_bytes,
            saved_bytes=saved_bytes,
            gradient_bytes=gradient_bytes,
            step_peak_bytes=self.step_peak_bytes,
            reads=Counter(self.fake.reads),
        )

    def _batch(self, shape: BatchShape) -> Batch:
        """A batch as the loader collates it: something is padded, and every patch of every image is there."""
        if min(shape) < 1:
            raise OptionError(f"a batch has at least one sample, token and pixel, found {shape}")
        (size, num_tokens, height, width), device = shape, self.fake.device
        batch = Batch(
            pixel_values=torch.empty(size, 3, height, width, dtype=torch.uint8, device=device),
            pixel_mask=torch.empty(size, height, width, dtype=torch.bool, device=device),
            input_ids=torch.empty(size, num_tokens, dtype=torch.int64, device=device),
            attention_mask=torch.empty(size, num_tokens, dtype=torch.bool, device=device),
            labels=torch.empty(size, dtype=torch.int64, device=device),
            record_ids=[""] * size,
            groups=torch.empty(size, dtype=torch.int64, device=device),
        )
        for mask in (batch.pixel_mask, batch.attention_mask):
            with _disable_current_modes():
                value = torch.ones(mask.shape, dtype=torch.bool)
                value.view(-1)[value[0].numel() - 1] = False
            self.fake.know(mask, value)
        return batch

    def _hold_gradients(self) -> list[torch.Tensor]:
        """What is there before a micro-batch: gradients where they belong; what buckets hold beside them comes back."""
        if not (self._holds and self._learnt):
            return []
        for weight in self._learnt:
            weight.grad = torch.zeros_like(weight)
        if not self._gradient_buckets:
            return []
        # without accumulation a gradient lies in its place in the bucket
        lie_there = () if self._accumulating else set(self._learnt)
        return [torch.zeros_like(weight) for weight in self.parameters if weight not in lie_there]

    def _take_first_step(self, gradient_bytes: int) -> None:
        """Make the optimizer's state, as if it had been there since this trace began; the gradients are there again."""
        live = self._live
        others_bytes = live.current_bytes - gradient_bytes
        num_operations = len(live.after)
        live.reset_peak()
        self.precision.step(self.optimizer, self.parameters, 1.0)
        state_bytes = live.current_bytes - others_bytes
        self._first_step_bytes = live.peak_bytes - others_bytes + self.parameter_bytes
        self.step_peak_bytes = self._first_step_bytes
        for weight in self._learnt:
            weight.grad = torch.empty_like(weight)
        del live.operations[num_operations:]
        live.after = [num_bytes + state_bytes for num_bytes in live.after[:num_operations]]


class _Trace(LiveBytes):
    """Keeps what lived after every operation, and which operation each storage came from."""

    def __init__(self, granule_bytes: int, device_type: str) -> None:
        super().__init__(granule_bytes=granule_bytes, device_type=device_type)
        self.reset()

    def reset(self) -> None:
        self.after: list[int] = []
        self.operations: list[Any] = []
        self._maker: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked_for(func, args)) is not None:  # a question, not an operation
            return device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._maker[tensor.untyped_storage()._cdata] = len(self.after)
        self.after.append(self.current_bytes)
        self.operations.append(func)
        return out

    def born(self, tensors: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
        """After which operation each was there, and its bytes."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return [self._maker[key] for key in keys], [self._sizes[key] for key in keys]


class _MarkedPrecision(Precision):
    """Notes what lives when the backward pass begins."""

    before_backward_bytes = 0

    def __init__(self, name: str, device: torch.device, live: LiveBytes) -> None:
        super().__init__(name, device)
        self._live = live

    def backward(
        self, loss: torch.Tensor | None, taught: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()
    ) -> None:
        self.before_backward_bytes = self._live.current_bytes
        super().backward(loss, taught)


def _optimizer(name: str | OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return RestartableAdamW(parameters, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    if isinstance(name, str):
        raise unknown_name("optimizer", name, ("adamw", "sgd"))
    return name(parameters)


def _never(*values: object) -> None:
    raise AssertionError(f"a fake device has no memory to run out of: {values}")
