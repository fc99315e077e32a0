"""Schedulers that draw: they choose how often each sample comes in an epoch, another scheduler forms the batches.

`Mixed` draws sources in a wanted ratio (`mixing`), `Weighted` draws samples in proportion to weights (`weighted`).
The plan says which samples were left out (`dropped`) and which come more than once (`repeated`), and its report counts
both by source (`sources`). Costs one gather of the sizes an epoch, which the first batch waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmlab.errors import OptionError
from mmlab.schedule.base import Scheduler
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.dense import Budget
from mmlab.schedule.report import SourceShare
from mmlab.types import SampleSizes

MODALITIES = ("image-text", "text-only", "image-only")


def modality_of(sizes: SampleSizes) -> Ints:
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

    def sources_of(self, sizes: SampleSizes) -> tuple[Sequence[str], Ints]:
        """Names of the sources, and (N,) the number of each sample's source; its modality unless overridden."""
        return MODALITIES, modality_of(sizes)

    def ratios_at(self, epoch: int) -> dict[str, float]:
        """Wanted share of each source in an epoch; empty where none is asked for."""
        return {}

    def limits(self, sizes: SampleSizes) -> Limits:
        """Those of `inner`."""
        return self._inner.limits(sizes)

    def block_size(self, num_samples: int) -> int:
        """That of `inner`."""
        return self.inner.block_size(num_samples)

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        """Batches as `inner` makes them."""
        return self._inner.make_batches(sizes, rows, rng, limits)

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        """The order that `inner` gives them."""
        return self._inner.order_batches(sizes, batches, rng)

    def source_shares(self, sizes: SampleSizes, times_drawn: Ints, epoch: int) -> dict[str, SourceShare]:
        """What became of each source that the data have."""
        names, codes = self.sources_of(sizes)
        wanted, shares = self.ratios_at(epoch), {}
        for code, name in enumerate(names):
            times = times_drawn[codes == code]
            if len(times):
                shares[name] = SourceShare(
                    num_samples=len(times),
                    num_drawn=int(times.sum()),
                    num_repeats=int(np.maximum(times - 1, 0).sum()),
                    num_left_out=int((times == 0).sum()),
                    realised_ratio=float(times.sum() / max(1, times_drawn.sum())),
                    wanted_ratio=wanted.get(name),
                )
        return shares

    @property
    def _inner(self) -> Scheduler:
        return replace(self.inner, seed=self.seed, world_size=self.world_size)
