"""Schedulers at equal memory: each gets the largest batches that are predicted to need no more than one limit.

So a scheduler that pads little may use the memory that others waste. Sizes are found by planning; nothing is
decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mmlab.errors import OptionError
from mmlab.machine import GIB, progress_bar
from mmlab.pricing.memory import MemoryModel
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import scheduler_among, scheduler_type
from mmlab.types import CostModel, SampleSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualMemory:
    """Makes schedulers whose batches keep within one limit.

    Args:
        sizes: of all samples.
        memory: predicts the bytes of a batch.
        plans_of: the plans of a scheduler that must keep within the limit, epoch by epoch.
        batch_size: of the baseline, if it sets the limit.
        options: of every scheduler, such as the seed.
    """

    sizes: SampleSizes
    memory: MemoryModel
    plans_of: Callable[[Scheduler], Iterator[BatchPlan]]
    batch_size: int
    options: Mapping[str, Any]

    def baseline(self, limit_bytes: float | None) -> tuple[Scheduler, float]:
        """`random`, and the limit: with `batch_size` samples and its own peak, or the most that fit a given limit."""
        if limit_bytes is not None:
            return self._largest("random", limit_bytes), limit_bytes
        random = self._make("random", self.batch_size)
        return random, max(float(plan.costs(self.memory).max()) for plan in self.plans_of(random))

    def schedulers(
        self,
        names: Sequence[str],
        baseline: Scheduler,
        limit_bytes: float,
        *,
        time: CostModel | None,
        packs: tuple[CostModel, Any] | None = None,
        progress: bool = False,
    ) -> dict[str, Scheduler]:
        """The schedulers of these names.

        Args:
            baseline: what `baseline` returned, with its limit.
            time: predicts the seconds of a batch; only `fastest` needs it.
            packs: the first predicts the bytes of a packed batch. Without it, `packed` gets as many tokens as the
                baseline's largest batch.

        Raises:
            OptionError: a scheduler cannot keep within the limit.
        """
        made: dict[str, Scheduler] = {}
        for name in progress_bar(names, "sizing batches", show=progress):
            if name == "random":
                made[name] = baseline
            elif name in ("memory", "fastest"):
                made[name] = self._scheduler(name, cost=self.memory, budget=limit_bytes, time=time)
            elif name == "packed" and packs is not None:
                made[name] = self._scheduler(name, cost=packs[0], budget=limit_bytes)
            elif name == "packed":
                tokens = max(float(plan.costs(self._tokens).max()) for plan in self.plans_of(baseline))
                made[name] = self._make(name, int(tokens))
            else:
                made[name] = self._largest(name, limit_bytes, time)
        return made

    @property
    def _tokens(self) -> PaddedTokens:
        return PaddedTokens(self.memory.patch)

    def _scheduler(self, name: str, **values: Any) -> Scheduler:
        """A scheduler with those of the options and `values` that it has; its batches may fill the limit."""
        return scheduler_among(name, {**self.options, "target_ratio": 1.0, **values})

    def _make(self, name: str, size: int, time: CostModel | None = None) -> Scheduler:
        """A scheduler with `size` samples, or padded tokens, a batch."""
        return self._scheduler(name, batch_size=size, budget=size, cost=self._tokens, time=time)

    def _largest(self, name: str, limit_bytes: float, time: CostModel | None = None) -> Scheduler:
        """The scheduler with the largest size that fits: at most all samples, or their padded tokens.

        The search plans a few epochs only; the size is reduced afterwards if a later epoch needs more.
        """
        least, first, most = 1, self.batch_size, len(self.sizes)
        if "budget" in scheduler_type(name).__dataclass_fields__:
            tokens = batch_costs(self._tokens, self.sizes.alone)
            least = first = math.ceil(tokens.max())
            most = int(tokens.sum())

        def fits(size: int, num_epochs: int | None = 3) -> bool:
            plans = islice(self.plans_of(self._make(name, size, time)), num_epochs)
            return all(plan.costs(self.memory).max() <= limit_bytes for plan in plans)

        size = largest_fitting(fits, least=least, first=first, most=most)
        while not fits(size, None):
            if size == least:
                raise OptionError(
                    f"scheduler {name!r} cannot stay within {limit_bytes / GIB:.2g} GiB: a batch of small samples with as "
                    "many padded tokens as the largest sample needs more; raise memory_gb, or leave the scheduler out"
                )
            size = max(least, size - 1 - size // 100)
        return self._make(name, size, time)


def largest_fitting(fits: Callable[[int], bool], *, least: int = 1, first: int, most: int) -> int:
    """The largest number up to `most` that fits, to within 1 %; `least` if none does.

    What is smaller need not fit: which samples share a batch depends on the size. So a few numbers up to an eighth above
    the one found are tried too.

    >>> largest_fitting(lambda number: number <= 41 or number == 45, first=8, most=1000)
    45
    """
    low, high = least, first
    while high < most and fits(high):
        low, high = high, 2 * high
    if high >= most and fits(most):
        return most
    high = min(high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(filter(fits, range(low, min(low + low // 8, most) + 1, 1 + low // 40)), default=low)
