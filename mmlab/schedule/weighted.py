"""Drawing samples in proportion to weights, as evenly as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError
from mmlab.schedule.columns import Ints
from mmlab.schedule.drawing import Drawing
from mmlab.schedule.order import derive_key, permute
from mmlab.types import SampleSizes


@dataclass(frozen=True, kw_only=True)
class Weighted(Drawing):
    """Draws `num_samples` samples, each in proportion to its weight.

    A sample that is expected 1.3 times comes once or twice. The expected numbers are laid end to end along a line, in
    an order that is shuffled each epoch, and the line is read at unit steps from a random start. So each expectation
    is met exactly, as in independent draws with replacement; but at equal weights every sample comes once, where
    independent draws reach only 63 % of them. A sample that is expected at most once never repeats.

    Args:
        weights: (N,) above zero, in any unit.
        num_samples: of an epoch; None draws as many as there are.

    Raises:
        OptionError: weights that are not positive and finite.

    Source: systematic sampling with unequal probabilities, Madow 1949 (Annals of Mathematical Statistics 20).
    """

    weights: Sequence[float] | NDArray[np.float64] = field(repr=False, compare=False)
    num_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = np.asarray(self.weights, dtype=np.float64)
        wrong = np.flatnonzero(~((weights > 0) & np.isfinite(weights)))
        if len(wrong):
            raise OptionError(
                f"weights must be above zero and finite, found {weights[wrong[0]]} in row {wrong[0]}"
            )
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
