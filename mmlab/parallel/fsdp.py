"""Every rank holds a share of the weights, gradients and optimizer state: torch's `fully_shard` (FSDP2).

Blocks of encoders and fusion are gathered one at a time, for the forward and again for the backward pass; what is left
(embeddings, projections, heads) makes one more group, which stays whole from the one to the other. Losses may use
weights outside the model's `forward`, so the whole pass, up to its roots, is one call of the module that torch sees.

Every rank goes through the model equally often: one that has fewer micro-batches, or nothing to learn from, goes
through one of its own for nothing. Within a step all ranks must use the same weights. Under `bf16` weights are still
gathered, and gradients summed, in 32 bits: on a CPU normalisation does not take 16-bit weights beside 32-bit inputs.

Costs: gathering every block twice a micro-batch. Gradients of micro-batches before the last add up in whole, not in
shares, so that they need not be sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mmlab.errors import OptionError
from mmlab.parallel.strategies import CollectiveFailed, ReduceStrategy, Result, Roots

_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers?|stages|h)\.\d+$")


class FSDPStrategy(ReduceStrategy):
    """The strategy `fsdp`."""

    requires_equal_steps = True
    splits = False

    def check(self, *, scales: bool, splits: bool, compiles: bool) -> None:
        if scales:
            raise OptionError("fsdp has no loss scale that all ranks share; use precision='bf16' or 'fp32'")
        if splits:
            raise OptionError(
                "under fsdp the ranks gather weights from each other in every pass, so that one alone cannot go "
                "through a micro-batch again in parts; use on_out_of_memory='auto', and plan smaller batches"
            )
        if compiles:
            raise OptionError("fsdp was not tried with torch.compile; use compile=False")

    def prepare(self, model: nn.Module) -> None:
        """Share the weights out, block by block, so that no device ever holds all of them.

        Raises:
            OptionError: the model runs packed, or keeps its weights in another memory order.
        """
        if getattr(model, "is_packed", False):
            raise OptionError(
                "fsdp does not know models that run packed; use strategy='ddp', or another scheduler"
            )
        if not all(weight.is_contiguous() for weight in model.parameters()):
            raise OptionError("fsdp shares weights out by rows, found others; use channels_last=False")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        mesh = init_device_mesh(self.device.type, (self.ranks.world_size,))
        scalars = [
            weight for weight in model.parameters() if not weight.dim()
        ]  # which torch does not share out
        for weight in scalars:
            weight.data = weight.data.to(self.device)
        self._scalars = [weight for weight in scalars if weight.requires_grad]
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(scalars)}
        for block in _outermost_blocks(model):
            fully_shard(block, **options)
        whole = _Whole(model)
        self._root: Any = fully_shard(whole, **options)
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def should_overlap(self, predicted_bytes: float | None, step: int) -> bool:
        return True

    def run(self, work: Callable[[], Roots], *, reduce: bool) -> Roots:
        self._root.set_requires_gradient_sync(reduce)
        return self._root(work)

    def drain_reduction(self, problem: Exception | None) -> None:
        raise CollectiveFailed(
            f"rank {self.ranks.rank} failed where the ranks gather weights from each other: {problem}; resume from the "
            "last checkpoint, with smaller batches if memory ran out"
        )

    def extra_stats(self) -> list[float]:
        gradients = [weight.grad for weight in self._scalars]
        return [
            *(float(gradient is not None) for gradient in gradients),
            *(0.0 if gradient is None else float(gradient) for gradient in gradients),
        ]

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        num_ranks, totals = sums[: len(self._scalars)], sums[len(self._scalars) :]
        for weight, is_used, total in zip(self._scalars, num_ranks, totals, strict=False):
            weight.grad = torch.full_like(weight, total) if is_used else None

    def share(self, tensor: Tensor, like: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
            return tensor
        on_device = tensor.to(like.device)
        return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)

    def evaluate(self, work: Callable[[], Result]) -> Result:
        try:
            return self._root(work)
        except torch.OutOfMemoryError as error:
            self.drain_reduction(error)
            raise
        finally:
            self._root.reshard()


class _Whole(nn.Module):
    """What torch sees of a model: a call in which anything may be computed with its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Layers of encoders and fusion, none inside another."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # parents first
        inside = any(name.startswith(f"{block}.") for block in found)
        if _BLOCK.search(name) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return list(found.values())
