"""The gradient of one optimizer step, on one rank or on several, and what they tell each other for it.

Every objective's sum is divided by its count over the window and over all ranks, so ranks first say how much they have
to learn from. A rank that fails tells the others before anything waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mmlab.parallel.branch import BranchRanks
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.strategies import CollectiveFailed, ReduceStrategy
from mmlab.schedule.metrics import work
from mmlab.training.losses.all_ranks import AllRanks, GlobalBatch, Interrupted
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.precision import NormsOfParts, Precision
from mmlab.training.window import Window
from mmlab.types import PATCH, Batch, BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Counted(NamedTuple):
    """A window of micro-batches, and what there is to learn from it."""

    batches: list[Batch | None]  # None in the place of nothing to learn from, where ranks' numbers must agree
    counts: dict[str, float]  # by objective, on this rank
    joined: list[GlobalBatch]  # what all ranks hold, of each micro-batch, where an objective joins it

    @property
    def learnt(self) -> list[Batch]:
        """The micro-batches with anything to learn from."""
        return [batch for batch in self.batches if batch is not None]


@dataclass(slots=True, kw_only=True)
class StepGradient:
    """Leaves the gradient of a window of micro-batches in the parameters, alike on all ranks.

    Args:
        parameters: the weights that learn.
        parts: the same by part of the model.
        norms_of: finds the norm of each part's gradient.
        branches: where the ranks are a branch each.
        seed: of one draw in the step in hand.
        retried: does something again that ran out of memory, and says so.
    """

    model: nn.Module
    objectives: Mapping[str, Objective]
    precision: Precision
    device: torch.device
    ranks: ProcessGroup
    engine: ReduceStrategy
    window: Window
    all_ranks: AllRanks | None
    branches: BranchRanks | None
    parameters: Sequence[nn.Parameter]
    parts: Mapping[str, Sequence[nn.Parameter]]
    norms_of: NormsOfParts
    seed: Callable[[int], None]
    retried: Callable[[Callable[[], Any]], Any]
    _most_work: float = field(default=0.0, init=False)  # that a rank had in this step

    def count(self, batches: Sequence[Batch], doing: str) -> Counted:
        """What there is to learn from; a collective where an objective takes negatives from all ranks.

        Args:
            doing: what ranks are told that this one is at, "step 7".
        """
        if self.all_ranks is None:
            counts = [
                {name: goal.count(batch) for name, goal in self.objectives.items()} for batch in batches
            ]
            joined: list[GlobalBatch] = []
        else:
            counts, joined = self.all_ranks.meet(batches, self.objectives, doing)
        tried = [batch if any(count.values()) else None for batch, count in zip(batches, counts, strict=True)]
        if self.all_ranks is None:
            tried = [batch for batch in tried if batch is not None]
        self.window.stand_in = batches[0] if self.engine.requires_equal_steps else None
        return Counted(
            tried, {name: sum(count[name] for count in counts) for name in self.objectives}, joined
        )

    def compute(
        self, counted: Counted, weights: Mapping[str, float], doing: str, *, reduce: bool = False
    ) -> tuple[dict[str, float], int]:
        """Leave the window's gradient in the parameters.

        Args:
            weights: by objective, the factor of its mean.
            reduce: this rank would have it reduced in the backward pass, which is done if all would.

        Returns:
            Mean losses over all ranks, and the parts of the micro-batch that was cut most.
        """
        if self.branches is not None:
            self.window.remember()
            means = self.branches.gradient(
                counted.learnt, counted.counts, weights, seed=self.seed, doing=doing
            )
            return means, 1
        totals, length, reduces = self._agree_on(counted, reduce=reduce)
        problem: Exception | None = None
        terms, num_parts, reduced = LossTerms(totals, weights), 1, False
        try:
            terms, num_parts, reduced = self.window.gradient(
                counted.batches, totals, weights, counted.joined, reduce=reduces, length=length
            )
        except Interrupted:
            pass  # the rank that gave up is named below
        except CollectiveFailed:
            raise
        except Exception as error:
            problem = error
        if not reduced:
            self.ranks.raise_if_any_failed(problem, self.device, doing)
            self.engine.reduce(self.parameters)
        return self._means(terms, totals, told=self.engine.extra_stats() if reduced else []), num_parts

    def norms_by_objective(self, counted: Counted, doing: str) -> dict[str, float]:
        """L2 norm of the gradient of each objective's mean by itself."""
        norms = {}
        for name in self.objectives:
            means, _ = self.compute(
                counted, {other: float(other == name) for other in self.objectives}, doing
            )
            if name in means:  # else there was nothing to learn from: no gradient is not a small one
                norms[name] = (
                    math.hypot(*self.norms_of(self.parts).values()) / self.precision.scaler.get_scale()
                )
            self.model.zero_grad(set_to_none=True)
        return norms

    def waiting(self, batches: Sequence[Batch]) -> dict[str, float]:
        """What the step waited for other ranks, and what it had to by the sizes of their batches."""
        if self.ranks.world_size == 1:
            return {}
        by_plan = (
            {"predicted_wait_ratio": 1 - self._work(batches) / self._most_work} if self._most_work else {}
        )
        return {"rank_wait_s": self.ranks.waited_s, **by_plan}

    def _agree_on(self, counted: Counted, *, reduce: bool) -> tuple[dict[str, float], int, bool]:
        """Counts over all ranks; micro-batches of the longest window; whether the backward pass reduces."""
        counts, lockstep = counted.counts, self.engine.requires_equal_steps
        places = [
            self.ranks.one_hot_by_rank(number)
            for number in (self._work(counted.batches), len(counted.batches))
        ]
        told = [*counts.values(), not (reduce or lockstep), *places[0], *places[1]]
        sums = iter(self.ranks.sums(told, self.device))
        totals, num_others = dict(zip(counts, islice(sums, len(counts)), strict=True)), int(next(sums))
        self._most_work = max(islice(sums, self.ranks.world_size))
        return totals, int(max(sums)) if lockstep else not num_others, not num_others

    def _means(
        self, terms: LossTerms, totals: Mapping[str, float], told: Sequence[float]
    ) -> dict[str, float]:
        """Over all ranks, of what there was anything of; with what engines have to say."""
        shares = self.retried(terms.means)
        sums = self.ranks.sums([*(shares.get(name, 0.0) for name in self.objectives), *told], self.device)
        self.engine.apply_extra_stats(sums[len(self.objectives) :])
        return {name: total for name, total in zip(self.objectives, sums, strict=False) if totals[name]}

    def _work(self, batches: Sequence[Batch | None]) -> float:
        """What plans for several ranks make alike in a step; 0 in one process, or where padded shapes do not tell."""
        if self.ranks.world_size == 1 or getattr(self.model, "is_packed", False):
            return 0.0
        shapes = [batch.shape for batch in batches if batch is not None]
        return float(sum(shape.batch_size * work(_lengths(shape)).sum() for shape in shapes))


def _lengths(shape: BatchShape) -> NDArray[np.int64]:
    """(2,) padded tokens and patches of one sample."""
    return np.array([shape.num_tokens, -(-shape.height // PATCH) * -(-shape.width // PATCH)])
