"""How many seconds one training step takes for a batch of a given padded shape: a closed form, fitted beforehand.

A step's time has a constant (launching kernels, Python, the optimizer), and terms that grow with batch size
B, text tokens T and image patches P. So the least padding is not the least time: a batch half as large takes
more than half as long. `fit_time` (`mmlab.pricing.timing`) measures it on the device at hand; `predict_time`
(`mmlab.pricing.roofline`) predicts it for a device that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mmlab.pricing.closed_form import nonnegative_fit, step_terms
from mmlab.pricing.memory import FittedModel
from mmlab.schedule.columns import images_apart
from mmlab.schedule.cost import MaxPolynomial, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.types import PATCH

# Powers of B, T and P: the constant, heads and losses of a sample, layers, attention, cross-attention. The similarities
# of every pair in a batch take no time that could be measured, and a term for them would fit noise.
TIME_EXPONENTS = ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 2, 0), (1, 0, 2), (1, 1, 1))
_NUM_ALWAYS, _WORTH_A_TERM = 4, 0.65  # terms in every fit; share of the error that one more may leave at most
_LEAST_CONSTANT = 0.1  # of the shortest step


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel(FittedModel):
    """Seconds that a training step takes, by padded shape; a cost model in seconds for planners.

    >>> from mmlab.types import BatchShape
    >>> rows = MaxPolynomial([[0.03, 0.001]], [(0, 0, 0), (1, 0, 0)], unit="seconds")
    >>> model = TimeModel(rows=rows, fingerprint="none", conditions={"device": "CPU"})
    >>> round(model(BatchShape(20, 25, 224, 224)), 3)
    0.05

    Args:
        rows: one polynomial, in seconds.
        conditions: of the step, including the device; `method` is "measured" or "predicted, not measured".
        spread_ratio: how far apart the measured repeats of one step were: upper quartile over lower quartile,
            less 1, the median over the shapes. Predictions can hardly be more accurate than that.
        new_shape_s: by how much a step is slower whose images are the first of their number and size:
            libraries prepare for every new shape. New lengths of texts cost much less, and are left out.
        data_s_per_sample: seconds a sample that the loader takes by itself, with the workers that it will
            have; 0 if it is never the slower stage.
        shared_s_per_sample: seconds a sample by which loading makes a step longer, because it runs in the
            training thread or on the cores that compute the steps. `loading_seconds` measures both.
    """

    unit: ClassVar[str] = "seconds"
    kind: ClassVar[str] = "time model"

    spread_ratio: float = 0.0
    new_shape_s: float = 0.0
    data_s_per_sample: float = 0.0
    shared_s_per_sample: float = 0.0

    def batch_s(self, plan: BatchPlan) -> NDArray[np.float64]:
        """(M,) seconds of each batch of a plan: of its step, or of loading its samples if that takes longer.

        The plan's first batch of each number and size of images takes `new_shape_s` more; a batch of one image and
        its captions takes no step if the loss is contrastive alone. A loader works ahead while the device computes,
        so the longer of the two stages counts; loading that competes with the step for cores is added to the step.
        A packed batch counts as that many samples of its mean lengths, unless packs were measured.
        """
        shapes, counts = plan.step_shapes(self.patch), plan.columns.counts
        if plan.limits.streams is None or self.conditions.get("packed"):
            steps = batch_costs(self, shapes)
        else:
            steps = self.rows.at(counts, shapes[:, 1] / counts, shapes[:, 2] / self.patch / counts)
        steps[np.unique(plan.shape_columns[:, [0, 2, 3]], axis=0, return_index=True)[1]] += self.new_shape_s
        if self.conditions.get("objectives") == "contrastive":
            image = images_apart(plan.sizes.group[plan.columns.order])
            steps[plan.columns.largest(image) == -plan.columns.largest(-image)] = 0  # no negatives, no step
        return np.maximum(steps + counts * self.shared_s_per_sample, counts * self.data_s_per_sample)

    def epoch_s(self, plan: BatchPlan, *, num_ranks: int = 1) -> float:
        """Seconds of an epoch: the sum over its steps; evaluation, checkpoints and communication are not in it.

        Args:
            num_ranks: ranks, 1 or more, that share consecutive batches of the plan; a step then takes as long as its slowest.
        """
        seconds = self.batch_s(plan)
        padded = np.pad(seconds, (0, -len(seconds) % num_ranks))
        return float(padded.reshape(-1, num_ranks).max(axis=1, initial=0.0).sum())


def fit_seconds(
    shapes: NDArray[np.integer], seconds: NDArray[np.floating], *, patch: int = PATCH
) -> MaxPolynomial:
    """The polynomial for measured steps: like `fit_polynomial`, with no more terms than needed.

    A constant and the terms in B, BT and BP are always included. The terms that grow faster are added one at
    a time, each only if the error on shapes left out of the fit falls by a third. Otherwise noise would give
    all of them some weight; they would make large batches look expensive, and `fastest` would plan batches
    that are too small. For the same reason the constant is at least a tenth of the shortest step: noise may
    leave nothing of it, and a plan would then have batches of single samples.

    Args:
        shapes: (n, 4) batch size, tokens, height and width.
        seconds: (n,) of each shape's step.
        patch: side of a patch in pixels.
    """

    def error(exponents: tuple[tuple[int, int, int], ...]) -> float:
        missed = []
        for row in range(len(shapes)):
            kept = np.arange(len(shapes)) != row
            fit = fit_polynomial(shapes[kept], seconds[kept], patch=patch, exponents=exponents)
            missed.append(abs(batch_costs(fit, shapes[[row]])[0] / seconds[row] - 1))
        return float(np.mean(missed))

    taken = TIME_EXPONENTS[:_NUM_ALWAYS]
    least = error(taken)
    while more := [(*taken, term) for term in TIME_EXPONENTS if term not in taken]:
        errors = [error(exponents) for exponents in more]
        if min(errors) > _WORTH_A_TERM * least:
            break
        least, taken = min(errors), more[int(np.argmin(errors))]
    fitted = fit_polynomial(shapes, seconds, patch=patch, exponents=taken)
    fitted.coefficients[0, 0] = max(fitted.coefficients[0, 0], _LEAST_CONSTANT * np.min(seconds))
    return fitted


def fit_polynomial(
    shapes: NDArray[np.integer],
    values: NDArray[np.floating],
    *,
    patch: int = PATCH,
    exponents: Sequence[tuple[int, int, int]] = TIME_EXPONENTS,
) -> MaxPolynomial:
    """The polynomial without negative coefficients that is nearest to the values, by relative error.

    A dimension that does not vary in `shapes` takes no part in the fit: the polynomial holds for that value
    of it only.

    Args:
        shapes: (n, 4) batch size, tokens, height and width.
        values: (n,) of each shape.
        patch: side of a patch in pixels.
        exponents: of B, T and P in each term.

    Returns:
        One row, in seconds.
    """
    terms, kept = step_terms(shapes, patch, exponents)
    coefficients = nonnegative_fit(terms / np.asarray(values)[:, None], np.ones((len(terms), 1)))
    return MaxPolynomial(coefficients, kept, "seconds", patch)
