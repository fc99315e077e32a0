"""Mixing sources in a wanted ratio, in batches of one modality each.

A source is all samples of one modality (image and text, text only, image only), or whatever the caller names. A batch
has one modality: a text-only sample in a batch of pairs would be padded with a whole image. The batches of one step,
one a rank, have one modality as well, so that no rank waits for another that has images to encode.
`homogeneous=False` mixes modalities.

The ratio counts samples, not tokens. It may change from epoch to epoch, along points given beforehand: plans are pure, so
they do not follow the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmlab.errors import OptionError, check_name
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.drawing import Drawing, modality_of
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.packed import Packed
from mmlab.schedule.ranks import split_evenly
from mmlab.types import SampleSizes

Ratios = Mapping[str, float]
LENGTHS = ("keep", "undersample", "oversample")


@dataclass(frozen=True, kw_only=True)
class Mixed(Drawing):
    """Draws sources in the wanted ratio and spreads them evenly over the epoch.

    Each source has one shuffled order, which is read round and round: an epoch goes on where the one before stopped.
    So a source that gets fewer places than it has samples repeats none in an epoch, and one that gets more repeats all
    equally often, give or take one. Under a constant ratio no sample comes twice before all others came once.

    Args:
        ratios: wanted share of each source, by name; they are scaled to sum to one. Points `(epoch, shares)` make a
            ratio that moves in straight lines from point to point, constant before the first and after the last.
            None takes each sample exactly once.
        length: samples of an epoch under a ratio. "keep": as many as the data have. "undersample": as many as
            possible without a repeat. "oversample": as few as needed to leave out none.
        sources: (N,) name of each sample's source; None takes the modality, one of `MODALITIES`.
        homogeneous: whether each batch has one modality; None means yes, unless `inner` is `Packed`, which fills a
            stream of text and one of images. A modality with fewer samples than ranks joins the most frequent one.

    Raises:
        OptionError: shares that are negative, all zero, or do not name the sources that the data have.
    """

    ratios: Ratios | Sequence[tuple[int, Ratios]] | None = None
    length: str = "keep"
    sources: Sequence[str] | None = field(default=None, repr=False, compare=False)
    homogeneous: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("length", self.length, LENGTHS)
        epochs = [epoch for epoch, _ in self._points]
        if self.draws and not epochs:
            raise OptionError(
                "ratios must have a point (epoch, shares) at least; None takes each sample once"
            )
        if epochs != sorted(set(epochs)):
            raise OptionError(f"the points of ratios must be at ascending epochs, found {epochs}")
        for epoch, shares in self._points:
            if min(shares.values(), default=0.0) < 0 or not 0 < sum(shares.values()) < np.inf:
                raise OptionError(f"ratios must not be negative or all zero, found {shares} at epoch {epoch}")
            if shares.keys() != self._points[0][1].keys():
                raise OptionError(
                    f"every point of ratios must name the same sources, found {shares} at {epoch}"
                )

    @property
    def draws(self) -> bool:
        """Whether a ratio is asked for."""
        return self.ratios is not None

    def sources_of(self, sizes: SampleSizes) -> tuple[Sequence[str], Ints]:
        """Names of the sources, and (N,) the number of each sample's source."""
        if self.sources is None:
            return super().sources_of(sizes)
        if len(self.sources) != len(sizes):
            raise OptionError(
                f"sources must name each of {len(sizes)} samples, found {len(self.sources)} names"
            )
        names, codes = np.unique(np.asarray(self.sources), return_inverse=True)
        return names.tolist(), codes

    def ratios_at(self, epoch: int) -> dict[str, float]:
        """Wanted share of each source in an epoch, summing to one; empty without a ratio."""
        if not self.draws:
            return {}
        epochs = [point for point, _ in self._points]
        shares = {
            name: np.interp(epoch, epochs, [point[name] / sum(point.values()) for _, point in self._points])
            for name in self._points[0][1]
        }
        return {name: float(share) for name, share in shares.items()}

    def draw(self, sizes: SampleSizes, epoch: int) -> Ints | None:
        """Rows of an epoch's samples, source after source."""
        if not self.draws:
            return None
        names, codes = self.sources_of(sizes)
        counts = np.bincount(codes, minlength=len(names)).tolist()
        available = {name: count for name, count in zip(names, counts, strict=True) if count}
        self._check_names(available)
        before = [self._quotas(available, earlier) for earlier in range(epoch)]
        drawn = []
        for name, quota in self._quotas(available, epoch).items():
            code, start = list(names).index(name), sum(quotas[name] for quotas in before)
            places = np.arange(start, start + quota) % available[name]
            order = permute(places, available[name], derive_key(self.seed, code))
            drawn.append(np.flatnonzero(codes == code)[order])
        return np.concatenate(drawn)

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        """Batches of one modality each; the batches of one step, one a rank, are of one modality too."""
        inner = self._inner
        apart = not isinstance(inner, Packed) if self.homogeneous is None else self.homogeneous
        modality = modality_of(sizes)[rows] if apart else np.zeros(len(rows), np.int64)
        counts = np.bincount(modality, minlength=1)
        modality[counts[modality] < self.world_size] = np.argmax(counts)
        parts, places = [], []
        for code in np.unique(modality):
            batches = inner.make_batches(sizes, rows[modality == code], rng, limits)
            parts.append(inner.order_batches(sizes, split_evenly(batches, self.world_size), rng))
            num_steps = len(parts[-1].ends) // self.world_size
            places.append((np.arange(num_steps) + rng.random(num_steps)) / num_steps)
        steps = np.argsort(np.concatenate(places))[:, None] * self.world_size
        return Block.join(parts).pick((steps + np.arange(self.world_size)).ravel())

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        """As they were cut."""
        return batches

    @property
    def _points(self) -> Sequence[tuple[int, Ratios]]:
        if self.ratios is None:
            return ()
        return ((0, self.ratios),) if isinstance(self.ratios, Mapping) else self.ratios

    def _check_names(self, available: Mapping[str, int]) -> None:
        wanted = {name for _, shares in self._points for name, share in shares.items() if share > 0}
        if missing := available.keys() - self._points[0][1].keys():
            raise OptionError(
                f"ratios name {', '.join(self._points[0][1])}, the data also have {', '.join(sorted(missing))}; "
                "give 0 to leave a source out"
            )
        if absent := wanted - available.keys():
            raise OptionError(
                f"ratios ask for {', '.join(sorted(absent))}, of which the data have no sample; "
                f"they have {', '.join(available)}"
            )

    def _quotas(self, available: Mapping[str, int], epoch: int) -> dict[str, int]:
        """Samples to draw of each source: the shares of the epoch's length, rounded so that they add up to it."""
        ratios = self.ratios_at(epoch)
        shares, counts = np.array([ratios[name] for name in available]), np.array(list(available.values()))
        # epoch lengths at which each source comes exactly once
        once = counts[shares > 0] / shares[shares > 0]
        length = {"keep": counts.sum(), "undersample": once.min(), "oversample": once.max()}[self.length]
        exact = shares * round(float(length))
        quotas = np.floor(exact).astype(np.int64)
        quotas[np.argsort(quotas - exact, kind="stable")[: round(float(exact.sum())) - quotas.sum()]] += 1
        if self.length == "undersample":
            quotas = np.minimum(quotas, counts)
        elif self.length == "oversample":
            quotas = np.where(shares > 0, np.maximum(quotas, counts), 0)
        return dict(zip(available, quotas.tolist(), strict=True))
