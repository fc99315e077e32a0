"""Schedulers that draw: they choose how often each sample comes in an epoch, another scheduler forms the batches.

`Mixed` draws sources in a wanted ratio (`mixing`), `Weighted` draws samples in proportion to weights (`weighted`).
The plan of a draw says which samples were left out (`dropped`) and which come more than once (`repeated`), and its
report counts both by source. Costs one gather of the sizes an epoch, which the first batch waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import OptionError
from mmlab.schedule.base import Scheduler, sizes_of
from mmlab.schedule.columns import Block, Limits, Position
from mmlab.schedule.dense import Budget
from mmlab.schedule.epoch import BlockSource, EpochBlocks
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.report import PlanReport

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import Samples, SampleSizes

MODALITIES = ("image-text", "text-only", "image-only")


def modality_of(sizes: SampleSizes) -> NDArray[np.int64]:
    """(N,) index into `MODALITIES` of each sample; one with neither text nor image counts as text-only."""
    return np.where(sizes.height == 0, 1, np.where(sizes.num_tokens == 0, 2, 0))


@dataclass(frozen=True, kw_only=True)
class Drawing(Scheduler):
    """The base of schedulers that draw. Override `draw`; the same epoch must give the same draw.

    Args:
        inner: forms batches of what was drawn, under this scheduler's `seed` and `world_size`.
    """

    inner: Scheduler = field(default_factory=Budget)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, Drawing) and self.inner.draws:
            raise OptionError(
                f"{type(self).__name__} cannot wrap {type(self.inner).__name__}: the inner draw would be lost"
            )

    @property
    def draws(self) -> bool:
        """Whether an epoch may be anything else than each sample once."""
        return True

    def draw(self, sizes: SampleSizes, epoch: int) -> NDArray[np.int64]:
        """Rows of an epoch's samples in any order, repeated where a sample comes more than once."""
        raise NotImplementedError

    def sources_of(self, sizes: SampleSizes) -> tuple[Sequence[str], NDArray[np.int64]]:
        """Names of the sources, and (N,) the number of each sample's source; its modality unless overridden."""
        return MODALITIES, modality_of(sizes)

    def ratios_at(self, epoch: int) -> dict[str, float]:
        """Wanted share of each source in an epoch; empty where none is asked for."""
        return {}

    def plan(self, samples: Samples, *, epoch: int = 0) -> DrawnPlan:
        """As `Scheduler.plan`, over the drawn samples."""
        sizes = sizes_of(samples)
        rows, blocks = self._blocks(sizes, epoch)
        return DrawnPlan(self, blocks, rows, sizes)

    def resume(
        self,
        samples: Samples,
        state: Mapping[str, Any],
        *,
        world_size: int | None = None,
    ) -> BatchPlan:
        """As `Scheduler.resume`: the rest of the same draw."""
        scheduler = self if world_size is None else replace(self, world_size=world_size)
        sizes = sizes_of(samples)
        rows, blocks = scheduler._blocks(sizes, state["epoch"])
        rest, position = blocks.resumed(state)
        return DrawnPlan(scheduler, rest, rows, sizes)._view(0, 1, position)

    def limits(self, sizes: SampleSizes) -> Limits:
        """Those of `inner`."""
        return self._inner.limits(sizes)

    def block_size(self, num_samples: int) -> int:
        """That of `inner`."""
        return self.inner.block_size(num_samples)

    def make_batches(
        self, sizes: SampleSizes, rows: NDArray[np.int64], rng: np.random.Generator, limits: Limits
    ) -> Block:
        """Batches as `inner` cuts them."""
        return self._inner.make_batches(sizes, rows, rng, limits)

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        """The order that `inner` gives them."""
        return self._inner.order_batches(sizes, batches, rng)

    @property
    def _inner(self) -> Scheduler:
        return replace(self.inner, seed=self.seed, world_size=self.world_size)

    def _blocks(self, sizes: SampleSizes, epoch: int) -> tuple[NDArray[np.int64], EpochBlocks]:
        rows = self.draw(sizes, epoch)
        drawn = sizes.take(rows)
        return rows, EpochBlocks(self, drawn, epoch, self.limits(drawn))


@dataclass(frozen=True, slots=True)
class DrawnBlocks:
    """Blocks of places in a draw, turned into blocks of sample rows."""

    blocks: BlockSource
    rows: NDArray[np.int64]  # (n,) the sample at each place of the draw

    @property
    def num_blocks(self) -> int:
        return self.blocks.num_blocks

    def build(self, block: int) -> Block:
        places, ends = self.blocks.build(block)
        return Block(self.rows[places], ends)

    def state(self, position: Position) -> dict[str, Any]:
        return self.blocks.state(position)

    def locate(self, state: Mapping[str, Any]) -> Position:
        return self.blocks.locate(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """What became of one source in an epoch."""

    num_samples: int  # in the data set
    num_drawn: int
    num_repeats: int  # of those drawn, second and later appearances of a sample
    num_left_out: int  # samples that were not drawn
    realised_ratio: float  # share of all that was drawn
    wanted_ratio: float | None

    def __str__(self) -> str:
        wanted = "" if self.wanted_ratio is None else f" (wanted {self.wanted_ratio:.2%})"
        return (
            f"{self.realised_ratio:.2%} of the epoch{wanted}: {self.num_drawn} drawn of {self.num_samples}, "
            f"{self.num_repeats} repeats, {self.num_left_out} left out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnReport(PlanReport):
    """A plan's figures, and those of each source."""

    sources: dict[str, SourceShare]


class DrawnPlan(BatchPlan):
    """A plan in which samples may be missing (`dropped`) or come more than once (`repeated`).

    Args:
        scheduler: what drew.
        blocks: batches of places in the draw.
        rows: (n,) the sample at each place.
        sizes: of all N samples.
    """

    def __init__(
        self, scheduler: Drawing, blocks: EpochBlocks, rows: NDArray[np.int64], sizes: SampleSizes
    ) -> None:
        super().__init__(
            DrawnBlocks(blocks, rows), sizes, limits=blocks.limits, even_for=scheduler.world_size
        )
        self._scheduler, self._epoch = scheduler, blocks.epoch

    @property
    def times_drawn(self) -> NDArray[np.int64]:
        """(N,) how often each sample comes."""
        return np.bincount(self.columns.order, minlength=len(self.sizes))

    @property
    def repeated(self) -> NDArray[np.int64]:
        """Rows that come more than once, ascending."""
        return np.flatnonzero(self.times_drawn > 1)

    def report(self, **options: Any) -> DrawnReport:
        """As `BatchPlan.report`, with the share of each source, also in `notes`."""
        options.setdefault("following", self._scheduler.plan(self.sizes, epoch=self._epoch + 1))
        figures = super().report(**options)
        names, codes = self._scheduler.sources_of(self.sizes)
        wanted, times = self._scheduler.ratios_at(self._epoch), self.times_drawn
        shares = {}
        for code, name in enumerate(names):
            drawn = times[codes == code]
            if len(drawn):
                shares[name] = SourceShare(
                    num_samples=len(drawn),
                    num_drawn=int(drawn.sum()),
                    num_repeats=int(drawn.sum() - (drawn > 0).sum()),
                    num_left_out=int((drawn == 0).sum()),
                    realised_ratio=float(drawn.sum() / max(1, times.sum())),
                    wanted_ratio=wanted.get(name),
                )
        known = {item.name: getattr(figures, item.name) for item in fields(figures)}
        known["notes"] += tuple(f"{name}: {share}" for name, share in shares.items())
        return DrawnReport(**known, sources=shares)
