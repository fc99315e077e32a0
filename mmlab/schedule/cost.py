"""What a batch of a given padded shape costs: padded tokens, or any maximum of polynomials in its shape.

A cost model (`mmlab.types.CostModel`) is a pure function of a `BatchShape` that never falls when a dimension grows.
Its `as_polynomial()` gives it as a `MaxPolynomial`, which planners evaluate in compiled code. Nothing here measures: bytes
and seconds are fitted elsewhere and come as coefficients.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, check_numbers
from mmlab.types import PATCH, BatchShape, CostModel, SampleSizes


@dataclass(frozen=True, slots=True)
class MaxPolynomial:
    """The largest of K polynomials in batch size B, text tokens T and image patches P.

    Row k costs the sum over m of `coefficients[k, m] * B**b * T**t * P**p` with `(b, t, p) = exponents[m]`. Activation
    memory and step time have this form: every kernel's cost is a polynomial, and the peak is the largest of
    them.

    >>> from mmlab.types import BatchShape
    >>> attention = MaxPolynomial([[1.0, 2.0]], [(0, 0, 0), (1, 2, 0)], unit="bytes")
    >>> attention(BatchShape(8, 10, 224, 224))
    1601.0

    Args:
        coefficients: (K, M) numbers.
        exponents: (M, 3) powers of B, T and P; that of B is at most 2, for a loss over every pair in the batch.
        unit: what the number counts, for messages.
        patch: side of a patch in pixels.

    Raises:
        OptionError: shapes that do not fit together, a power that is no whole number >= 0, one of B above 2, a
            coefficient that is no number, a patch without pixels.
    """

    coefficients: NDArray[np.float64]
    exponents: NDArray[np.int64]
    unit: str = "padded tokens"
    patch: int = PATCH

    def __post_init__(self) -> None:
        coefficients = np.atleast_2d(np.asarray(self.coefficients, dtype=np.float64))
        exponents = np.asarray(self.exponents, dtype=np.int64)
        if exponents.shape != (coefficients.shape[1], 3):
            raise OptionError(
                f"exponents must have shape ({coefficients.shape[1]}, 3), one (b, t, p) for each coefficient of a row, "
                f"found {exponents.shape}"
            )
        if not np.isfinite(coefficients).all() or not isinstance(self.patch, int) or self.patch < 1:
            raise OptionError("coefficients must be finite, and the side of a patch a whole number >= 1")
        whole = np.array_equal(exponents, np.asarray(self.exponents))
        if not whole or exponents.min(initial=0) < 0 or exponents[:, 0].max(initial=0) > 2:
            raise OptionError(
                "exponents must be whole, must not be negative, and that of the batch size must be at most 2"
            )
        object.__setattr__(self, "coefficients", coefficients)
        object.__setattr__(self, "exponents", exponents)

    def __call__(self, shape: BatchShape) -> float:
        count, text, height, width = shape
        patches = -(-height // self.patch) * -(-width // self.patch)
        powers = self.exponents.tolist()
        terms = [float(count) ** b * float(text) ** t * float(patches) ** p for b, t, p in powers]
        return float((self.coefficients @ terms).max())

    def as_polynomial(self) -> MaxPolynomial:
        """Itself."""
        return self

    @property
    def columns(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Coefficients and exponents, as compiled code takes them."""
        return self.coefficients, self.exponents

    def at(self, batch_size: Any, num_tokens: Any, num_patches: Any) -> Any:
        """The cost at numbers or arrays that broadcast."""
        point = [np.asarray(side, dtype=np.float64) for side in (batch_size, num_tokens, num_patches)]
        count, text, patches = np.broadcast_arrays(*point)
        terms = np.stack([count**b * text**t * patches**p for b, t, p in self.exponents], axis=-1)
        return (terms @ self.coefficients.T).max(axis=-1)


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """Padded tokens of a batch, B * (T + ceil(H / patch) * ceil(W / patch)): text tokens and image patches count alike.

    >>> from mmlab.types import BatchShape
    >>> PaddedTokens()(BatchShape(8, 24, 224, 224))
    1760.0
    """

    patch: int = PATCH

    unit: ClassVar[str] = "padded tokens"

    def __post_init__(self) -> None:
        check_numbers(self)

    def __call__(self, shape: BatchShape) -> float:
        patches = -(-shape.height // self.patch) * -(-shape.width // self.patch)
        return float(shape.batch_size * (shape.num_tokens + patches))

    def as_polynomial(self) -> MaxPolynomial:
        """The same cost as coefficients: B*T + B*P."""
        return MaxPolynomial(np.ones((1, 2)), np.array([[1, 1, 0], [1, 0, 1]]), self.unit, self.patch)


# a cost exceeds a budget only above this factor: the same cost, summed in another order, differs in its last bits
ROUNDING = 1 + 1e-9
FREE = MaxPolynomial(np.zeros((1, 1)), np.zeros((1, 3), dtype=np.int64))  # where nothing is limited


def batch_costs(cost: CostModel, shapes: NDArray[np.integer]) -> NDArray[np.float64]:
    """The cost of many batches at once.

    Args:
        cost: any cost model; its polynomial is evaluated in a few array operations.
        shapes: (n, 4) batch size, tokens, height and width, as in `BatchShape`.

    Returns:
        (n,) costs.
    """
    polynomial = cost.as_polynomial()
    count, text, height, width = shapes.T
    return polynomial.at(count, text, -(-height // polynomial.patch) * -(-width // polynomial.patch))


def for_images_of(sizes: SampleSizes, cost: MaxPolynomial) -> MaxPolynomial:
    """The cost where a batch's patches are the mean of its samples', as they are not padded (`SampleSizes.pads_images`).

    It is never too low: a sum of squares is at most the largest number times the sum, and what does not grow with the
    batch, such as the buffers of one image, is priced for the largest image of all.
    """
    if sizes.pads_images:
        return cost
    most = float(sizes.height.max(initial=0)) / PATCH
    batch, _, patches = cost.exponents.T
    linear = np.where(batch > 0, np.minimum(patches, 1), 0)
    exponents = np.column_stack([cost.exponents[:, :2], linear])
    return replace(cost, coefficients=cost.coefficients * most ** (patches - linear), exponents=exponents)


def costliest_sample(cost: CostModel, sizes: SampleSizes, *, enough: float) -> tuple[int, float]:
    """Row and cost of the sample that costs most by itself; row -1 and a bound where all cost at most `enough`."""
    if not len(sizes):
        return -1, 0.0
    columns = (sizes.num_tokens, sizes.height, sizes.width)
    bound = cost(BatchShape(1, *(int(column.max()) for column in columns)))
    if bound <= enough:
        return -1, bound
    kinds, rows = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
    prices = batch_costs(cost, np.insert(kinds, 0, 1, axis=1).astype(np.int64))
    costliest = int(np.argmax(prices))
    return int(rows[costliest]), float(prices[costliest])


def described(num_tokens: int, height: int, width: int) -> str:
    """A sample's size in words. A conversation's patches stand in one column, as an image of one patch's width.

    >>> described(12, 480, 640), described(900, 256 * 16, 16)
    ('12 tokens, 480 x 640 pixels', '900 tokens, 256 patches')
    """
    image = f"{height // PATCH} patches" if width == PATCH else f"{height} x {width} pixels"
    return f"{num_tokens} tokens, {image}"


_REMEDY = "raise the budget to this cost, or cut the text or the image"


def check_samples_fit(cost: CostModel, sizes: SampleSizes, budget: float, remedy: str = _REMEDY) -> None:
    """Check that every sample alone costs no more than a batch may.

    Raises:
        OptionError: a sample costs more; names it, and the remedy.
    """
    row, price = costliest_sample(cost, sizes, enough=budget)
    if price > budget * ROUNDING:
        scale, unit = (2**20, "MiB") if cost.unit == "bytes" else (1, cost.unit)
        size = described(sizes.num_tokens[row], sizes.height[row], sizes.width[row])
        raise OptionError(
            f"sample {row} alone ({size}) costs {price / scale:.6g} {unit}, above the budget of {budget / scale:.6g}; {remedy}"
        )


def max_batch_size(cost: CostModel, num_tokens: int, height: int, width: int, budget: float) -> int:
    """The most samples of one shape whose batch costs at most `budget`; 0 if one is too many.

    >>> max_batch_size(PaddedTokens(), 20, 160, 160, budget=1000)
    8
    """
    sizes = range(1, 2**21)
    return bisect_right(sizes, budget, key=lambda size: cost(BatchShape(size, num_tokens, height, width)))
