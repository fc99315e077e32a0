"""What a batch of a given padded shape costs: padded tokens, or any maximum of polynomials in its shape.

A cost model is a pure function of a `BatchShape` that never falls when a dimension grows. Planners accept any such
callable; `PaddedTokens` and `MaxPolynomial` are the two that they evaluate in compiled code. Nothing here measures:
coefficients come from a fit made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmlab.errors import OptionError
from mmlab.types import BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.types import CostModel

PATCH = 16  # pixels; the grid in which image waste is counted


def num_patches(shape: BatchShape, patch: int = PATCH) -> int:
    """Patches of one padded image, ceil(H / patch) * ceil(W / patch)."""
    return -(-shape.height // patch) * -(-shape.width // patch)


@dataclass(frozen=True, slots=True)
class MaxPolynomial:
    """The largest of K polynomials in batch size B, text length T and image patches P.

    Row k costs the sum over m of `coefficients[k, m] * B**b * T**t * P**p` with `(b, t, p) = exponents[m]`. Activation
    memory and step time have this form: every kernel's price is a polynomial, the peak is whichever rules.

    >>> from mmlab.types import BatchShape
    >>> attention = MaxPolynomial([[1.0, 2.0]], [(0, 0, 0), (1, 2, 0)], unit="bytes")
    >>> attention(BatchShape(8, 10, 224, 224))
    1601.0

    Args:
        coefficients: (K, M) numbers.
        exponents: (M, 3) powers of B, T and P; B appears at most linearly.
        unit: what the number counts, for messages.
        patch: side of a patch in pixels.

    Raises:
        OptionError: shapes that do not fit together, or a power of B other than 0 or 1.
    """

    coefficients: NDArray[np.float64] = field(repr=False)
    exponents: NDArray[np.int64] = field(repr=False)
    unit: str = "padded tokens"
    patch: int = PATCH

    def __post_init__(self) -> None:
        coefficients = np.atleast_2d(np.asarray(self.coefficients, dtype=np.float64))
        exponents = np.asarray(self.exponents, dtype=np.int64)
        if exponents.shape != (coefficients.shape[1], 3):
            raise OptionError(
                f"exponents must have shape ({coefficients.shape[1]}, 3), one (b, t, p) a coefficient, "
                f"found {exponents.shape}"
            )
        if exponents.min() < 0 or exponents[:, 0].max() > 1:
            raise OptionError("exponents must not be negative, and that of the batch size must be 0 or 1")
        object.__setattr__(self, "coefficients", coefficients)
        object.__setattr__(self, "exponents", exponents)

    def __call__(self, shape: BatchShape) -> float:
        point = np.array(
            [shape.batch_size, shape.num_tokens, num_patches(shape, self.patch)], dtype=np.float64
        )
        return float((self.coefficients @ np.prod(point**self.exponents, axis=1)).max())


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """Padded tokens of a batch, B * (T + ceil(H / patch) * ceil(W / patch)): text tokens and image patches count alike.

    >>> from mmlab.types import BatchShape
    >>> PaddedTokens()(BatchShape(8, 24, 224, 224))
    1760.0
    """

    patch: int = PATCH

    @property
    def unit(self) -> str:
        """What the number counts."""
        return "padded tokens"

    def __call__(self, shape: BatchShape) -> float:
        return float(shape.batch_size * (shape.num_tokens + num_patches(shape, self.patch)))

    def as_polynomial(self) -> MaxPolynomial:
        """The same cost as coefficients: B*T + B*P."""
        return MaxPolynomial(np.ones((1, 2)), np.array([[1, 1, 0], [1, 0, 1]]), self.unit, self.patch)


def batch_costs(cost: CostModel, shapes: NDArray[np.integer]) -> NDArray[np.float64]:
    """The cost of many batches at once.

    Args:
        cost: any cost model; the two above take one array operation, others one call a shape.
        shapes: (n, 4) batch size, tokens, height and width, as in `BatchShape`.

    Returns:
        (n,) costs.
    """
    polynomial = cost.as_polynomial() if isinstance(cost, PaddedTokens) else cost
    if not isinstance(polynomial, MaxPolynomial):
        return np.array([cost(BatchShape(*map(int, shape))) for shape in shapes], dtype=np.float64)
    count, text, height, width = shapes.astype(np.float64).T
    patch = polynomial.patch
    point = np.stack((count, text, np.ceil(height / patch) * np.ceil(width / patch)), axis=1)
    terms = np.prod(point[:, None] ** polynomial.exponents, axis=2)
    return (terms @ polynomial.coefficients.T).max(axis=1)
