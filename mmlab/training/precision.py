"""Mixed precision in one object: autocast, loss scaling, unscaling, clipping and the optimizer's step.

`fp32` computes in the weights' own type, on CUDA without TF32; `tf32` lets CUDA's tensor cores round the inputs of
products; `bf16` and `fp16` run matrix products and convolutions in 16 bits under autocast, with weights, gradients and
losses in fp32; `fp16` also scales the loss so that small gradients do not vanish, and skips the steps in which a
gradient overflowed. Costs one device synchronisation a step, to read the gradient norms.

What torch supports (2.11 to 2.15): `fp32` everywhere; `tf32` on cuda; `bf16` and `fp16`, scaler included, on cpu and
cuda. On a CPU both are emulated where the instruction set has no 16-bit products (AVX512-BF16 / FP16, AMX): right, but
slower than fp32.

What is refused, and why:

========================  ==========================================================================
tf32 off CUDA             it is how CUDA's tensor cores round
bf16, fp16 elsewhere      devices other than cpu and cuda have no autocast and scaler that were tried
bf16 before capability 8  the GPU would emulate it, slower than fp32
fp16 with 16-bit weights  their gradients cannot be unscaled without overflow
========================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError, unknown_name

PRECISIONS: dict[str, torch.dtype | None] = {
    "fp32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class StepResult(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float  # L2, before clipping; infinite or NaN after an overflow
    skipped: bool  # weights left as they were: a gradient was not finite, or there was none
    loss_scale: float  # factor used in this step; 1 without a scaler
    part_norms: dict[str, float]  # the same norm of each part of the model that had a gradient


NormsOfParts = Callable[[Mapping[str, Sequence[nn.Parameter]]], dict[str, float]]


class Shares(NamedTuple):
    """How gradients are shared out over ranks."""

    num_ranks: int
    total: Callable[[Sequence[float]], list[float]]  # numbers summed over the ranks


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
        if name == "tf32" and self.device.type != "cuda":
            raise OptionError(f"tf32 is how CUDA's tensor cores round, found device {self.device}; use fp32")
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
        self._done: dict[Any, Any] = {}  # what the step in hand has done so far

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

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss times the factor that the precision asks for."""
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor | None, taught: Sequence[tuple[Tensor, Tensor | None]] = ()) -> None:
        """Add the gradient of a loss, scaled where the precision asks for it, in one pass with what else is known.

        Args:
            taught: tensors of the graph, and gradients of theirs that are scaled already; None is one.
        """
        roots: list[tuple[Tensor, Tensor | None]] = (
            [*taught] if loss is None else [(self.scaled(loss), None), *taught]
        )
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Around forward, backward and step: products in TF32 under `tf32`, in full fp32 otherwise (CUDA only)."""
        cudnn: Any = torch.backends.cudnn
        backends = (torch.backends.cuda.matmul, cudnn.conv)
        if self.device.type != "cuda":
            yield
            return
        before = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "tf32" if self.name == "tf32" else "ieee"
        try:
            yield
        finally:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter] | Mapping[str, Sequence[nn.Parameter]],
        max_grad_norm: float | Mapping[str, float] = math.inf,
        norms_of: NormsOfParts | None = None,
    ) -> StepResult:
        """Unscale once, clip once, step unless a gradient is not finite or there is none, and clear the gradients.

        Where it fails because memory ran out it may be called again, and goes on where it stopped. Norms take one pass
        over the gradients; clipping takes another only where a limit is exceeded.

        Args:
            parameters: the weights, or the weights of each part of the model.
            max_grad_norm: L2 limit of all gradients together, or of each part by itself; infinity does not clip.
            norms_of: `part_norms`, or what finds them where not every rank has all gradients.
        """
        parts = parameters if isinstance(parameters, Mapping) else {"all": list(parameters)}
        gradients = gradients_of(parts)
        done = self._done
        if not gradients and not done and norms_of is None:
            return StepResult(0.0, True, self.scaler.get_scale(), {})
        if "loss_scale" not in done:
            done["loss_scale"] = self.scaler.get_scale()
        if "unscaled" not in done:
            self.scaler.unscale_(optimizer)
            done["unscaled"] = True
        if "norms" not in done:
            done["norms"] = _norms(gradients) if norms_of is None else norms_of(parts)
        if not done["norms"]:  # on no rank
            self._done = {}
            return StepResult(0.0, True, self.scaler.get_scale(), {})
        grad_norm = math.hypot(*done["norms"].values())
        finite = math.isfinite(grad_norm)
        for name, tensors in gradients.items():
            if not finite or ("clipped", name) in done:
                continue
            if isinstance(max_grad_norm, Mapping):
                norm, limit = done["norms"][name], max_grad_norm.get(name, math.inf)
            else:
                norm, limit = grad_norm, max_grad_norm
            if norm > limit:
                torch._foreach_mul_([_own(tensor) for tensor in tensors], limit / (norm + 1e-6))
            done["clipped", name] = True
        if "stepped" not in done:
            if finite and self.scales:  # the scaler looks at entries: a norm can overflow where they do not
                self.scaler.step(optimizer)
            elif finite:
                optimizer.step()
            done["stepped"] = True
        if self.scales and "scale_updated" not in done:
            self.scaler.update()
            done["scale_updated"] = True
        optimizer.zero_grad(set_to_none=True)
        self._done = {}
        return StepResult(grad_norm, not finite, done["loss_scale"], done["norms"])

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a scaler's state."""
        if self.scales:
            self.scaler.load_state_dict(state)


def _own(gradient: Tensor) -> Tensor:
    """What this rank has of a gradient that is shared out."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def gradients_of(parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, list[Tensor]]:
    """The gradients of each part that has any."""
    found = {
        name: [weight.grad for weight in weights if weight.grad is not None]
        for name, weights in parts.items()
    }
    return {name: gradients for name, gradients in found.items() if gradients}


def part_norms(parts: Mapping[str, Sequence[nn.Parameter]], shares: Shares | None = None) -> dict[str, float]:
    """L2 norm of the gradients of each part that has any: one pass over them, one wait for each device.

    Args:
        shares: where ranks have a share of each weight; None where this one has all.
    """
    return _norms(gradients_of(parts), shares)


def _norms(gradients: Mapping[str, Sequence[Tensor]], shares: Shares | None = None) -> dict[str, float]:
    tensors = [tensor for of_part in gradients.values() for tensor in of_part]
    if not tensors:
        return {}
    apart = torch._foreach_norm([_own(tensor) for tensor in tensors])
    norms = [norm.to(apart[0].device) for norm in apart]
    if shares is not None:  # what every rank has whole is counted once
        factor = shares.num_ranks**-0.5
        norms = [
            norm if hasattr(tensor, "to_local") else norm * factor
            for tensor, norm in zip(tensors, norms, strict=True)
        ]
    of_parts = [
        torch.stack(norms_of_part).to(torch.float32 if shares is None else torch.float64)
        for norms_of_part in _split(norms, [len(of_part) for of_part in gradients.values()])
    ]
    found = torch.stack([torch.linalg.vector_norm(norms_of_part) for norms_of_part in of_parts]).tolist()
    if shares is not None:
        found = [math.sqrt(each) for each in shares.total([norm**2 for norm in found])]
    return dict(zip(gradients, found, strict=True))


def _split(values: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    rest = iter(values)
    return (list(islice(rest, size)) for size in sizes)
