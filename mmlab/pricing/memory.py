"""How many bytes one training step needs for a batch of a given padded shape: a closed form, fitted beforehand.

A `MemoryModel` is the fitted rows (`mmlab.pricing.closed_form`) with what they hold for: a model's fingerprint, the
conditions of the step, the versions of the libraries. A prediction takes some ten microseconds; planners evaluate the
rows in compiled code. The allocator's fragmentation and scratch memory inside kernels are not contained; one measured
step adds them (`calibrated`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

from mmlab.pricing.fitted import FittedModel
from mmlab.schedule.cost import max_batch_size
from mmlab.types import BatchShape

_NOTABLE_RATIO = 0.03  # between prediction and measurement: more is not fragmentation but another step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel(FittedModel):
    """Bytes that a training step needs, by padded shape; a cost model in bytes for the scheduler `memory`.

    >>> from mmlab.schedule.cost import MaxPolynomial
    >>> rows = MaxPolynomial([[2e6, 5e4], [8e6, 0.0]], [(0, 0, 0), (1, 1, 0)], unit="bytes")
    >>> model = MemoryModel(rows=rows, fingerprint="none", conditions={"precision": "fp32"})
    >>> model(BatchShape(8, 25, 224, 224))
    12000000.0
    >>> model.max_batch_size(25, 224, 224, limit_bytes=16_000_000)
    11

    Args:
        rows: one polynomial for each operation at which the peak can be, in bytes.
        conditions: what the step was, see `mmlab.pricing.trace.StepSetting`.
        offset_bytes: what `calibrated` has added to every row.
    """

    unit: ClassVar[str] = "bytes"
    kind: ClassVar[str] = "memory model"

    offset_bytes: int = 0

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
            listed = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
            warnings.warn(
                f"the step measured {measured_bytes} bytes for {shape}, {gap:+.1%} from the predicted {predicted:.0f}; "
                f"is it the same step ({listed})?",
                stacklevel=2,
            )
        offset = max(0, round(measured_bytes - predicted))
        constant = ~self.rows.exponents.any(axis=1)
        rows = replace(self.rows, coefficients=self.rows.coefficients + offset * constant)
        return replace(self, rows=rows, offset_bytes=self.offset_bytes + offset)
