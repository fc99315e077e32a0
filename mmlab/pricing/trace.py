"""The live bytes of one training step after every operation, on a device that need not be there.

`StepTracer` clones the model onto a fake device and takes steps on it as the trainer does: the same losses,
precision, clipping and optimizer, whose state already exists. Bytes are counted by `LiveBytes`, with each
storage rounded up as the device's allocator rounds it: to 512 bytes on CUDA, not at all on a CPU.

A trace takes as long as some two thousand operations take in Python (0.6 s for the base preset) and almost no
memory. Of scratch memory inside an operation it knows what `mmlab.pricing.work.scratch_bytes` states; it leaves
out that of cuDNN's convolutions, fragmentation, and the CUDA context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mmlab.errors import OptionError, check_name, unknown_name
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.huggingface import accept_batches
from mmlab.model.parameters import trainable_parameters
from mmlab.pricing.fake import FakeDevice
from mmlab.pricing.torch_internals import storage_key, without_modes
from mmlab.pricing.values import device_asked_for
from mmlab.pricing.work import Work, scratch_bytes, work_of
from mmlab.runs.meters import LiveBytes, tensors_in
from mmlab.training.losses.base import Objective
from mmlab.training.losses.names import parse_objectives, refuse_bare
from mmlab.training.precision import Precision
from mmlab.training.split import running_statistics
from mmlab.types import Batch, BatchShape

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

# an allocation is a multiple of this; on CUDA torch's kMinBlockSize
ALLOCATION_BYTES = {"cuda": 512, "cpu": 1}
# cuBLAS keeps one for the thread of the forward pass and one for that of the backward pass; torch gives each
# 32 MiB on GPUs of compute capability 9, 8 MiB on others
WORKSPACE_BYTES = {"cuda": 2 * 32 * 2**20, "cpu": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """What determines a step's memory besides model and shape; options of everything that prices a step."""

    precision: str = "fp32"  # "fp32", "tf32" (on "cuda"), "bf16" or "fp16"
    # "adamw", "sgd" (momentum 0.9), or a function that makes an optimizer of the parameters
    optimizer: str | OptimizerFactory = "adamw"
    device: str = "cuda"  # "cuda" or "cpu": the device whose kernels and allocator are priced
    checkpointing: bool = False  # turn activation checkpointing on; a model that has it keeps it
    objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",)  # as the trainer takes them
    accumulating: bool = False  # gradients of earlier micro-batches of the step exist
    # buckets with a place for every trained weight exist throughout, as under `ddp`
    gradient_buckets: bool = False

    @property
    def conditions(self) -> dict[str, Any]:
        """The setting as plain values, to be stored with the prices that hold for it."""
        named = getattr(self.optimizer, "__name__", None) or str(self.optimizer)
        changed = {"optimizer": named, "objectives": " + ".join(self.objectives)}
        return {name: changed.get(name, getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTrace:
    """One training step, operation by operation; n operations, the first of which make the batch.

    Operations and their order do not depend on the shape, with few exceptions (a length that is a multiple of 8, an
    image of just the size that a vision transformer was made for).
    """

    shape: BatchShape
    # (n,) the most during each operation: its inputs, its outputs and the scratch memory that is known
    live_bytes: NDArray[np.int64]
    operations: tuple[str, ...]  # n names
    work: tuple[Work, ...]  # n, of each operation
    static_bytes: int  # live between steps: parameters, buffers, optimizer state, workspace
    parameter_bytes: int  # the part of those that is parameters and buffers
    batch_bytes: int
    saved_bytes: int  # what the forward pass adds to all that was live before it: what the graph keeps
    gradient_bytes: NDArray[np.int64]  # (n,) the part of `live_bytes` that is the parameters' gradients
    step_peak_bytes: int  # of the first optimizer step, which makes the state; the same for all shapes
    # unknown numbers that the model read, see `mmlab.pricing.values`
    reads: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once."""
        return max(int(self.live_bytes.max()), self.step_peak_bytes)

    @property
    def peak_operation(self) -> str:
        """The operation at the peak."""
        if self.step_peak_bytes > self.live_bytes.max():
            return "the optimizer's first step"
        return self.operations[int(self.live_bytes.argmax())]


class StepTracer:
    """Traces steps of one model on a fake device; the model itself does not change.

    >>> from mmlab.model import build_model
    >>> trace = StepTracer(build_model("tiny", vocab_size=100), precision="bf16")(BatchShape(4, 16, 64, 64))
    >>> trace.peak_bytes > trace.static_bytes + trace.saved_bytes
    True

    Args:
        model: any model that `FusionTrainer` accepts.
        batches: makes a batch of a shape, on the host; None makes one of pixels and tokens.
        setting: the fields of `StepSetting`.

    Raises:
        OptionError: an unknown name; in a call, an operation that cannot be priced, with the module it is in.
    """

    def __init__(
        self, model: nn.Module, *, batches: Callable[[BatchShape], Batch] | None = None, **setting: Any
    ) -> None:
        for name in setting:
            check_name("option of a step", name, StepSetting.__slots__)
        self._make_batch = batches
        self.setting = StepSetting(**setting)
        self.fake = FakeDevice(self.setting.device)
        self.model = self.fake.clone(accept_batches(model)).train()
        if self.setting.checkpointing:
            enable_checkpointing(self.model)
        with self.fake:
            self._live = _Trace(self.fake.device.type)
            self.objectives = parse_objectives(self.model, self.setting.objectives)
            self.precision = Precision(self.setting.precision, self.fake.device)
            self.parameters = trainable_parameters(self.model)
            self.precision.check(self.parameters)
            self.optimizer = _optimizer(self.setting.optimizer, self.parameters)
            with self._live.add(self.model):
                self.parameter_bytes = self._live.current_bytes
                kind = self.setting.device
                self.workspace = torch.empty(WORKSPACE_BYTES[kind], dtype=torch.uint8, device=kind)
                self.precision.scaler.scale(torch.zeros((), device=self.fake.device))  # makes the loss scale
        # whether gradients exist when a micro-batch begins
        self._has_gradients = self.setting.accumulating or self.setting.gradient_buckets
        self._statistics = running_statistics(self.model)  # the trainer keeps a copy of them
        self.static_bytes = self.step_peak_bytes = 0  # known after the first step
        self._learnt: list[nn.Parameter] = []  # weights with a gradient, known after the first step

    def __call__(self, shape: BatchShape | Sequence[int]) -> StepTrace:
        """Trace a step over one micro-batch of this shape, in which every sample has an image and a text."""
        if np.shape(shape) != (4,) or not all(isinstance(side, Integral) and side > 0 for side in shape):
            raise OptionError(f"a shape is (B, T, H, W), whole numbers of at least 1; found {shape!r:.80}")
        shape = BatchShape(*map(int, shape))
        if self._has_gradients and not self._learnt:
            self._trace(shape)
        return self._trace(shape)

    def _trace(self, shape: BatchShape) -> StepTrace:
        live = self._live
        live.reset()
        self.fake.reads.clear()
        with self.fake, live:
            # what is kept in a variable stays live until it is deleted, as in the trainer
            buckets = self._make_gradients()
            before_bytes = live.current_bytes
            batch = self._batch(shape)
            batch_bytes = live.current_bytes - before_bytes
            statistics = [buffer.clone() for buffer in self._statistics]
            loss = self._loss(batch)
            saved_bytes = live.current_bytes - batch_bytes - before_bytes
            self.precision.backward(loss)
            del loss
            # which operation made each gradient, before the optimizer's operations follow
            self._learnt = [weight for weight in self.parameters if weight.grad is not None]
            makers, sizes = live.born([weight.grad for weight in self._learnt if weight.grad is not None])
            if not self.static_bytes:
                self._take_first_step(sum(sizes))
            self.precision.clip_and_step(self.optimizer, {"all": self.parameters}, 1.0)
            del batch, buckets, statistics
        # now only what stays between steps is live
        self.static_bytes = live.current_bytes
        gradient_bytes = np.bincount(makers, sizes, minlength=len(live.after)).cumsum().astype(np.int64)
        if self._has_gradients:
            # all throughout, and in the first step more of them than this micro-batch made
            gradient_bytes[:] = before_bytes - self.static_bytes
            self.step_peak_bytes = self._first_step_bytes + int(gradient_bytes[-1]) - sum(sizes)
        return StepTrace(
            shape=shape,
            live_bytes=np.array(live.after, dtype=np.int64),
            operations=tuple(map(str, live.operations)),
            work=tuple(live.work),
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
        if self._make_batch is not None:
            with without_modes():
                real = self._make_batch(shape)
            return self.fake.copy(real)
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
            with without_modes():
                value = torch.ones(mask.shape, dtype=torch.bool)
                value.view(-1)[value[0].numel() - 1] = False
            self.fake.know(mask, value)
        return batch

    def _loss(self, batch: Batch) -> torch.Tensor:
        with self.precision.autocast():
            output = self.model(batch)
        refuse_bare(output, self.model, self.objectives)
        # anew, as the trainer does: objectives that use a weight again cast it again
        with self.precision.autocast():
            sums = [objective(output, batch) / len(batch) for objective in self.objectives.values()]
            return torch.stack(sums).sum()

    def _make_gradients(self) -> list[torch.Tensor]:
        """Make the gradients that exist before a micro-batch; returns what buckets hold besides."""
        if not (self._has_gradients and self._learnt):
            return []
        for weight in self._learnt:
            weight.grad = torch.zeros_like(weight)
        if not self.setting.gradient_buckets:
            return []
        # without accumulation a gradient lies in its place in the bucket
        in_place = () if self.setting.accumulating else set(self._learnt)
        return [torch.zeros_like(weight) for weight in self.parameters if weight not in in_place]

    def _take_first_step(self, gradient_bytes: int) -> None:
        """Make the optimizer's state and count it from the start of this trace; make the gradients again."""
        live = self._live
        others_bytes = live.current_bytes - gradient_bytes
        num_operations = len(live.after)
        live.reset_peak()
        self.precision.clip_and_step(self.optimizer, {"all": self.parameters}, 1.0)
        state_bytes = live.current_bytes - others_bytes
        self._first_step_bytes = live.peak_bytes - others_bytes + self.parameter_bytes + self.workspace.nbytes
        self.step_peak_bytes = self._first_step_bytes
        for weight in self._learnt:
            weight.grad = torch.empty_like(weight)
        del live.operations[num_operations:], live.work[num_operations:]
        live.after = [num_bytes + state_bytes for num_bytes in live.after[:num_operations]]


class _Trace(LiveBytes):
    """Records the live bytes after every operation, and which operation made each storage."""

    def __init__(self, device_type: str) -> None:
        super().__init__(granule_bytes=ALLOCATION_BYTES[device_type], device_type=device_type)
        self.reset()

    def reset(self) -> None:
        self.after: list[int] = []
        self.operations: list[Any] = []
        self.work: list[Work] = []
        self._maker: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked_for(func, args)) is not None:  # a question, not an operation
            return device
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in((out,)):
            self._maker[storage_key(tensor)] = len(self.after)
        scratch = scratch_bytes(func, args, out) if self.device_type == "cuda" else 0
        self.after.append(self.current_bytes + scratch)
        self.operations.append(func)
        self.work.append(work_of(func, args, kwargs or {}, out))
        return out

    def born(self, tensors: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
        """For each tensor's storage, the operation that made it, and its bytes."""
        keys = {*map(storage_key, tensors)}
        return [self._maker[key] for key in keys], [self._sizes[key] for key in keys]


def _optimizer(name: str | OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    if isinstance(name, str):
        raise unknown_name("optimizer", name, ("adamw", "sgd"))
    return name(parameters)
