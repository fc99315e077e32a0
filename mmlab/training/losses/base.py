"""What all objectives share: their interface, the division of sums by counts, and which samples count for how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mmlab.model.fusion_model import FusionOutput
from mmlab.types import Batch


class Objective(Protocol):
    """A loss as a sum. Stateless; random draws come from torch's generator of the device, which the trainer seeds."""

    def count(self, batch: Batch) -> int:
        """How many terms the sum over this batch has, from its masks and groups."""
        ...

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """The sum, a scalar that is differentiable even where the count is zero."""
        ...


class LossTerms:
    """The sums of one optimizer step by objective, and the counts that they are divided by.

    The counts are known before the first forward pass, so each micro-batch's gradient is already its share of the
    whole window's mean.

    >>> terms = LossTerms({"contrastive": 4})
    >>> terms.add({"contrastive": torch.tensor(6.0)})
    tensor(1.5000)
    >>> terms.means()
    {'contrastive': 1.5}

    Args:
        counts: by objective, over all micro-batches of the step.
        weights: factors of the objectives' means in the step's loss; 1 where None.
        scale: factor on the shares of the loss, and so on the gradient, but not on the means.
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
        """Take in a micro-batch's sums; its share of the step's loss comes back, ready for the backward pass."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        return self.weighted(sums)

    def weighted(self, sums: Mapping[str, Tensor]) -> Tensor:
        """The share of the step's loss that sums have, without taking them in."""
        return torch.stack([value * self._factors[name] for name, value in sums.items()]).sum()

    def means(self) -> dict[str, float]:
        """Mean of each objective that counted anything, without its weight; waits for the device."""
        return {
            name: float(total) / self.counts[name] for name, total in self._sums.items() if self.counts[name]
        }


def pairs(batch: Batch) -> Tensor:
    """(B,) bool: samples that have both an image and a text."""
    mask = batch.pixel_mask.view(torch.uint8).flatten(
        1
    )  # `any` of so many bools takes forty times as long on a CPU
    return mask.amax(1).bool() & batch.attention_mask.any(1)


def sample_weights(batch: Batch) -> Tensor:
    """(B,) factors of the samples' losses. They scale the sums and leave the counts: a mean is over samples, so that
    weights which average to one over the data leave it unbiased, and a heavy batch counts for more than a light one."""
    return torch.ones(len(batch), device=batch.input_ids.device) if batch.weights is None else batch.weights


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
