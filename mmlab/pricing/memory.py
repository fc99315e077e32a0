"""How many bytes one training step needs for a batch of a given padded shape: a closed form, fitted beforehand.

The peak of live bytes is a maximum of many polynomials in batch size B, text tokens T and image patches P: one for each
operation of the step, since each operation is a place where the peak may be. A polynomial fitted to the peaks misses by
several per cent, and by tens of per cent where one branch takes over from another. So `fit_rows` fits the bytes that
are live after *every* operation, and keeps the few operations that can be the largest. Coefficients are never negative,
as no tensor has a negative size, so a prediction never falls when a batch grows.

Costs: a fit takes about a second, a prediction some ten microseconds. Planners evaluate it in compiled code.
Does not trace or measure: the rows come from `mmlab.pricing`, corrections from a step that was measured. Not contained
are the allocator's fragmentation and scratch memory inside kernels; one measured step adds them (`calibrated`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, OptionError
from mmlab.machine import versions
from mmlab.schedule.cost import MaxPolynomial, max_batch_size
from mmlab.types import PATCH, BatchShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Powers of B, T and P that a step's tensors have: constants, position embeddings and biases, activations, attention
# without fusion, cross-attention, similarities of every pair in the batch.
EXPONENTS = (
    *((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2, 0), (0, 0, 2)),
    *((1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 2, 0), (1, 0, 2), (1, 1, 1), (2, 0, 0)),
)
LARGEST = (4096, 2048, 4096)  # B, T, P up to which rows are kept
_KEPT_RATIO = 1 - 5e-4  # of the maximum over all rows, which those kept reach everywhere
_NOTABLE_RATIO = 0.03  # between prediction and measurement: more is not fragmentation but another step
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes that a training step needs, by padded shape; a cost model in bytes for the scheduler `memory`.

    >>> rows = MaxPolynomial([[2e6, 5e4], [8e6, 0.0]], [(0, 0, 0), (1, 1, 0)], unit="bytes")
    >>> model = MemoryModel(rows=rows, fingerprint="none", conditions={"precision": "fp32"})
    >>> model(BatchShape(8, 25, 224, 224))
    12000000.0
    >>> model.max_batch_size(25, 224, 224, limit_bytes=16_000_000)
    11

    Args:
        rows: one polynomial for each operation at which the peak can be, in bytes.
        fingerprint: of the model, see `mmlab.pricing.fingerprint`.
        conditions: what the step was: `precision`, `optimizer`, `checkpointing`, `attention`, `device`.
        held_out: errors on shapes that were not fitted, see `held_out_errors`.
        versions: of the libraries that decide which tensors a step has.
        offset_bytes: what `calibrated` has added to every row.
    """

    rows: MaxPolynomial
    fingerprint: str
    conditions: Mapping[str, Any]
    held_out: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=lambda: _versions())
    offset_bytes: int = 0

    @property
    def unit(self) -> str:
        """What the number counts."""
        return "bytes"

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.rows.patch

    def __call__(self, shape: BatchShape) -> float:
        return self.rows(shape)

    def as_polynomial(self) -> MaxPolynomial:
        """The rows, for planners that evaluate them in compiled code."""
        return self.rows

    def max_batch_size(self, num_tokens: int, height: int, width: int, limit_bytes: float) -> int:
        """The most samples of one shape whose step needs at most `limit_bytes`; 0 if one is too many."""
        return max_batch_size(self, num_tokens, height, width, limit_bytes)

    def calibrated(self, shape: BatchShape, measured_bytes: int) -> MemoryModel:
        """The same model raised by what a measured step needed beyond the prediction; never lowered.

        Warns where the two are more than 3 % apart: then the step that was measured is probably another one.
        """
        predicted = self(shape)
        gap = measured_bytes / predicted - 1
        if abs(gap) > _NOTABLE_RATIO:
            warnings.warn(
                f"the step measured {measured_bytes} bytes for {shape}, {gap:+.1%} from the predicted {predicted:.0f}; "
                f"is it the same step ({_listed(self.conditions)})?",
                stacklevel=2,
            )
        offset = max(0, round(measured_bytes - predicted))
        return replace(self, rows=_raised(self.rows, offset), offset_bytes=self.offset_bytes + offset)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        document = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        rows = {"exponents": self.rows.exponents.tolist(), "coefficients": self.rows.coefficients.tolist()}
        document["rows"] = {**rows, "patch": self.rows.patch}
        Path(path).write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        fingerprint: str | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> MemoryModel:
        """Read what `save` wrote.

        Args:
            fingerprint: of the model that will be trained.
            conditions: of the training; those not named are not compared.

        Raises:
            DataError: the file is no memory model.
            OptionError: it was fitted for another model, under other conditions or with other versions.
        """
        try:
            document = json.loads(Path(path).read_text())
            rows = MaxPolynomial(**document.pop("rows"), unit="bytes")
            model = cls(rows=rows, **document)
            found = {**model.versions, **model.conditions}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not a memory model that mmlab saved: {error}") from error
        asked = {**_versions(), **(conditions or {})}
        if fingerprint is not None:
            asked["model"], found["model"] = fingerprint, model.fingerprint
        differ = [name for name, value in asked.items() if found.get(name) != value]
        if differ:
            pairs = "; ".join(
                f"{name}: fitted for {found.get(name)}, asked for {asked[name]}" for name in differ
            )
            raise OptionError(f"{path} does not describe this training ({pairs}); fit the memory model again")
        return model


def fit_rows(
    shapes: NDArray[np.integer],
    live_bytes: NDArray[np.integer],
    *,
    step_peak_bytes: int = 0,
    patch: int = PATCH,
    largest: tuple[int, int, int] = LARGEST,
) -> MaxPolynomial:
    """Fit the bytes that are live after every operation, and keep the operations that can be the largest.

    Each is fitted by least squares of the relative error, with coefficients that are not negative. Rows are kept until
    they reach 99.95 % of the maximum over all, anywhere up to `largest`. A dimension that does not vary in `shapes` has
    no part in the fit: the rows then hold for that value of it only.

    Args:
        shapes: (n, 4) batch size, tokens, height and width of the traced steps.
        live_bytes: (n, E) after each of the E operations of each step.
        step_peak_bytes: the most that is live within the optimizer's step, which has no shape.
        patch: side of a patch in pixels.
        largest: B, T and P up to which the rows hold.

    Returns:
        The rows, in bytes.

    Raises:
        OptionError: fewer shapes than the terms to be fitted.
    """
    features, exponents = step_terms(shapes, patch)
    if len(features) < len(exponents):
        raise OptionError(f"{len(exponents)} terms need as many traced shapes, found {len(features)}")
    operations = np.unique(np.asarray(live_bytes, dtype=np.float64), axis=1)
    weight = 1 / operations.max(axis=1)
    features *= weight[:, None]
    scale = features.max(axis=0)
    features, targets = features / scale, operations * weight[:, None]
    step = [float(step_peak_bytes), *[0.0] * (len(exponents) - 1)]  # the first term is the constant
    rows = np.array([step, *(_nonnegative(features, target) / scale for target in targets.T)])
    needed = _needed(rows @ _values(_box(largest), exponents).T)
    return MaxPolynomial(rows[needed], exponents, "bytes", patch)


def held_out_errors(predicted: NDArray[np.floating], found: NDArray[np.integer]) -> dict[str, float]:
    """Relative errors of predictions: `p50_ratio`, `p95_ratio`, `max_ratio` of the absolute ones, and
    `worst_under_ratio`, the largest that a prediction fell short by; with `num_shapes`."""
    error = np.asarray(predicted) / np.asarray(found) - 1
    return {
        "num_shapes": len(error),
        "p50_ratio": float(np.median(np.abs(error))),
        "p95_ratio": float(np.quantile(np.abs(error), 0.95)),
        "max_ratio": float(np.abs(error).max()),
        "worst_under_ratio": float(max(0.0, -error.min())),
    }


def step_terms(
    shapes: NDArray[np.integer], patch: int = PATCH
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The terms that a fit to these shapes can tell apart: (n, M) values and (M, 3) powers of B, T and P."""
    count, text, height, width = np.asarray(shapes, dtype=np.int64).T
    at = np.stack([count, text, -(-height // patch) * -(-width // patch)], axis=1)
    varies = at.min(axis=0) < at.max(axis=0)
    exponents = np.array([term for term in EXPONENTS if not np.array(term)[~varies].any()], dtype=np.int64)
    return _values(at, exponents), exponents


def _values(at: NDArray[np.integer], exponents: NDArray[np.integer]) -> NDArray[np.float64]:
    return (at[:, None, :].astype(np.float64) ** exponents).prod(axis=2)


def _box(largest: tuple[int, int, int]) -> NDArray[np.int64]:
    """(m, 3) points spread by equal ratios over all B, T, P up to `largest`; without text and without image too."""
    size, *others = (np.unique(np.geomspace(1, most, 16).astype(np.int64)) for most in largest)
    axes = [size, *(np.append(0, axis) for axis in others)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


def _nonnegative(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least-squares solution without negative coefficients (Lawson and Hanson 1974, chapter 23)."""
    solution = np.zeros(features.shape[1])
    active = np.zeros(len(solution), dtype=bool)
    for _ in range(3 * len(solution)):
        gradient = features.T @ (target - features @ solution)
        gradient[active] = 0
        if gradient.max() <= 1e-12:
            break
        active[np.argmax(gradient)] = True
        while True:
            trial = np.zeros_like(solution)
            trial[active] = np.linalg.lstsq(features[:, active], target, rcond=None)[0]
            falls = active & (trial <= 0)
            if not falls.any():
                break
            share = (solution[falls] / (solution[falls] - trial[falls])).min()
            solution += share * (trial - solution)
            active &= solution > 1e-15
        solution = trial
    return solution


def _needed(heights: NDArray[np.float64]) -> list[int]:
    """Rows of `heights` (K, m) whose maximum is nearly that of all at every point, the most needed first."""
    most = np.maximum(heights.max(axis=0), 1.0)  # one byte
    kept = [int(np.argmax(heights.sum(axis=1)))]
    while True:
        reached = heights[kept].max(axis=0) / most
        short = int(np.argmin(reached))
        if reached[short] >= _KEPT_RATIO or reached[short] == heights[:, short].max() / most[short]:
            return kept
        kept.append(int(np.argmax(heights[:, short])))


def _raised(rows: MaxPolynomial, offset_bytes: int) -> MaxPolynomial:
    constant = ~rows.exponents.any(axis=1)
    return replace(rows, coefficients=rows.coefficients + offset_bytes * constant)


def _versions() -> dict[str, str | None]:
    found = versions(_LIBRARIES)
    return {name: found[name] for name in (*_LIBRARIES, "mmlab")}


def _listed(conditions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in conditions.items())
