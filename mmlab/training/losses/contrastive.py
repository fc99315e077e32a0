"""Objectives over pairs: the symmetric contrastive loss, and matching with hard negatives.

A contrastive loss depends on the batch's composition: the other samples are the negatives, and more of them make the
task harder. `Contrastive(num_negatives=K)` takes the batch *size* out of the loss: the negatives' sum of
exponentials is scaled to K of them, so batches of any size estimate the loss against K negatives. What it does not
fix: the estimate inside the logarithm is biased at a finite size (too low by Jensen's inequality, less with more
negatives), and if batches are made of similar samples (sorted by size, say) the negatives are not a fair draw. Nor
can micro-batches see each other's negatives; the ranks' micro-batches of one number can, see `mmlab.training.losses.all_ranks`.

Costs B x B similarities; matching runs the fusion on up to 3 B pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.errors import check_numbers
from mmlab.model.fusion_model import FusionOutput
from mmlab.training.losses.base import at_least_fp32, pairs, sample_weights
from mmlab.types import Batch

# a logit whose exponential is zero; finite, so that a row without negatives has a gradient of zero, not NaN
_NEVER = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive:
    """Symmetric image-text contrastive loss; other captions of a sample's own image are not negatives.

    A sample without image, text or negatives adds nothing and is not counted.

    Args:
        num_negatives: scale the negatives to this number (see the module); None takes those of the batch as they are.
        all_ranks: `FusionTrainer` takes the negatives from the micro-batches of all ranks. Called by itself, and in a
            single process, the loss is that of its batch.

    Raises:
        OptionError: fewer than one negative.

    Source: Radford et al. 2021 (arXiv:2103.00020).
    """

    num_negatives: int | None = None
    all_ranks: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def count(self, batch: Batch) -> int:
        """Samples with both modalities and at least one negative."""
        return num_with_negatives(batch)

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """Sum over the samples of the mean of both directions, in nats."""
        logits = self.logits(output.image_embedding, output.text_embedding, output.logit_scale)
        losses = contrastive_losses(logits, negatives(batch), num_negatives=self.num_negatives)
        return (losses * sample_weights(batch)).sum()

    def logits(self, rows: Tensor, columns: Tensor, logit_scale: Tensor) -> Tensor:
        """Scaled similarities (B, N) of embeddings (B, D) and (N, D)."""
        return at_least_fp32(rows @ columns.T) * logit_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Image-text matching: does this fused pair belong together? Each pair, and a hard negative from either side.

    Negatives are drawn in the batch in proportion to the exponential of their similarity.

    Source: Li et al. 2021, ALBEF (arXiv:2107.07651).
    """

    def count(self, batch: Batch) -> int:
        """Pairs, and two negatives for every pair that has any."""
        return batch.host.num_pairs + 2 * num_with_negatives(batch)

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """Sum of the binary cross-entropies, in nats."""
        allowed = negatives(batch)
        rows = torch.arange(len(batch), device=allowed.device)
        similarity = (output.image_embedding @ output.text_embedding.T * output.logit_scale).detach().float()
        other_texts, other_images = _draw(similarity, allowed), _draw(similarity.T, allowed)
        images, texts = torch.cat([rows, rows, other_images]), torch.cat([rows, other_texts, rows])
        logits = at_least_fp32(output.match(images, texts))
        target = (torch.arange(3 * len(batch), device=rows.device) < len(batch)).to(logits.dtype)
        counted = torch.cat([pairs(batch), allowed.any(1), allowed.any(1)])
        weight = counted.to(logits.dtype) * sample_weights(batch).repeat(3)
        return F.binary_cross_entropy_with_logits(logits, target, weight=weight, reduction="sum")


def negatives(batch: Batch) -> Tensor:
    """(B, B) bool: column j is a negative of row i. Both are pairs and they show different images.

    Without groups, or where a group is -1 (unknown), every sample is taken to show an image of its own.
    """
    whole, groups = pairs(batch), batch.groups
    same = torch.eye(len(whole), dtype=torch.bool, device=whole.device)
    if groups is not None:
        same = same | (groups[:, None] == groups) & (groups >= 0)
    return whole[:, None] & whole & ~same


def num_with_negatives(batch: Batch) -> int:
    """Rows of `negatives` with any: all pairs, or none where they all show one image."""
    return batch.host.num_pairs if batch.host.num_images > 1 else 0


def contrastive_losses(logits: Tensor, allowed: Tensor, *, num_negatives: int | None = None) -> Tensor:
    """Per-sample symmetric contrastive losses.

    Args:
        logits: (B, B), images by texts; the diagonal holds the positives.
        allowed: (B, B) bool, symmetric: which entries are negatives.
        num_negatives: scale each row's negatives to this number.

    Returns:
        (B,) in nats; zero for a sample without negatives.
    """
    to_text = one_way_losses(logits, allowed, num_negatives=num_negatives)
    return 0.5 * (to_text + one_way_losses(logits.T, allowed, num_negatives=num_negatives))


def one_way_losses(
    logits: Tensor, allowed: Tensor, *, num_negatives: int | None = None, positives: Tensor | None = None
) -> Tensor:
    """The same with each row choosing among the columns only, (B,).

    Args:
        positives: (B,) column of each row's positive; None takes the diagonal.
    """
    positive = logits.diagonal() if positives is None else logits.gather(1, positives[:, None]).squeeze(1)
    available = allowed.sum(1)
    scale = 0.0 if num_negatives is None else math.log(num_negatives) - available.clamp(min=1).log()
    negative = logits.masked_fill(~allowed, _NEVER).logsumexp(1) + scale
    return (torch.logaddexp(positive, negative) - positive) * (available > 0)


def _draw(similarity: Tensor, allowed: Tensor) -> Tensor:
    """One allowed column a row, likelier the more similar; any column in a row that allows none. (B, B) -> (B,)

    Where a similarity is not finite all allowed columns are alike: a draw from NaN would end the run, on CUDA the whole
    process, before the loss can tell whose sample it was.
    """
    weights = similarity.masked_fill(~allowed, -torch.inf).softmax(1)
    weights = torch.where(weights.isfinite().all(1, keepdim=True), weights, allowed.to(weights.dtype))
    return torch.multinomial(torch.where(allowed.any(1, keepdim=True), weights, 1.0), 1).squeeze(1)
