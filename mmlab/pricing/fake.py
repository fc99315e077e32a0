"""A device that is not there: tensors have shapes, types and a device, but no bytes.

Within `fake_device("cuda")` a model's forward pass, backward pass and optimizer step run on a machine without a GPU, in
seconds and in almost no memory, whatever the batch. It is torch's FakeTensorMode with what it lacks on such a machine:
a backward pass (`engine`), autocast that does not switch itself off, fused attention (`attention`), and answers where a
model reads a number.

Values are known of a few tensors only (`values`): masks, and what a model writes itself. Any other number that is read
does not exist; False stands for a truth value and 1 for any other number, and the read is kept in `reads`, so that a
price can say what it rests on. A tensor whose shape depends on unknown values cannot be priced.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmlab.errors import unknown_name
from mmlab.pricing.attention import cuda_attention
from mmlab.pricing.engine import python_engine
from mmlab.pricing.recalling import RecallingFakeMode
from mmlab.pricing.values import Answers

Module = TypeVar("Module", bound=nn.Module)

_CPU_ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def fake_device(device: str = "cuda", *, attention: str = "auto") -> FakeDevice:
    """A context in which tensors are fake and `device` is there. It can be entered again.

    As on a real device, a tensor that is made without naming a device is on the CPU.

    >>> with fake_device("cuda"):
    ...     torch.ones(1000, 1000, 1000, device="cuda") @ torch.ones(1000, 10, device="cuda")
    FakeTensor(..., device='cuda:0', size=(1000, 1000, 10))

    Args:
        device: "cuda" or "cpu".
        attention: the kernel of scaled dot-product attention; "auto" is what torch would choose. "efficient" is for
            cuda only.

    Raises:
        OptionError: no such device or attention.
    """
    return FakeDevice(device, attention)


class FakeDevice:
    """See `fake_device`."""

    def __init__(self, device: str, attention: str) -> None:
        if device not in ("cuda", "cpu"):
            raise unknown_name("device to price", device, ("cuda", "cpu"))
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        if device == "cpu" and attention != "auto" and attention not in _CPU_ATTENTION:
            raise unknown_name("attention on a cpu", attention, ("auto", *_CPU_ATTENTION))
        self.attention = attention
        self._mode, self._answers = RecallingFakeMode(), Answers()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> FakeDevice:
        with ExitStack() as stack:
            if self.device.type == "cuda":
                if not torch.cuda.is_available():
                    stack.enter_context(python_engine())
                # both ask the driver, and autocast and loss scaling switch themselves off without one
                stack.enter_context(
                    patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
                )
                stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda **_: True))
                stack.enter_context(cuda_attention(self.attention))
            elif self.attention != "auto":
                stack.enter_context(sdpa_kernel(_CPU_ATTENTION[self.attention]))
            stack.enter_context(self._mode)
            stack.enter_context(self._answers)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)

    @property
    def reads(self) -> Counter[str]:
        """How often a model read a number that is not known, by place."""
        return self._answers.reads

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Let a fake tensor have the values of a real one on the CPU."""
        self._answers.known[fake] = value
        return fake

    def clone(self, model: Module) -> Module:
        """See `fake_clone`."""
        memo: dict[int, Any] = {}
        with self:
            for module in model.modules():
                for value in (*module.parameters(recurse=False), *module.__dict__.values()):
                    if isinstance(value, torch.Tensor):
                        memo[id(value)] = self._fake(value)
            for buffer in model.buffers():
                memo[id(buffer)] = self._fake(buffer)
            return copy.deepcopy(model, memo)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_clone(model: Module, device: FakeDevice) -> Module:
    """The model on a fake device. The original is left as it is, nothing is allocated, tied weights stay tied."""
    return device.clone(model)
