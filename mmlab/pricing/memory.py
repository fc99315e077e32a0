"""`FittedModel`, a fitted closed form with its conditions and its file, and `MemoryModel`, built on it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mmlab.errors import DataError, OptionError
from mmlab.machine import replace_file, versions
from mmlab.schedule.cost import MaxPolynomial, max_batch_size
from mmlab.types import BatchShape

_NOTABLE_RATIO = 0.03  # a larger gap between prediction and measurement is another step, not fragmentation
_LIBRARIES = ("torch", "transformers")


def _versions() -> dict[str, str | None]:
    return {name: version for name, version in versions(_LIBRARIES).items() if name != "python"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """What a training step costs, by padded shape; a cost model for planners.

    Args:
        rows: the closed form, in `unit`.
        fingerprint: of the model, see `mmlab.pricing.fingerprint`.
        conditions: of the step: precision, device and others.
        held_out: errors on shapes that were not fitted, see `mmlab.pricing.closed_form.held_out_errors`.
        versions: of the libraries that determine which operations a step has.
    """

    unit: ClassVar[str]
    kind: ClassVar[str]  # in messages

    rows: MaxPolynomial
    fingerprint: str
    conditions: Mapping[str, Any]
    held_out: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=_versions)

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.rows.patch

    def __call__(self, shape: BatchShape) -> float:
        return self.rows(shape)

    def as_polynomial(self) -> MaxPolynomial:
        """The rows, for planners that evaluate them in compiled code."""
        return self.rows

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        document = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "rows"}
        rows = {"exponents": self.rows.exponents.tolist(), "coefficients": self.rows.coefficients.tolist()}
        document["rows"] = {**rows, "patch": self.rows.patch}
        replace_file(Path(path), json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(
        cls, path: str | Path, *, fingerprint: str | None = None, conditions: Mapping[str, Any] | None = None
    ) -> Self:
        """Read what `save` wrote.

        Args:
            fingerprint: of the model that will be trained.
            conditions: of the training; those not named are not compared.

        Raises:
            DataError: the file holds no such model.
            OptionError: it was fitted for another model, under other conditions or with other versions.
        """
        try:
            document = json.loads(Path(path).read_text())
            rows = MaxPolynomial(**document.pop("rows"), unit=cls.unit)
            model = cls(rows=rows, **document)
            found = {**model.versions, **model.conditions}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is not a {cls.kind} that mmlab saved: {error}") from error
        asked = {**_versions(), **(conditions or {})}
        if fingerprint is not None:
            asked["model"], found["model"] = fingerprint, model.fingerprint
        differ = [name for name, value in asked.items() if found.get(name) != value]
        if differ:
            pairs = "; ".join(f"{name}: fitted for {found.get(name)}, not {asked[name]}" for name in differ)
            raise OptionError(f"{path} does not describe this training ({pairs}); fit the {cls.kind} again")
        return model

    @classmethod
    def load_or_fit(
        cls,
        path: Path,
        fit: Callable[[], Self],
        *,
        fingerprint: str,
        conditions: Callable[[], Mapping[str, Any]],
    ) -> Self:
        """Load what `path` holds, so that a resumed run has the same plans; otherwise fit, and save it there.

        If the file is damaged, or describes another model or other conditions, it is replaced by a new fit,
        and a warning says why.

        Args:
            conditions: called only if there is a file: a time model needs a copy of the model to state them.
        """
        if path.exists():
            try:
                return cls.load(path, fingerprint=fingerprint, conditions=conditions())
            except (OptionError, DataError) as error:
                warnings.warn(f"{error}: fitted again, so plans may differ from earlier ones", stacklevel=4)
        found = fit()
        found.save(path)
        return found


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
        conditions: of the step, see `mmlab.pricing.trace.StepSetting`.
        offset_bytes: what `calibrated` has added to every row.
    """

    unit: ClassVar[str] = "bytes"
    kind: ClassVar[str] = "memory model"

    offset_bytes: int = 0

    def max_batch_size(self, num_tokens: int, height: int, width: int, limit_bytes: float) -> int:
        """The most samples of one shape whose step needs at most `limit_bytes`; 0 if one is too many."""
        return max_batch_size(self, num_tokens, height, width, limit_bytes)

    def calibrated(self, shape: BatchShape, measured_bytes: int) -> MemoryModel:
        """The same model, raised by what a measured step needed beyond the prediction; never lowered.

        Warns if the two are more than 3 % apart: then the measured step is probably not the one that was
        fitted.
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
