"""The base of every scheduler: options in, one epoch's plan out.

A scheduler is a frozen dataclass of its options. To write one, subclass `Scheduler`, override `make_batches` (and
`block_size`, where an epoch can be planned in parts), and add it to `mmlab.schedule.schedulers.SCHEDULERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmlab.errors import DataError, check_numbers
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.epoch import EpochBlocks
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.report import SourceShare
from mmlab.types import SIZE_COLUMNS, HasSizes, Samples, SampleSizes

BLOCK_SIZE = 32768  # samples planned together where an epoch is planned in parts: tens of milliseconds


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Plans the batches of an epoch from sizes alone. Pure: same options, sizes and epoch give the same plan.

    Args:
        seed: chooses the order; epochs differ under one seed.
        world_size: ranks that will share the plan; the number of batches becomes a multiple of it, by splitting
            batches, never by dropping or repeating samples.
    """

    seed: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_numbers(self)

    def plan(self, samples: Samples, *, epoch: int = 0) -> BatchPlan:
        """The batches of one epoch.

        Args:
            samples: what to plan, N samples; their sizes should be those after the image policy.
            epoch: changes composition and order, except under a scheduler that says otherwise.

        Raises:
            DataError: these are no samples.
            OptionError: a sample that no batch may hold under this scheduler's budget; or, when the batches are read,
                too few samples for `world_size` ranks.
        """
        sizes = sizes_of(samples)
        return BatchPlan(EpochBlocks.of(self, sizes, epoch), sizes)

    def resume(
        self, samples: Samples, state: Mapping[str, Any], *, world_size: int | None = None
    ) -> BatchPlan:
        """The rest of an epoch, from the `state_dict` of a plan or of its iterator; nothing is replayed.

        Args:
            samples: the same samples that were planned.
            state: where the epoch stands.
            world_size: number of ranks that go on; None keeps this scheduler's. With another number than
                before, the samples that are left are replanned; none is lost or repeated.

        Raises:
            DataError: the state is of other data, another seed or other options, or of no plan.
        """
        scheduler = self if world_size is None else replace(self, world_size=world_size)
        sizes = sizes_of(samples)
        rest, position = EpochBlocks.of(scheduler, sizes, state.get("epoch", 0)).resumed(state)
        return BatchPlan(rest, sizes, start=position)

    def draw(self, sizes: SampleSizes, epoch: int) -> Ints | None:
        """Rows of an epoch's samples; None, unless overridden, means each sample once."""
        return None

    def limits(self, sizes: SampleSizes) -> Limits:
        """What a batch may cost; no limit unless overridden."""
        return Limits()

    def block_size(self, num_samples: int) -> int:
        """Samples planned together; the whole epoch unless overridden."""
        return num_samples

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        """Batches of `rows`, of which there is one at least; they come in random order."""
        raise NotImplementedError

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        """The batches in the order of training; as they were made unless overridden."""
        return batches

    def source_shares(self, sizes: SampleSizes, times_drawn: Ints, epoch: int) -> dict[str, SourceShare]:
        """What became of each source of samples, for the plan's report; empty unless overridden."""
        return {}


def sizes_of(samples: Samples) -> SampleSizes:
    """The planner's columns of any kind of samples.

    Raises:
        DataError: they are none.
    """
    if isinstance(samples, SampleSizes):
        return samples
    if isinstance(samples, HasSizes):
        return samples.sizes() if callable(samples.sizes) else samples.sizes  # a property of data sets
    try:
        found: Any = {name: np.array([getattr(record, name) for record in samples]) for name in SIZE_COLUMNS}
    except (AttributeError, TypeError) as error:
        kind = type(samples).__name__
        raise DataError(
            f"samples must be records, SampleSizes, or have sizes(); found a {kind}: {error}"
        ) from None
    return SampleSizes(**found)
