"""Mixed precision in one object: autocast, loss scaling, unscaling, clipping and the optimizer's step.

`fp32` computes in the weights' own type; `bf16` and `fp16` run matrix products and convolutions in 16 bits under
autocast, with weights, gradients and losses in fp32; `fp16` also scales the loss so that small gradients do not
vanish, and skips the steps in which a gradient overflowed. Costs one device synchronisation a step, to read the
gradient norm.

What torch supports (2.11 to 2.15): `fp32` everywhere; `bf16` and `fp16`, scaler included, on cpu and cuda. On a CPU
both are emulated where the instruction set has no 16-bit products (AVX512-BF16 / FP16, AMX): right, but slower than
fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError, unknown_name

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepResult(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float  # L2, before clipping; infinite or NaN after an overflow
    skipped: bool  # weights left as they were: a gradient was not finite, or there was none
    loss_scale: float  # factor used in this step; 1 without a scaler


class Precision:
    """One run's precision on one device.

    >>> precision = Precision.parse("bf16", "cpu")
    >>> with precision.autocast():
    ...     torch.nn.Linear(2, 2)(torch.zeros(1, 2)).dtype
    torch.bfloat16

    Raises:
        OptionError: an unknown name, or a precision that the device does not support.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        if name not in PRECISIONS:
            raise unknown_name("precision", name, PRECISIONS)
        self.name, self.device, self.dtype = name, torch.device(device), PRECISIONS[name]
        if self.dtype is not None and self.device.type not in ("cpu", "cuda"):
            raise OptionError(f"{name} is supported on cpu and cuda, found device {self.device}; use fp32")
        if (
            name == "bf16"
            and self.device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise OptionError(
                f"bf16 needs compute capability 8.0 or later, {torch.cuda.get_device_name(self.device)} has less; "
                "use fp16"
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=name == "fp16")

    @classmethod
    def parse(cls, precision: str | Precision, device: torch.device | str = "cpu") -> Precision:
        """A `Precision` from its name; one that exists is passed through."""
        return precision if isinstance(precision, Precision) else cls(precision, device)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, so that a gradient that is not finite is part of the game."""
        return self.scaler.is_enabled()

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse weights that this precision cannot train.

        Raises:
            OptionError: 16-bit weights under `fp16`, whose gradients cannot be unscaled.
        """
        if self.name == "fp16" and any(
            weight.dtype in (torch.float16, torch.bfloat16) for weight in parameters
        ):
            raise OptionError(
                "fp16 keeps its weights in fp32 and found 16-bit weights; call model.float() first"
            )

    def autocast(self) -> AbstractContextManager[None]:
        """The context of the forward pass and the loss."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, scaled where the precision asks for it."""
        self.scaler.scale(loss).backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        max_grad_norm: float = math.inf,
    ) -> StepResult:
        """Unscale once, clip once, step unless a gradient is not finite or there is none, and clear the gradients.

        Args:
            parameters: those to clip together.
            max_grad_norm: L2 limit of their gradient; infinity measures without clipping.
        """
        loss_scale = self.scaler.get_scale()
        parameters = [weight for weight in parameters if weight.grad is not None]
        if not parameters:
            return StepResult(0.0, True, loss_scale)
        self.scaler.unscale_(optimizer)
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        skipped = not math.isfinite(grad_norm)
        if self.scales:
            self.scaler.step(optimizer)
            self.scaler.update()
        elif not skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm, skipped, loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a scaler's state."""
        if self.scales:
            self.scaler.load_state_dict(state)
