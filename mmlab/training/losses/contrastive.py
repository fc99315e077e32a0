"""Objectives over pairs: the symmetric contrastive loss, and matching with hard negatives.

A contrastive loss depends on the batch's composition: the other samples are the negatives, and more of them
make the task harder. `Contrastive(num_negatives=K)` takes the batch *size* out of the loss: the negatives'
sum of exponentials is scaled to K of them, so batches of any size estimate the loss against K negatives. What
it does not fix: the estimate inside the logarithm is biased at a finite size (too low by Jensen's inequality,
less with more negatives), and if batches consist of similar samples (sorted by size, say) the negatives are
not a random sample. Nor do the micro-batches of one rank share negatives; those of the same number on all
ranks can, see `AllRanksContrastive`.

Costs B x B similarities; matching runs the fusion on up to 3 B pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from mmlab.errors import check_numbers
from mmlab.model.fusion_model import FusionOutput
from mmlab.training.losses.base import Objective, at_least_fp32, pairs, sample_weights
from mmlab.types import Batch

# a logit whose exponential is zero; finite, so that a row without negatives has a gradient of zero, not NaN
_NEVER = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive:
    """Symmetric image-text contrastive loss; other captions of a sample's own image are not negatives.

    A sample without image, text or negatives adds nothing and is not counted.

    Args:
        num_negatives: scale the negatives to this number (see the module); None does not scale them.
        all_ranks: `FusionTrainer` takes the negatives from the micro-batches of all ranks. Called directly,
            or in a single process, the loss uses the negatives of its own batch.

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
        allowed = negatives(batch)
        to_text = one_way_losses(logits, allowed, num_negatives=self.num_negatives)
        to_image = one_way_losses(logits.T, allowed, num_negatives=self.num_negatives)
        return (0.5 * (to_text + to_image) * sample_weights(batch)).sum()

    def logits(self, rows: Tensor, columns: Tensor, logit_scale: Tensor) -> Tensor:
        """Scaled similarities (B, N) of embeddings (B, D) and (N, D)."""
        return at_least_fp32(rows @ columns.T) * logit_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Image-text matching: does a fused pair belong together? Each pair, and a hard negative of either side.

    Negatives are drawn from the batch with probability proportional to the exponential of their similarity.

    Source: Li et al. 2021, ALBEF (arXiv:2107.07651).
    """

    def count(self, batch: Batch) -> int:
        """Number of pairs, plus two negatives for every pair that has any."""
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
    """(B, B) bool: whether column j is a negative of row i: both are pairs, and they show different images.

    Without groups, or where a group is -1 (unknown), every sample is taken to show an image of its own.
    """
    whole, groups = pairs(batch), batch.groups
    same = torch.eye(len(whole), dtype=torch.bool, device=whole.device)
    if groups is not None:
        same = same | ((groups[:, None] == groups) & (groups >= 0))
    return whole[:, None] & whole & ~same


def num_with_negatives(batch: Batch) -> int:
    """Number of rows of `negatives` that have any: all pairs, or none if all show the same image."""
    return batch.host.num_pairs if batch.host.num_images > 1 else 0


def one_way_losses(
    logits: Tensor, allowed: Tensor, *, num_negatives: int | None = None, positives: Tensor | None = None
) -> Tensor:
    """Contrastive losses in which each row chooses among the columns.

    Args:
        logits: (B, N).
        allowed: (B, N) bool: which entries are negatives.
        num_negatives: scale each row's negatives to this number.
        positives: (B,) column of each row's positive; None takes the diagonal.

    Returns:
        (B,) in nats; zero for a row without negatives.
    """
    positive = logits.diagonal() if positives is None else logits.gather(1, positives[:, None]).squeeze(1)
    available = allowed.sum(1)
    scale = 0.0 if num_negatives is None else math.log(num_negatives) - available.clamp(min=1).log()
    negative = logits.masked_fill(~allowed, _NEVER).logsumexp(1) + scale
    return (torch.logaddexp(positive, negative) - positive) * (available > 0)


def _draw(similarity: Tensor, allowed: Tensor) -> Tensor:
    """Draw one allowed column a row, likelier the more similar; any if none is allowed. (B, B) -> (B,)

    If a row has a similarity that is not finite, its allowed columns are equally likely: a draw from NaN
    would end the run, on CUDA the whole process, before the loss can tell which sample caused it.
    """
    weights = similarity.masked_fill(~allowed, -torch.inf).softmax(1)
    weights = torch.where(weights.isfinite().all(1, keepdim=True), weights, allowed.to(weights.dtype))
    return torch.multinomial(torch.where(allowed.any(1, keepdim=True), weights, 1.0), 1).squeeze(1)


@dataclass(frozen=True, slots=True)
class AllRanksContrastive:
    """`Contrastive` against the samples of all ranks; every method is a collective.

    Embeddings are gathered from all ranks in the forward pass, and their gradients are summed over the ranks in the
    backward pass. Each rank computes the losses of its own samples, so the ranks' sums add up to the loss of the joined
    micro-batch, and so do the gradients.

    Costs, for B samples on this rank and N on all: B x N similarities, two short exchanges to count, and N x
    2D numbers twice a micro-batch. A group must mean the same image on every rank, as in one data set. Every
    rank calls `count` and the objective equally often; a rank that fails leaves the others waiting, so a step
    cannot be run again in parts.

    Args:
        goal: the loss.
        device: on which the ranks exchange tensors.
    """

    goal: Contrastive
    device: torch.device

    def count(self, batch: Batch) -> int:
        """Samples of this rank that have a negative on any rank."""
        return int(negatives_on_all_ranks(batch, self.device)[1].any(1).sum())

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Sum over this rank's samples of the mean of both directions, in nats."""
        num_rows, allowed = negatives_on_all_ranks(batch, self.device)
        allowed = allowed.to(output.image_embedding.device)
        both = at_least_fp32(torch.cat([output.image_embedding, output.text_embedding], 1))
        gathered = _GatheredRows.apply(F.pad(both, (0, 0, 0, num_rows - len(batch))))
        image, text = gathered.to(output.image_embedding.dtype).chunk(2, 1)
        positives = torch.arange(len(batch), device=both.device) + distributed.get_rank() * num_rows
        losses = 0.5 * sum(
            one_way_losses(
                self.goal.logits(own, other, output.logit_scale),
                allowed,
                num_negatives=self.goal.num_negatives,
                positives=positives,
            )
            for own, other in ((output.image_embedding, text), (output.text_embedding, image))
        )
        return (losses * sample_weights(batch)).sum()


def negatives_on_all_ranks(batch: Batch, device: torch.device) -> tuple[int, Tensor]:
    """Tell all ranks which samples this one holds; a collective.

    Returns:
        Rows R of the longest micro-batch, and (B, W x R) bool, on the host: which samples of the W ranks are
        negatives of this rank's. Rank r's begin at r x R, and the last of them may be empty.
    """
    host = batch.host
    size = len(batch)
    longest = torch.tensor(size, device=device)
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    num_rows = int(longest)
    columns = torch.zeros(num_rows, 2, dtype=torch.int64)
    columns[:size, 0] = torch.from_numpy(host.is_pair)
    columns[:size, 1] = -1 if host.groups is None else torch.from_numpy(host.groups)
    is_pair, groups = _GatheredRows.apply(columns.to(device)).cpu().unbind(1)
    is_pair, rows, start = is_pair.bool(), torch.arange(len(groups)), distributed.get_rank() * num_rows
    own = slice(start, start + size)
    same_image = ((groups[own, None] == groups) & (groups >= 0)) | (rows[own, None] == rows)
    return num_rows, is_pair[own, None] & is_pair & ~same_image


class _GatheredRows(torch.autograd.Function):
    """The rows of all ranks, rank after rank; all have as many. A row's gradient is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        gathered = rows.new_empty(distributed.get_world_size() * len(rows), rows.shape[1])
        distributed.all_gather_into_tensor(gathered, rows)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(summed)
        return summed.chunk(distributed.get_world_size())[distributed.get_rank()]


def over_all_ranks(goal: Objective, device: torch.device) -> Objective:
    """The objective with negatives from all ranks if it asks for them; else the objective itself."""
    if isinstance(goal, Contrastive) and goal.all_ranks:
        return AllRanksContrastive(goal, device)
    return goal
