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
tf32 off CUDA             it is available on CUDA only
bf16, fp16 elsewhere      autocast and scaler were not tried on devices other than cpu and cuda
bf16 before capability 8  the GPU would emulate it, slower than fp32
fp16 with 16-bit weights  their gradients cannot be unscaled without overflow
========================  ==========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError, check_name

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepResult(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float  # L2, before clipping; infinite or NaN after an overflow
    skipped: bool  # the weights were not updated: a gradient was not finite, or there was none
    loss_scale: float  # factor used in this step; 1 without a scaler
    part_norms: dict[str, float]  # the norm of each part of the model that had a gradient


Parts = Mapping[str, Sequence[nn.Parameter]]  # the weights of each part of the model


class Precision:
    """One run's precision on one device.

    >>> precision = Precision("bf16", "cpu")
    >>> with precision.autocast():
    ...     torch.nn.Linear(2, 2)(torch.zeros(1, 2)).dtype
    torch.bfloat16

    Raises:
        OptionError: an unknown name, or a precision that the device does not support.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        check_name("precision", name, PRECISIONS)
        self.name, self.device, self.dtype = name, torch.device(device), PRECISIONS[name]
        on_gpu = self.device.type == "cuda"
        if name == "tf32" and not on_gpu:
            raise OptionError(f"tf32 is available on CUDA only, found device {self.device}; use fp32")
        if self.dtype is not None and self.device.type not in ("cpu", "cuda"):
            raise OptionError(f"{name} is supported on cpu and cuda, found device {self.device}; use fp32")
        if name == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise OptionError(
                f"bf16 needs compute capability 8.0 or later, {torch.cuda.get_device_name(self.device)} has less; "
                "use fp16"
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=name == "fp16")

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, so that a gradient that is not finite is expected now and then."""
        return self.scaler.is_enabled()

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Check that this precision can train the weights.

        Raises:
            OptionError: 16-bit weights under `fp16`, whose gradients cannot be unscaled.
        """
        halves = (torch.float16, torch.bfloat16)
        if self.name == "fp16" and any(weight.dtype in halves for weight in parameters):
            raise OptionError(
                "fp16 keeps its weights in fp32 and found 16-bit weights; call model.float() first"
            )

    def autocast(self) -> AbstractContextManager[None]:
        """The context to run the forward pass and the loss in."""
        if self.dtype is None and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to the weights' gradients, scaled if the precision scales the loss."""
        self.scaler.scale(loss).backward()

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """The context to run forward, backward and step in.

        On CUDA, fp32 products are in TF32 under `tf32` and in full precision otherwise, and attention does not use cuDNN,
        which would build a plan for every new shape (docs/decisions/0034).
        """
        cudnn: Any = torch.backends.cudnn
        backends = (torch.backends.cuda.matmul, cudnn.conv) if self.device.type == "cuda" else ()
        before = [backend.fp32_precision for backend in backends]
        attention = torch.backends.cuda.cudnn_sdp_enabled()
        for backend in backends:
            backend.fp32_precision = "tf32" if self.name == "tf32" else "ieee"
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(attention)
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value

    def clip_and_step(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Parts,
        max_grad_norm: float | Mapping[str, float] = math.inf,
        *,
        norms_of: Callable[[Parts], dict[str, float]] | None = None,
        retry: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> StepResult:
        """Unscale, clip, step and clear the gradients; no update if one is not finite, or if there is none.

        Everything that allocates memory runs through `retry` and changes nothing until it has the memory: the
        optimizer's state is made before the step, which then only writes to existing memory.

        Args:
            max_grad_norm: L2 limit of all gradients together, or of each part by itself; infinity does not clip.
            norms_of: finds the norm of each part; `part_norms` unless ranks hold different gradients.
            retry: calls the function it is given, and again if memory ran out.
        """
        loss_scale = self.scaler.get_scale()
        # before the gradients are unscaled, which cannot be done again if this fails
        retry(lambda: make_state(optimizer))
        if self.scales and any(weight.grad is not None for weights in parts.values() for weight in weights):
            self.scaler.update(loss_scale)  # forgets a step that failed after it had unscaled its gradients
            retry(lambda: self.scaler.unscale_(optimizer))
        norms = retry(lambda: (norms_of or part_norms)(parts))
        if not norms:  # no gradient on any rank
            return StepResult(0.0, True, loss_scale, {})
        grad_norm = math.hypot(*norms.values())
        finite = math.isfinite(grad_norm)
        if finite:
            _clip(parts, norms, grad_norm, max_grad_norm)
            # the scaler checks the elements: a norm can overflow although they do not
            retry(lambda: self.scaler.step(optimizer) if self.scales else optimizer.step())
        if self.scales:
            retry(self.scaler.update)
        optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm, not finite, loss_scale, norms)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty without one."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with a scaler's state; a run of another precision has none."""
        if self.scales and state:
            self.scaler.load_state_dict(state)


def own_share(gradient: Tensor) -> Tensor:
    """This rank's share of a sharded gradient; any other gradient itself."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def gradients_of(parts: Parts) -> dict[str, list[Tensor]]:
    """The gradients of each part that has any."""
    found = {name: [one.grad for one in weights if one.grad is not None] for name, weights in parts.items()}
    return {name: gradients for name, gradients in found.items() if gradients}


def part_norms(parts: Parts) -> dict[str, float]:
    """L2 norm of the gradient of each part that has any; waits for the device once."""
    gradients = gradients_of(parts)
    rest = iter(tensor_norms([tensor for of_part in gradients.values() for tensor in of_part]))
    return {name: math.hypot(*islice(rest, len(of_part))) for name, of_part in gradients.items()}


def tensor_norms(tensors: Sequence[Tensor]) -> list[float]:
    """L2 norm of each tensor; of a sharded one, of this rank's share."""
    if not tensors:
        return []
    return torch.stack(torch._foreach_norm([own_share(tensor) for tensor in tensors])).tolist()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of every weight that AdamW is about to update for the first time, as AdamW itself would."""
    num_weights = sum(len(group["params"]) for group in optimizer.param_groups)
    if not isinstance(optimizer, torch.optim.AdamW) or len(optimizer.state) == num_weights:
        return
    for group in optimizer.param_groups:
        for weight in group["params"] if group["fused"] else ():
            if weight.grad is not None and weight not in optimizer.state:
                optimizer.state[weight] = fresh_state(weight)


def fresh_state(weight: nn.Parameter) -> dict[str, Tensor]:
    """Fused AdamW's state of a weight before the first update."""
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def _clip(
    parts: Parts, norms: Mapping[str, float], grad_norm: float, limits: float | Mapping[str, float]
) -> None:
    """Scale gradients down to their limits; a pass over them only where a limit is exceeded."""
    for name, gradients in gradients_of(parts).items():
        if isinstance(limits, Mapping):
            norm, limit = norms[name], limits.get(name, math.inf)
        else:
            norm, limit = grad_norm, limits
        if norm > limit:
            torch._foreach_mul_([own_share(tensor) for tensor in gradients], limit / (norm + 1e-6))
