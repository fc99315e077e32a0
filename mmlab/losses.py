"""Objectives: each gives a *sum* over samples and, before any forward pass, the *count* that the sum is to be
divided by.

Sums and counts, never means: a step over several micro-batches divides by the counts of all of them, so that its
gradient does not depend on how the samples were cut. Add an objective with one entry in `OBJECTIVES` or by giving
the trainer an object.

A contrastive loss depends on the batch's composition: the other samples are the negatives, and more of them make the
task harder. `Contrastive(num_negatives=K)` takes the batch *size* out of the loss: the negatives' sum of
exponentials is scaled to K of them, so batches of any size estimate the loss against K negatives. What it does not
fix: the estimate inside the logarithm is biased at a finite size (too low by Jensen's inequality, less with more
negatives), and if batches are made of similar samples (sorted by size, say) the negatives are not a fair draw. Nor
can micro-batches see each other's negatives.

Costs B x B similarities; matching runs the fusion on up to 3 B pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.errors import OptionError
from mmlab.model import FusionOutput, LossModel
from mmlab.types import Batch

# a logit whose exponential is zero; finite, so that a row without negatives has a gradient of zero, not NaN
_NEVER = -1e9


class Objective(Protocol):
    """A loss as a sum. Stateless; random draws come from torch's generator of the device, which the trainer seeds."""

    def count(self, batch: Batch) -> int:
        """How many terms the sum over this batch has, from its masks and groups."""
        ...

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """The sum, a scalar that is differentiable even where the count is zero."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive:
    """Symmetric image-text contrastive loss; other captions of a sample's own image are not negatives.

    A sample without image, text or negatives adds nothing and is not counted.

    Args:
        num_negatives: scale the negatives to this number (see the module); None takes those of the batch as they are.

    Raises:
        OptionError: fewer than one negative.

    Source: Radford et al. 2021 (arXiv:2103.00020).
    """

    num_negatives: int | None = None

    def __post_init__(self) -> None:
        if self.num_negatives is not None and self.num_negatives < 1:
            raise OptionError(f"num_negatives must be at least 1, found {self.num_negatives}")

    def count(self, batch: Batch) -> int:
        """Samples with both modalities and at least one negative."""
        return int(negatives(batch).any(1).sum())

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """Sum over the samples of the mean of both directions, in nats."""
        similarity = output.image_embedding @ output.text_embedding.T  # (B, B) image rows, text columns
        logits = _at_least_fp32(similarity) * output.logit_scale
        losses = contrastive_losses(logits, negatives(batch), num_negatives=self.num_negatives)
        return (losses * sample_weights(batch)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Image-text matching: does this fused pair belong together? Each pair, and a hard negative from either side.

    Negatives are drawn in the batch in proportion to the exponential of their similarity.

    Source: Li et al. 2021, ALBEF (arXiv:2107.07651).
    """

    def count(self, batch: Batch) -> int:
        """Pairs, and two negatives for every pair that has any."""
        return int(pairs(batch).sum() + 2 * negatives(batch).any(1).sum())

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """Sum of the binary cross-entropies, in nats."""
        allowed = negatives(batch)
        rows = torch.arange(len(batch), device=allowed.device)
        similarity = (output.image_embedding @ output.text_embedding.T * output.logit_scale).detach().float()
        other_texts, other_images = _draw(similarity, allowed), _draw(similarity.T, allowed)
        images, texts = torch.cat([rows, rows, other_images]), torch.cat([rows, other_texts, rows])
        logits = _at_least_fp32(output.match(images, texts))
        target = (torch.arange(3 * len(batch), device=rows.device) < len(batch)).to(logits.dtype)
        counted = torch.cat([pairs(batch), allowed.any(1), allowed.any(1)])
        weight = counted.to(logits.dtype) * sample_weights(batch).repeat(3)
        return F.binary_cross_entropy_with_logits(logits, target, weight=weight, reduction="sum")


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """The loss that a `LossModel` computes itself, turned back from its mean into a sum."""

    model: LossModel

    def count(self, batch: Batch) -> int:
        """How many samples or label tokens the model's mean is over."""
        return int(self.model.num_terms(batch))

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Sum over them, in the model's own unit.

        Raises:
            OptionError: the batch weighs its samples, which a mean that is made inside the model cannot.
        """
        if batch.weights is not None:
            raise OptionError(
                "the batch has loss weights, but this model computes its own mean loss, in which all samples count "
                "alike; weigh by sampling without correction instead"
            )
        return _at_least_fp32(output.loss) * self.model.num_terms(batch)


OBJECTIVES: dict[str, type] = {"contrastive": Contrastive, "matching": Matching}


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
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Take in a micro-batch's sums; its share of the step's loss comes back, ready for the backward pass."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        return torch.stack([value / max(1, self.counts[name]) for name, value in sums.items()]).sum()

    def means(self) -> dict[str, float]:
        """Mean of each objective that counted anything; waits for the device."""
        return {
            name: float(total) / self.counts[name] for name, total in self._sums.items() if self.counts[name]
        }


def pairs(batch: Batch) -> Tensor:
    """(B,) bool: samples that have both an image and a text."""
    return batch.pixel_mask.flatten(1).any(1) & batch.attention_mask.any(1)


def sample_weights(batch: Batch) -> Tensor:
    """(B,) factors of the samples' losses. They scale the sums and leave the counts: a mean is over samples, so that
    weights which average to one over the data leave it unbiased, and a heavy batch counts for more than a light one."""
    return torch.ones(len(batch), device=batch.input_ids.device) if batch.weights is None else batch.weights


def negatives(batch: Batch) -> Tensor:
    """(B, B) bool: column j is a negative of row i. Both are pairs and they show different images.

    Without groups, or where a group is -1 (unknown), every sample is taken to show an image of its own.
    """
    whole = pairs(batch)
    same = torch.eye(len(batch), dtype=torch.bool, device=whole.device)
    if batch.groups is not None:
        same = same | (batch.groups[:, None] == batch.groups) & (batch.groups >= 0)
    return whole[:, None] & whole & ~same


def contrastive_losses(logits: Tensor, allowed: Tensor, *, num_negatives: int | None = None) -> Tensor:
    """Per-sample symmetric contrastive losses.

    Args:
        logits: (B, B), images by texts; the diagonal holds the positives.
        allowed: (B, B) bool, symmetric: which entries are negatives.
        num_negatives: scale each row's negatives to this number.

    Returns:
        (B,) in nats; zero for a sample without negatives.
    """
    positive = logits.diagonal()
    available = allowed.sum(1)
    scale = 0.0 if num_negatives is None else math.log(num_negatives) - available.clamp(min=1).log()

    def one_way(logits: Tensor) -> Tensor:
        negative = logits.masked_fill(~allowed, _NEVER).logsumexp(1) + scale
        return torch.logaddexp(positive, negative) - positive

    return 0.5 * (one_way(logits) + one_way(logits.T)) * (available > 0)


def _draw(similarity: Tensor, allowed: Tensor) -> Tensor:
    """One allowed column a row, likelier the more similar; any column in a row that allows none. (B, B) -> (B,)"""
    weights = similarity.masked_fill(~allowed, -torch.inf).softmax(1)
    return torch.multinomial(torch.where(allowed.any(1, keepdim=True), weights, 1.0), 1).squeeze(1)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
