"""A contrastive loss whose negatives are those of every rank's micro-batch of the same number.

Embeddings are gathered from all ranks in the forward pass, and their gradients are summed over the ranks in the backward
pass. Each rank computes the losses of its own samples, so the ranks' sums add up to the loss of the joined micro-batch,
and so do the gradients.

Costs, for B samples on this rank and N on all: B x N similarities, two short exchanges to count, and N x 2D numbers
twice a micro-batch. Groups must mean the same image on every rank, as those of one data set do. Every rank calls `count`
and the objective equally often; a rank that fails leaves the others waiting, so that a step cannot be run again in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather  # its backward pass sums the ranks' gradients
from torch.nn import functional as F

from mmlab.training.losses.base import Objective, at_least_fp32, sample_weights
from mmlab.training.losses.contrastive import Contrastive, one_way_losses
from mmlab.types import Batch


class GlobalBatch(NamedTuple):
    """Which samples all ranks hold; rank r's rows begin at r x `num_rows`, some of them empty."""

    num_rows: int  # of the longest micro-batch
    is_pair: Tensor  # (W x num_rows,) bool, on the host
    groups: Tensor  # (W x num_rows,)

    def negatives_of(self, rank: int, size: int) -> Tensor:
        """(size, W x num_rows) bool: columns that are negatives of a rank's rows, on the host."""
        start = rank * self.num_rows
        own = slice(start, start + size)
        same = (self.groups[own, None] == self.groups) & (self.groups >= 0)
        same |= torch.arange(start, start + size)[:, None] == torch.arange(len(self.groups))
        return self.is_pair[own, None] & self.is_pair & ~same


@dataclass(frozen=True, slots=True)
class AllRanksContrastive:
    """`Contrastive` against the samples of all ranks; every method is a collective.

    Args:
        goal: the loss.
        device: on which the ranks exchange.
    """

    goal: Contrastive
    device: torch.device

    def count(self, batch: Batch) -> int:
        """Samples of this rank that have a negative on any rank."""
        found = exchange_counts(batch, self.device)
        return int(found.negatives_of(distributed.get_rank(), len(batch)).any(1).sum())

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Sum over this rank's samples of the mean of both directions, in nats."""
        found, rank, size = exchange_counts(batch, self.device), distributed.get_rank(), len(batch)
        allowed = found.negatives_of(rank, size).to(output.image_embedding.device)
        both = at_least_fp32(torch.cat([output.image_embedding, output.text_embedding], 1))
        gathered = torch.cat(all_gather(F.pad(both, (0, 0, 0, found.num_rows - size))))
        image, text = gathered.to(output.image_embedding.dtype).chunk(2, 1)
        scale, positives = output.logit_scale, torch.arange(size, device=both.device) + rank * found.num_rows
        losses = 0.5 * sum(
            one_way_losses(
                self.goal.logits(own, other, scale),
                allowed,
                num_negatives=self.goal.num_negatives,
                positives=positives,
            )
            for own, other in ((output.image_embedding, text), (output.text_embedding, image))
        )
        return (losses * sample_weights(batch)).sum()


def exchange_counts(batch: Batch, device: torch.device) -> GlobalBatch:
    """Tell all ranks which samples this one holds; a collective."""
    host = batch.host
    size, world_size = len(batch), distributed.get_world_size()
    longest = torch.tensor(size, device=device)
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    num_rows = int(longest)
    columns = torch.zeros(num_rows, 2, dtype=torch.int64)
    columns[:size, 0] = torch.from_numpy(host.is_pair)
    columns[:size, 1] = -1 if host.groups is None else torch.from_numpy(host.groups)
    into = torch.empty(world_size * num_rows, 2, dtype=torch.int64, device=device)
    distributed.all_gather_into_tensor(into, columns.to(device))
    is_pair, groups = into.cpu().unbind(1)
    return GlobalBatch(num_rows, is_pair.bool(), groups)


def over_all_ranks(goal: Objective, device: torch.device) -> Objective:
    """The objective with negatives from all ranks where it asks for them; else the objective itself."""
    if isinstance(goal, Contrastive) and goal.all_ranks:
        return AllRanksContrastive(goal, device)
    return goal
