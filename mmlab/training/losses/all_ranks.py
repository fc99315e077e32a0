"""A contrastive loss over all ranks: a micro-batch's negatives are those of every rank's micro-batch of that number.

The gradient is that of one process with the joined micro-batch. Which samples there are is told once a step, so the
counts are known before any forward pass. Then, for each micro-batch, the embeddings are gathered; every rank computes
the whole joined loss from them, takes the gradient of its own rows, and hands it to its own graph. So no collective
runs in a backward pass, and scalars such as the temperature are taught by one rank alone.

Every exchange begins with a verdict: a rank that failed since the last one says so there, instead of leaving the others
to wait. Out of memory, all do the window again, the rank that failed in more parts; anything else ends the step on all.

Costs, for N samples on all ranks: N x N similarities on every rank, two short messages and N x 2D numbers a
micro-batch. Groups must mean the same image on every rank, as those of one data set do. Other objectives keep their own
rank's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmlab.parallel.process_group import ProcessGroup
from mmlab.training.losses.base import LossTerms, Objective, at_least_fp32, pairs, sample_weights
from mmlab.training.losses.contrastive import Contrastive, negatives_among
from mmlab.training.out_of_memory import retried
from mmlab.types import Batch

AGAIN = 1  # the verdict that a rank ran out of memory and wants another attempt; above it, a rank gave up
Taught = list[tuple[Tensor, Tensor]]  # tensors of a graph and their gradients


class Interrupted(Exception):
    """Another rank ended the attempt."""

    def __init__(self, verdict: int) -> None:
        super().__init__(verdict)
        self.verdict = verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of all ranks' micro-batches of one number, rank by rank."""

    rank: int  # this one
    sizes: tuple[int, ...]  # samples of each rank
    counts: tuple[int, ...]  # those that have a negative
    whole: Tensor  # (N,) bool: both modalities
    groups: Tensor  # (N,)
    weights: Tensor  # (N,)

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    @property
    def teaches_scalars(self) -> bool:
        """Whether this is the first rank that has something to learn here."""
        return bool(self.counts[self.rank]) and not any(self.counts[: self.rank])


class AllRanks:
    """The exchange between ranks for the objectives that want all negatives; every rank has it, or none.

    Args:
        goals: these objectives, by name.
    """

    def __init__(self, goals: Mapping[str, Contrastive], ranks: ProcessGroup, device: torch.device) -> None:
        self.goals, self.ranks, self.device = dict(goals), ranks, device

    @classmethod
    def of(
        cls, objectives: Mapping[str, Objective], ranks: ProcessGroup, device: torch.device
    ) -> AllRanks | None:
        """For the objectives that want it; None where none does, or in a single process."""
        goals = {
            name: goal
            for name, goal in objectives.items()
            if isinstance(goal, Contrastive) and goal.all_ranks and ranks.world_size > 1
        }
        return cls(goals, ranks, device) if goals else None

    def meet(
        self, batches: Sequence[Batch], objectives: Mapping[str, Objective], doing: str
    ) -> tuple[list[dict[str, int]], list[GlobalBatch]]:
        """Count each micro-batch of a window by objective, and learn what the other ranks have; a collective.

        Raises:
            RunError: another rank could not; `doing` says what in the message.
        """
        counts: list[dict[str, int]] = []
        mine, problem = torch.empty(0, 4, dtype=torch.int64), None
        try:
            counts = [
                {name: 0 if name in self.goals else goal.count(batch) for name, goal in objectives.items()}
                for batch in batches
            ]
            mine = torch.cat([mine, *(_columns(number, batch) for number, batch in enumerate(batches))])
        except Exception as error:
            problem = error
        self.ranks.raise_if_any_failed(problem, self.device, doing)
        joined = self._joined(mine)
        for count, rows in zip(counts, joined, strict=False):
            count |= dict.fromkeys(self.goals, rows.counts[self.ranks.rank])
        return counts, joined

    def verdict(self, own: int) -> int:
        """The gravest verdict of all ranks; in the place of an exchange, or behind the last one."""
        return int(self.ranks.largest_of([own, 0, 0], self.device)[0])

    @property
    def gave_up(self) -> int:
        """The verdict that this rank cannot go on."""
        return AGAIN + 1 + self.ranks.rank

    def teach(
        self, output: Any, rows: GlobalBatch, terms: LossTerms, scaled: Callable[[Tensor], Tensor]
    ) -> Taught:
        """The joined losses: this rank's share goes to the terms, its gradients come back; a collective.

        Args:
            output: of this rank's micro-batch; None where it has none, or learns nothing from it.
            scaled: a loss as the backward pass wants it.

        Raises:
            Interrupted: a rank failed before.
        """
        if not any(rows.counts):
            return []
        image, text = self._gathered(output, rows)
        if not rows.counts[self.ranks.rank]:
            return []
        logit_scale = torch.as_tensor(output.logit_scale)
        image, text, scale = leaves = [
            tensor.detach().requires_grad_() for tensor in (image, text, logit_scale)
        ]
        whole, groups, weights = (
            tensor.to(self.device) for tensor in (rows.whole, rows.groups, rows.weights)
        )
        allowed = negatives_among(whole, groups)
        losses = {
            name: goal.losses(image, text, scale, allowed) * weights for name, goal in self.goals.items()
        }
        terms.add({name: each[rows.own].sum() for name, each in losses.items()})
        total = terms.weighted({name: each.sum() for name, each in losses.items()})
        image_grad, text_grad, scale_grad = torch.autograd.grad(scaled(total), leaves)
        taught = [
            (output.image_embedding, image_grad[rows.own]),
            (output.text_embedding, text_grad[rows.own]),
        ]
        if rows.teaches_scalars:
            taught.append((logit_scale, scale_grad))
        return [(tensor, gradient) for tensor, gradient in taught if tensor.requires_grad]

    def _gathered(self, output: Any, rows: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Image and text embeddings of all ranks, (N, D) each."""
        num_rows, width, dtype = max(rows.sizes), 0, torch.float32
        mine = into = None
        if output is not None:  # what takes memory comes before the verdict
            image, text = output.image_embedding.detach(), output.text_embedding.detach()
            both = at_least_fp32(torch.cat([image, text], 1))
            width, dtype = both.shape[1], both.dtype
            mine = both.new_zeros(num_rows, width)
            mine[: len(both)] = both
            into = mine.new_empty(len(rows.sizes) * num_rows, width)
        found = self.ranks.largest_of([0, width, dtype.itemsize], self.device)
        verdict, width, itemsize = map(int, found)
        if verdict:
            raise Interrupted(verdict)
        if mine is None or into is None:
            dtype = torch.float64 if itemsize == 8 else torch.float32
            mine, into = retried(
                lambda: (
                    torch.zeros(num_rows, width, dtype=dtype, device=self.device),
                    torch.empty(len(rows.sizes) * num_rows, width, dtype=dtype, device=self.device),
                ),
                self.device,
            )
        self.ranks.gather(mine, into, self.device)
        parts = [into[rank * num_rows :][:size] for rank, size in enumerate(rows.sizes)]
        half = width // 2
        joined = torch.cat(parts).to(mine.dtype if output is None else output.image_embedding.dtype)
        return joined[:, :half], joined[:, half:]

    def _joined(self, mine: Tensor) -> list[GlobalBatch]:
        """What each number's micro-batches hold, from the columns of this rank's window."""
        longest = int(self.ranks.largest(len(mine), self.device))
        if not longest:
            return []
        world_size = self.ranks.world_size
        padded = torch.full((longest, 4), -1, dtype=torch.int64)
        padded[: len(mine)] = mine
        into = torch.empty(world_size * longest, 4, dtype=torch.int64, device=self.device)
        self.ranks.gather(padded.to(self.device), into, self.device)
        by_rank = into.cpu().view(world_size, longest, 4)
        joined = []
        for number in range(int(by_rank[..., 0].max()) + 1):
            parts = [columns[columns[:, 0] == number] for columns in by_rank]
            _, whole, groups, weights = torch.cat(parts).T
            sizes = tuple(len(part) for part in parts)
            ends = list(accumulate(sizes))
            counted = negatives_among(whole.bool(), groups).any(1)
            counts = [int(counted[end - size : end].sum()) for size, end in zip(sizes, ends, strict=True)]
            joined.append(
                GlobalBatch(
                    rank=self.ranks.rank,
                    sizes=sizes,
                    counts=tuple(counts),
                    whole=whole.bool(),
                    groups=groups,
                    weights=weights.contiguous().view(torch.float64).float(),
                )
            )
        return joined


def _columns(number: int, batch: Batch) -> Tensor:
    """(B, 4) int64 on the CPU: number of the micro-batch, is a pair, group, bits of the weight."""
    groups = torch.full((len(batch),), -1) if batch.groups is None else batch.groups.cpu()
    weights = sample_weights(batch).cpu().double().view(torch.int64)
    return torch.stack([torch.full((len(batch),), number), pairs(batch).cpu().long(), groups, weights], 1)
