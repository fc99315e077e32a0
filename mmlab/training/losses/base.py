"""What all objectives share: their interface, the division of sums by counts, and the weights of samples."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor

from mmlab.errors import OptionError, check_is
from mmlab.model.fusion_model import FusionOutput
from mmlab.types import Batch


class Objective(Protocol):
    """A loss as a sum. Stateless; it draws from torch's generator of the device, which the trainer seeds."""

    def count(self, batch: Batch) -> int:
        """Number of terms in the sum. Read `batch.host`: reading the batch's tensors waits for the device."""

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """The sum, a scalar that is differentiable even where the count is zero."""


class LossTerms:
    """The objectives' sums over one optimizer step, and the counts that divide them.

    The counts are known before the first forward pass, so the gradient of each micro-batch is already its share of the
    gradient of the whole window's mean.

    >>> terms = LossTerms({"contrastive": 4})
    >>> terms.add({"contrastive": torch.tensor(6.0, requires_grad=True)}).item()
    1.5
    >>> terms.means()
    {'contrastive': 1.5}

    Args:
        counts: by objective, over all micro-batches of the step.
        weights: factors of the objectives' means in the loss; 1 where None.
        scale: factor on the loss, and so on the gradient, but not on the means.
    """

    def __init__(
        self, counts: Mapping[str, float], weights: Mapping[str, float] | None = None, *, scale: float = 1.0
    ) -> None:
        self.counts = dict(counts)
        self._factors = {
            name: scale * (weights or {}).get(name, 1.0) / max(1, count) for name, count in counts.items()
        }
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Add a micro-batch's sums; returns its share of the step's loss, ready for the backward pass."""
        shares = []
        for name, value in sums.items():
            if not isinstance(value, Tensor) or value.dim() or _is_detached(value):
                wanted = f"objective {name!r} must return its sum, a scalar tensor with a gradient"
                raise OptionError(f"{wanted}; found {' '.join(repr(value).split()):.80}")
            earlier = self._sums.get(name)
            self._sums[name] = value.detach() if earlier is None else earlier + value.detach()
            shares.append(value * self._factors[name])
        return sum(shares[1:], start=shares[0])

    def means(self) -> dict[str, float]:
        """Mean of each objective that counted anything, without its weight; waits for the device."""
        counted = [name for name in self._sums if self.counts[name]]
        return {name: float(self._sums[name]) / self.counts[name] for name in counted}


def _is_detached(value: Tensor) -> bool:
    """Whether a sum lacks its gradient, which only a sum over nothing, zero, may."""
    return torch.is_grad_enabled() and not value.requires_grad and bool(value)


def count_of(name: str, goal: Objective, batch: Batch) -> int:
    """An objective's count of terms in a batch; OptionError if it is not a whole number."""
    count = goal.count(batch)
    check_is(f"count(batch) of objective {name!r}", count, Integral, "a whole number of terms")
    return count


def pairs(batch: Batch) -> Tensor:
    """(B,) bool: samples that have both an image and a text."""
    # `amax` of bytes takes a fortieth of the time of `any` of bools on a CPU
    return batch.pixel_mask.view(torch.uint8).flatten(1).amax(1).bool() & batch.attention_mask.any(1)


def sample_weights(batch: Batch) -> Tensor:
    """(B,) factors of the samples' losses. They scale the sums and not the counts: a mean is over samples, so weights
    that average to one over the data leave it unbiased."""
    return torch.ones(len(batch), device=batch.input_ids.device) if batch.weights is None else batch.weights


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
