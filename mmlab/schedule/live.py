"""An epoch whose rest can be replanned while it is read.

A `LivePlan` is read like a plan. `replan` takes another value (a budget, a batch size) and plans with it the
samples that have not been handed out; batches that were handed out stay as they are. So each sample comes
exactly once, whatever is decided on the way. The epoch is a pure function of the decisions: the pairs (batch,
value) in `history` give the same batches again. Replanning costs as much as planning, about a microsecond for
each sample that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import islice
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmlab.schedule.plan import BatchPlan
from mmlab.types import SampleSizes


class _Part(NamedTuple):
    """Batches planned under one value, from batch `first` of the epoch until the next part begins."""

    first: int
    value: float
    rows: NDArray[np.int64]  # (n,) the samples that were left; the plan numbers them from 0
    plan: BatchPlan


class _Epoch:
    """What all views of one epoch share."""

    def __init__(self, plan_rest: Callable[[SampleSizes, float], BatchPlan], sizes: SampleSizes) -> None:
        self.plan_rest, self.sizes = plan_rest, sizes
        self.lock = Lock()  # a loader may read in a thread of its own
        self.parts: list[_Part] = []
        self.num_handed = 0  # batches of the epoch, of all ranks, that have been handed out

    def replan(self, first: int, value: float) -> int:
        kept = [part for part in self.parts if part.first < first]
        rows = np.arange(len(self.sizes))
        if kept:
            last = kept[-1]
            left = np.ones(len(last.rows), dtype=bool)
            for batch in islice(last.plan, first - last.first):
                left[batch] = False
            rows = last.rows[left]
        if kept and not len(rows):
            return 0
        plan = self.plan_rest(self.sizes.take(rows), value)
        next(iter(plan), None)  # raises if the rest cannot be planned, before anything has changed
        self.parts = [*kept, _Part(first, value, rows, plan)]
        return len(rows)


class LivePlan:
    """The batches of one epoch, as lists of sample rows; the rest can still change. Safe to read in a thread.

    Only one reader at a time: the batches that the last iterator gave count as handed out.

    Args:
        plan_rest: plans samples under a value; pure.
        sizes: of all samples of the epoch, N.
        history: pairs (batch of the epoch, value from there on), the first from batch 0.
    """

    def __init__(
        self,
        plan_rest: Callable[[SampleSizes, float], BatchPlan],
        sizes: SampleSizes,
        history: Iterable[tuple[int, float]],
    ) -> None:
        self._epoch = _Epoch(plan_rest, sizes)
        for first, value in history:
            self._epoch.replan(first, value)
        self._rank, self._world_size, self._num_skipped = 0, 1, 0

    @property
    def history(self) -> list[tuple[int, float]]:
        """Pairs (batch of the epoch, value from there on), which are enough to make this plan again."""
        return [(part.first, part.value) for part in self._epoch.parts]

    def replan(self, value: float, *, agree: Callable[[float], float] = float) -> int:
        """Plan the samples that have not been handed out, with another value.

        Args:
            agree: returns the largest of the ranks' numbers. A rank that has handed out fewer batches than
                another keeps the old plan until it has handed out as many.

        Returns:
            Number of samples replanned.

        Raises:
            OptionError: the rest cannot be planned under this value; nothing has changed.
        """
        with self._epoch.lock:
            return self._epoch.replan(round(agree(self._epoch.num_handed)), value)

    def shard(self, rank: int, world_size: int) -> LivePlan:
        """The batches of one rank: every `world_size`-th."""
        view = copy(self)
        view._rank, view._world_size = rank, world_size
        return view

    def skip(self, num_steps: int) -> LivePlan:
        """The same without its first `num_steps` batches (of this rank), which count as handed out."""
        view = copy(self)
        view._num_skipped += num_steps
        return view

    def __len__(self) -> int:
        last = self._epoch.parts[-1]
        return max(0, (last.first + len(last.plan)) // self._world_size - self._num_skipped)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, place = self._epoch, self._num_skipped * self._world_size
        part: _Part | None = None
        batches: Iterator[list[int]] = iter(())
        while True:
            with epoch.lock:
                epoch.num_handed = place
                current = next(begun for begun in reversed(epoch.parts) if begun.first <= place)
                if current is not part:
                    part, plan = current, current.plan
                    if self._world_size > 1:
                        plan = plan.shard(self._rank, self._world_size)
                    batches = iter(plan.skip((place - part.first) // self._world_size))
                if (batch := next(batches, None)) is None:
                    return
                place += self._world_size
                epoch.num_handed = place
            yield part.rows[batch].tolist()
