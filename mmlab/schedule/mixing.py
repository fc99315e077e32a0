"""Schedulers that draw: they choose how often each sample comes in an epoch; another forms the batches.

`Weighted` draws samples in proportion to weights, `Mixed` draws from sources in a given ratio. The plan says
which samples were left out (`dropped`) and which come more than once (`repeated`), and its report counts both
by source (`sources`). Costs one gather of the sizes per epoch, which the first batch waits for.

A source is all samples of one modality (image and text, text only, image only), or whatever the caller names. A batch
has one modality: a text-only sample in a batch of pairs would be padded with a whole image. The batches of
one step, one per rank, have one modality as well, so that no rank waits for another that has images to
encode. `homogeneous=False` mixes modalities.

The ratio counts samples, not tokens. It may change from epoch to epoch, by points given beforehand: plans are
pure, so they cannot follow the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, check_is, check_name
from mmlab.schedule.base import Scheduler
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.dense import Budget
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.packed import Packed
from mmlab.schedule.ranks import split_evenly
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

    Raises:
        OptionError: `inner` is no scheduler, or draws itself.
    """

    inner: Scheduler = field(default_factory=Budget)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is("inner", self.inner, Scheduler, "a scheduler, as make_scheduler() gives")
        if isinstance(self.inner, Drawing) and self.inner.draws:
            raise OptionError(
                f"{type(self).__name__} cannot wrap {type(self.inner).__name__}: the inner draw would be lost"
            )
        # a saved position does not depend on the number of ranks; `_inner` sets it
        object.__setattr__(self, "inner", replace(self.inner, seed=self.seed, world_size=1))

    @property
    def draws(self) -> bool:
        """Whether an epoch may be anything other than each sample once."""
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
        return replace(self.inner, world_size=self.world_size)


Ratios = Mapping[str, float]
LENGTHS = ("keep", "undersample", "oversample")


@dataclass(frozen=True, kw_only=True)
class Mixed(Drawing):
    """Draws sources in the wanted ratio and spreads them evenly over the epoch.

    Each source has one shuffled order, which is read cyclically: each epoch continues where the one before
    stopped. So a source that gets fewer places than it has samples repeats none in an epoch, and one that
    gets more repeats all of them equally often, to within one. No sample comes twice before all others of its
    source have come once.

    Args:
        ratios: wanted share of each source, by name; they are scaled to sum to one. Between points `(epoch,
            shares)` the ratio is interpolated linearly; it is constant before the first and after the last.
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
        if self.draws and not self._points:
            raise OptionError("ratios need a point (epoch, shares) at least; None takes each sample once")
        for point in self._points:
            match point:
                case [Real(), Mapping() as shares] if all(isinstance(each, Real) for each in shares.values()):
                    continue
            raise OptionError(f"a point of ratios must be (epoch, {{source: share}}), found {point!r:.80}")
        epochs = [epoch for epoch, _ in self._points]
        if epochs != sorted(set(epochs)):
            raise OptionError(f"the points of ratios must be at ascending epochs, found {epochs}")
        for epoch, shares in self._points:
            if min(shares.values(), default=0.0) < 0 or not 0 < sum(shares.values()) < np.inf:
                raise OptionError(f"ratios must not be negative or all zero, found {shares} at epoch {epoch}")
            if shares.keys() != self._points[0][1].keys():
                raise OptionError(f"points of ratios must name the same sources, found {shares} at {epoch}")

    @property
    def draws(self) -> bool:
        """Whether a ratio is asked for."""
        return self.ratios is not None

    def sources_of(self, sizes: SampleSizes) -> tuple[Sequence[str], Ints]:
        """Names of the sources, and (N,) the number of each sample's source."""
        if self.sources is None:
            return super().sources_of(sizes)
        if len(self.sources) != len(sizes):
            raise OptionError(f"sources must name each of {len(sizes)} samples, found {len(self.sources)}")
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
        counts = np.bincount(codes, minlength=len(names))
        self._check_names([name for name, count in zip(names, counts, strict=True) if count])
        quotas = np.array([self._quotas(names, counts, number) for number in range(epoch + 1)])
        drawn = []
        for code in np.flatnonzero(counts).tolist():
            own, start = np.flatnonzero(codes == code), quotas[:-1, code].sum()
            places = np.arange(start, start + quotas[-1, code]) % len(own)
            drawn.append(own[permute(places, len(own), derive_key(self.seed, code))])
        return np.concatenate(drawn)

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        """Batches of one modality each; the batches of one step, one per rank, share it."""
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
        """Unchanged: `make_batches` has ordered them."""
        return batches

    @property
    def _points(self) -> Sequence[tuple[int, Ratios]]:
        if self.ratios is None:
            return ()
        return self.ratios if isinstance(self.ratios, list | tuple) else ((0, self.ratios),)

    def _check_names(self, available: Sequence[str]) -> None:
        wanted = {name for _, shares in self._points for name, share in shares.items() if share > 0}
        if missing := set(available) - self._points[0][1].keys():
            raise OptionError(
                f"ratios name {', '.join(self._points[0][1])}, the data also have {', '.join(sorted(missing))}; "
                "give 0 to leave a source out"
            )
        if absent := wanted - set(available):
            raise OptionError(
                f"ratios ask for {', '.join(sorted(absent))}, of which the data have no sample; "
                f"they have {', '.join(available)}"
            )

    def _quotas(self, names: Sequence[str], counts: Ints, epoch: int) -> Ints:
        """Samples to draw of each source: the shares of the epoch's length, rounded so that they add up to it."""
        ratios = self.ratios_at(epoch)
        shares = np.array([ratios.get(name, 0.0) for name in names])
        # epoch lengths at which each source comes exactly once
        once = counts[shares > 0] / shares[shares > 0]
        length = {"keep": counts.sum(), "undersample": once.min(), "oversample": once.max()}[self.length]
        exact = shares * round(float(length))
        quotas = np.floor(exact).astype(np.int64)
        most_missing = np.argsort(quotas - exact, kind="stable")[: round(float(exact.sum())) - quotas.sum()]
        quotas[most_missing] += 1
        if self.length == "undersample":
            quotas = np.minimum(quotas, counts)
        elif self.length == "oversample":
            quotas = np.where(shares > 0, np.maximum(quotas, counts), 0)
        return quotas


@dataclass(frozen=True, kw_only=True)
class Weighted(Drawing):
    """Draws `num_samples` samples, each in proportion to its weight.

    A sample that is expected to come 1.3 times comes once or twice. The expected numbers are laid end to end
    along a line, in an order that is shuffled each epoch, and the line is read at unit steps from a random
    start. So each expectation is met exactly, as in independent draws with replacement; but at equal weights
    every sample comes once, where independent draws reach only 63 % of them. A sample that is expected at
    most once never repeats.

    Args:
        weights: (N,) above zero, in any unit.
        num_samples: of an epoch; None draws as many as there are.

    Raises:
        OptionError: weights that are not one number a sample, positive and finite.

    Source: systematic sampling with unequal probabilities, Madow 1949 (Annals of Mathematical Statistics 20).
    """

    weights: Sequence[float] | NDArray[np.float64] = field(repr=False, compare=False)
    num_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = np.asarray(self.weights)
        if weights.ndim != 1 or weights.dtype.kind not in "biuf":
            raise OptionError(f"weights must be numbers, one a sample, found {weights.dtype} {weights.shape}")
        weights = weights.astype(np.float64)
        wrong = np.flatnonzero(~((weights > 0) & np.isfinite(weights)))
        if len(wrong):
            raise OptionError(f"weights must be finite, above 0, found {weights[wrong[0]]} in row {wrong[0]}")
        object.__setattr__(self, "weights", weights)

    def expected_times(self) -> NDArray[np.float64]:
        """(N,) how often each sample comes on average."""
        weights = np.asarray(self.weights)
        return weights * ((self.num_samples or len(weights)) / weights.sum())

    def draw(self, sizes: SampleSizes, epoch: int) -> Ints:
        """Rows of an epoch's samples."""
        num_samples = len(self.weights)
        if num_samples != len(sizes):
            raise OptionError(f"{num_samples} weights for {len(sizes)} samples; give one weight a sample")
        key = derive_key(self.seed, epoch)
        order = permute(np.arange(num_samples), num_samples, derive_key(key))
        start = np.random.default_rng(key).random()
        return np.repeat(order, systematic_counts(self.expected_times()[order], start))


def systematic_counts(expected: NDArray[np.float64], start: float) -> Ints:
    """How many unit steps from `start` in [0, 1) fall on each of the intervals `expected`, laid end to end.

    >>> systematic_counts(np.array([0.5, 1.25, 0.25]), 0.5).tolist()
    [1, 1, 0]

    Returns:
        (N,) each the number expected, rounded down or up; over a uniform `start` their mean is `expected`. They add up
        to the sum of `expected`, a whole number.
    """
    ends = np.floor(np.cumsum(expected) + start)
    if len(ends):
        ends[-1] = round(float(expected.sum()))
    return np.diff(ends, prepend=0).astype(np.int64)
