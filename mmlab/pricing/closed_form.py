"""Fit a closed form of what any padded shape needs to traced shapes.

The peak of live bytes is a maximum of many polynomials in batch size B, text tokens T and image patches P:
one for each operation of the step, since the peak may be at any of them. One polynomial fitted to the peaks
is off by several per cent, and by tens of per cent where the peak moves to another operation. So `fit_rows`
fits the bytes that are live after *every* operation, and keeps the few operations at which the peak can be.
Coefficients are never negative, as no tensor has a negative size, so a prediction never falls when a batch
grows.

A fit of some thousand operations takes about a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError
from mmlab.schedule.cost import MaxPolynomial
from mmlab.types import PATCH

# Powers of B, T and P that a step's tensors have: constants, position embeddings and biases, activations, attention
# without fusion, cross-attention, similarities of every pair in the batch.
EXPONENTS = (
    *((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2, 0), (0, 0, 2)),
    *((1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 2, 0), (1, 0, 2), (1, 1, 1), (2, 0, 0)),
)
_KEPT_RATIO = 1 - 5e-4  # share of the maximum over all rows that the kept rows reach everywhere


def fit_rows(
    shapes: NDArray[np.integer],
    live_bytes: NDArray[np.integer],
    *,
    step_peak_bytes: int = 0,
    patch: int = PATCH,
    largest: tuple[int, int, int] = (4096, 2048, 4096),
) -> MaxPolynomial:
    """Fit the bytes that are live after every operation, and keep the operations at which the peak can be.

    Each is fitted by least squares of the relative error, with coefficients that are not negative. Rows are
    added until they reach 99.95 % of the maximum over all rows, everywhere up to `largest`. A dimension that
    does not vary in `shapes` takes no part in the fit: the rows then hold for that value of it only.

    Args:
        shapes: (n, 4) batch size, tokens, height and width of the traced steps.
        live_bytes: (n, E) after each of the E operations of each step.
        step_peak_bytes: peak of the optimizer's step, which does not depend on the shape.
        patch: side of a patch in pixels.
        largest: B, T and P up to which the rows hold.

    Returns:
        The rows, in bytes.

    Raises:
        OptionError: fewer shapes than terms to fit.
    """
    features, exponents = step_terms(shapes, patch)
    if len(features) < len(exponents):
        raise OptionError(f"{len(exponents)} terms need as many traced shapes, found {len(features)}")
    operations = np.unique(np.asarray(live_bytes, dtype=np.float64), axis=1)
    weight = 1 / operations.max(axis=1, keepdims=True)
    step = [float(step_peak_bytes), *[0.0] * (len(exponents) - 1)]  # the first term is the constant
    rows = np.vstack([step, nonnegative_fit(features * weight, operations * weight)])
    needed = _needed(rows @ _values(_box(largest), exponents).T)
    return MaxPolynomial(rows[needed], exponents, "bytes", patch)


def held_out_errors(predicted: NDArray[np.floating], found: NDArray[Any]) -> dict[str, float]:
    """Relative errors of predictions, by name; empty without predictions.

    Returns:
        `p50_ratio`, `p95_ratio` and `max_ratio` of their absolute values; `worst_under_ratio`, the most by which a
        prediction was too low; and `num_shapes`.
    """
    if not len(found):
        return {}
    error = np.asarray(predicted) / np.asarray(found) - 1
    return {
        "num_shapes": len(error),
        "p50_ratio": float(np.median(np.abs(error))),
        "p95_ratio": float(np.quantile(np.abs(error), 0.95)),
        "max_ratio": float(np.abs(error).max()),
        "worst_under_ratio": float(max(0.0, -error.min())),
    }


def step_terms(
    shapes: NDArray[np.integer], patch: int = PATCH, exponents: Sequence[tuple[int, int, int]] = EXPONENTS
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The terms that a fit to these shapes can tell apart: (n, M) values and (M, 3) powers of B, T and P.

    Of terms that differ only in dimensions that are the same in all shapes, the first is kept.
    """
    count, text, height, width = np.asarray(shapes, dtype=np.int64).T
    at = np.stack([count, text, -(-height // patch) * -(-width // patch)], axis=1)
    varies = at.min(axis=0) < at.max(axis=0)
    alike = {tuple(np.array(term)[varies]): term for term in reversed(exponents)}
    kept = np.array([term for term in exponents if term in alike.values()], dtype=np.int64)
    return _values(at, kept), kept


def nonnegative_fit(terms: NDArray[np.floating], values: NDArray[np.floating]) -> NDArray[np.float64]:
    """(K, M) coefficients, none negative, of M terms (n, M) that are nearest to each of K columns of values (n, K)."""
    from scipy.optimize import nnls

    scale = terms.max(axis=0)
    return np.array([nnls(terms / scale, column)[0] / scale for column in values.T])


def _values(at: NDArray[np.integer], exponents: NDArray[np.integer]) -> NDArray[np.float64]:
    return (at[:, None, :].astype(np.float64) ** exponents).prod(axis=2)


def _box(largest: tuple[int, int, int]) -> NDArray[np.int64]:
    """(m, 3) points in B, T, P up to `largest`, evenly spaced on log scales; also without text or image."""
    size, *others = (np.unique(np.geomspace(1, most, 16).astype(np.int64)) for most in largest)
    axes = [size, *(np.append(0, axis) for axis in others)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


def _needed(heights: NDArray[np.float64]) -> list[int]:
    """Rows of `heights` (K, m) whose maximum is nearly that of all rows everywhere, the most needed first."""
    most = np.maximum(heights.max(axis=0), 1.0)  # one byte
    kept = [int(np.argmax(heights.sum(axis=1)))]
    while True:
        reached = heights[kept].max(axis=0) / most
        short = int(np.argmin(reached))
        if reached[short] >= _KEPT_RATIO or reached[short] == heights[:, short].max() / most[short]:
            return kept
        kept.append(int(np.argmax(heights[:, short])))
