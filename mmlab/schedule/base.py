"""The base of every scheduler: options in, one epoch's plan out.

A scheduler is a frozen dataclass of its options. To write one, subclass `BatchScheduler`, override `cut` (and
`block_size` where batches can be cut block by block), and add it to `mmlab.schedule.SCHEDULERS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import OptionError
from mmlab.records import Records
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.plan import BatchPlan, Block
from mmlab.schedule.ranks import split_evenly
from mmlab.types import Record, SampleSizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import CostModel


@dataclass(frozen=True, kw_only=True)
class BatchScheduler:
    """Plans the batches of an epoch from sizes alone. Pure: same options, sizes and epoch give the same plan.

    Like `pathlib.Path`, calling the base itself makes the usual kind: `BatchScheduler(batch_size=8)` is the articles'
    scheduler, sorted by image size and then text length, and `optimize_batch(dataset)` is its method there.

    Args:
        seed: chooses the order; epochs differ under one seed.
        world_size: ranks that will share the plan; the number of batches becomes a multiple of it, by splitting
            batches, never by dropping or repeating samples.
    """

    seed: int = 0
    world_size: int = 1

    def __new__(cls, **options: Any) -> BatchScheduler:
        if cls is BatchScheduler:
            from mmlab.schedule.classic import Sorted

            cls = Sorted
        return super().__new__(cls)

    def __post_init__(self) -> None:
        require_at_least("world_size", self.world_size, 1)

    def plan(self, samples: Records | SampleSizes | Sequence[Record], *, epoch: int = 0) -> BatchPlan:
        """The batches of one epoch.

        Args:
            samples: what to plan, N samples; sizes after the image policy are what counts.
            epoch: changes the composition and the order, except under a scheduler that says otherwise.

        Raises:
            OptionError: a sample that no batch may hold under this scheduler's budget.
        """
        sizes = sizes_of(samples)
        cost, budget = self.limits(sizes)
        source = EpochBlocks(self, sizes, epoch, budget)
        return BatchPlan(source, sizes, cost=cost, budget=budget, even_for=self.world_size)

    def optimize_batch(self, dataset: Any) -> BatchPlan:
        """The articles' name for planning the first epoch; reads `dataset.sizes`, decodes no image."""
        return self.plan(dataset.sizes)

    def limits(self, sizes: SampleSizes) -> tuple[CostModel | None, float | None]:
        """Cost model and budget of a batch, None where the scheduler has none."""
        return None, None

    def block_size(self, num_samples: int) -> int:
        """Samples planned together; the whole epoch unless overridden."""
        return num_samples

    def cut(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, budget: float | None
    ) -> Block:
        """Batches of `rows`, which come in random order."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FixedSize(BatchScheduler):
    """The base of schedulers whose batches have a fixed number of samples.

    Args:
        batch_size: samples a batch; leftovers form smaller ones.
    """

    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("batch_size", self.batch_size, 1)


@dataclass(frozen=True)
class EpochBlocks:
    """One epoch of a scheduler, block by block; any block can be built alone."""

    scheduler: BatchScheduler
    sizes: SampleSizes
    epoch: int
    budget: float | None

    @property
    def num_blocks(self) -> int:
        return -(-len(self.sizes) // max(1, self.scheduler.block_size(len(self.sizes))))

    def rows(self, block: int) -> NDArray[np.int64]:
        """The samples of a block, in random order."""
        num_samples = len(self.sizes)
        first, last = (num_samples * edge // self.num_blocks for edge in (block, block + 1))
        return permute(np.arange(first, last), num_samples, derive_key(self.scheduler.seed, self.epoch))

    def build(self, block: int) -> Block:
        """The batches of a block."""
        rng = np.random.Generator(np.random.Philox(derive_key(self.scheduler.seed, self.epoch, block)))
        batches = self.scheduler.cut(self.sizes, self.rows(block), rng, self.budget)
        return split_evenly(batches, self.scheduler.world_size)


def sizes_of(samples: Records | SampleSizes | Sequence[Record]) -> SampleSizes:
    """The planner's columns of whatever holds them."""
    if isinstance(samples, SampleSizes):
        return samples
    if isinstance(samples, Records):
        return samples.sizes()
    columns = {
        name: [getattr(record, name) for record in samples]
        for name in ("num_tokens", "height", "width", "group")
    }
    return SampleSizes(**{name: np.array(column) for name, column in columns.items()})


def require_at_least(name: str, value: float, limit: float) -> None:
    """Raise an OptionError that names the option, the value and the limit."""
    if value < limit:
        raise OptionError(f"{name} must be at least {limit}, found {value}")
