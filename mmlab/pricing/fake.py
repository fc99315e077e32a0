"""A device that is not there: tensors have shapes, types and a device, but no bytes.

Within a `FakeDevice` a model's forward pass, backward pass and optimizer step run on a machine without a GPU, in
seconds and in almost no memory, whatever the batch. It is torch's FakeTensorMode, made quicker, with what that lacks on
such a machine: a backward pass (`backward`), autocast that does not switch itself off, fused attention (`attention`), and
stand-ins for the numbers that a model reads (`values`).
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from mmlab.errors import check_name
from mmlab.pricing import torch_internals
from mmlab.pricing.attention import cuda_attention
from mmlab.pricing.backward import python_backward
from mmlab.pricing.values import Answers
from mmlab.types import Batch

Module = TypeVar("Module", bound=nn.Module)


class FakeDevice:
    """A context in which tensors are fake and the device seems to exist. It can be entered more than once.

    As on a real device, a tensor that is made without naming a device is on the CPU.

    >>> with FakeDevice("cuda"):
    ...     torch.ones(1000, 1000, 1000, device="cuda") @ torch.ones(1000, 10, device="cuda")
    FakeTensor(..., device='cuda:0', size=(1000, 1000, 10))

    Args:
        device: "cuda" or "cpu".

    Attributes:
        reads: how often a model read an unknown number, by module and line.

    Raises:
        OptionError: no such device.
    """

    def __init__(self, device: str = "cuda") -> None:
        check_name("device to price", device, ("cuda", "cpu"))
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._mode, self._answers = torch_internals.QuickFakeMode(allow_fallback_kernels=False), Answers()
        self.reads = self._answers.reads
        self._entered: list[ExitStack] = []

    def __enter__(self) -> FakeDevice:
        with ExitStack() as stack:
            if self.device.type == "cuda":
                if not torch.cuda.is_available():
                    stack.enter_context(python_backward())
                    stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # else RNNs need it
                stack.enter_context(torch_internals.mixed_precision_without_driver())
                stack.enter_context(torch_internals.cuda_attention_replaced(cuda_attention))
            stack.enter_context(torch_internals.reading_known_values(self._answers.known))
            stack.enter_context(self._mode)
            stack.enter_context(self._answers)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Give a fake tensor the values of a real one on the CPU."""
        self._answers.known[fake] = value
        return fake

    def copy(self, batch: Batch) -> Batch:
        """A copy on this device of a batch on the host, with all its values known."""
        return batch.map_tensors(
            lambda real: self.know(torch.empty(real.shape, dtype=real.dtype, device=self.device), real)
        )

    def clone(self, model: Module) -> Module:
        """A copy of the model on this device. Nothing is allocated, and tied weights stay tied."""
        with self:
            memo: dict[int, Any] = {id(buffer): self._fake(buffer) for buffer in model.buffers()}
            for module in model.modules():
                for value in (*module.parameters(recurse=False), *module.__dict__.values()):
                    if isinstance(value, torch.Tensor):
                        memo[id(value)] = self._fake(value)
            return copy.deepcopy(model, memo)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)
