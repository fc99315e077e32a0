"""What a plan costs, computed from sizes alone: waste, balance, randomness, collisions, coverage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.metrics import cells, collision_ratio, padded_streams, randomness, straggler, waste, work
from mmlab.types import PATCH

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.plan import BatchPlan

_FEW_SAMPLES = 16  # below this mean batch size padded batches fit badly
_SHOWN_ROWS = 5


class Histogram(NamedTuple):
    """How many batches lie between neighbouring edges."""

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The figures of one plan. Wastes, ratios, straggler, randomness and coverage are fractions."""

    num_samples: int  # in the data set
    num_batches: int
    mean_batch_size: float
    text_waste: float  # share of padded text tokens that are padding
    image_waste: float  # share of padded image patches that are padding
    combined_waste: float  # share of padded tokens and patches together that are padding
    cost_unit: str
    budget: float | None  # most that a batch may cost, in that unit
    mean_cost: float  # of a batch
    peak_cost: float
    peak_over_budget: float | None  # peak cost / budget; 1 is a full batch
    num_over_budget: int  # batches above it
    straggler: float  # 1 - mean / max work (`metrics.work`) over the batches of one step, one a rank
    randomness: (
        float | None
    )  # R of this and the next epoch (`metrics.randomness`); None where only one is known
    collision_ratio: float  # share of samples with another sample of the same image in their batch
    coverage: float  # share of the samples that are in the plan
    num_duplicates: int
    batch_size_histogram: Histogram
    cost_histogram: Histogram
    notes: tuple[str, ...]  # what deserves attention, in words

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, ready for JSON."""
        histograms = {
            name: getattr(self, name)._asdict() for name in ("batch_size_histogram", "cost_histogram")
        }
        return asdict(self) | histograms

    def __str__(self) -> str:
        lines = [f"{name:17} {value}" for name, value in self._shown().items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name.replace('_', ' ')}</td><td style='text-align:right'>{value}</td></tr>"
            for name, value in self._shown().items()
        )
        notes = "".join(f"<p>{note}</p>" for note in self.notes)
        return f"<table>{rows}</table>{notes}"

    def _shown(self) -> dict[str, str]:
        per_cent = (
            "text_waste",
            "image_waste",
            "combined_waste",
            "straggler",
            "collision_ratio",
            "coverage",
        )
        shown = {}
        for name, value in asdict(self).items():
            if name.endswith("histogram") or name == "notes" or value is None:
                continue
            if name in per_cent:
                shown[name] = f"{100 * value:.2f} %"
            else:
                shown[name] = f"{value:.5g}" if isinstance(value, float) else str(value)
        return shown


def report_plan(
    plan: BatchPlan, *, budget: float | None, num_ranks: int, following: BatchPlan | None
) -> PlanReport:
    """Measure a plan (see `BatchPlan.report`)."""
    sizes, batches = plan.sizes, plan.columns
    cost = PaddedTokens() if plan.limits.cost is None else plan.limits.cost
    budget = plan.limits.budget if budget is None else budget
    patch = getattr(cost, "patch", PATCH)
    sample_image = cells(sizes.height, patch) * cells(sizes.width, patch)
    sample_work = work(sizes.num_tokens) + work(sample_image)
    text = sizes.num_tokens[batches.order].astype(np.int64)
    image = sample_image[batches.order]
    if plan.limits.streams is None:
        counts, longest, height, width = plan.shape_columns.T
        area = cells(height, patch) * cells(width, patch)
        padded_text, padded_image = counts * longest, counts * area
        batch_work = counts * (work(longest) + work(area))
        costs = batch_costs(cost, plan.shape_columns)
    else:
        sum_text, sum_image = _sums(text, batches.starts), _sums(image, batches.starts)
        padded_text, padded_image = padded_streams(sum_text, sum_image, plan.limits.streams, plan.even_for)
        batch_work = _sums(sample_work[batches.order], batches.starts)
        costs = (sum_text + sum_image).astype(np.float64)
    times_seen = np.bincount(batches.order, minlength=len(sizes))
    report = PlanReport(
        num_samples=len(sizes),
        num_batches=len(batches.ends),
        mean_batch_size=len(batches.order) / max(1, len(batches.ends)),
        text_waste=waste(text.sum(), padded_text.sum()),
        image_waste=waste(image.sum(), padded_image.sum()),
        combined_waste=waste(text.sum() + image.sum(), padded_text.sum() + padded_image.sum()),
        cost_unit=cost.unit,
        budget=budget,
        mean_cost=float(costs.mean()) if len(costs) else 0.0,
        peak_cost=float(costs.max(initial=0.0)),
        peak_over_budget=float(costs.max(initial=0.0) / budget) if budget else None,
        num_over_budget=int((costs > budget).sum()) if budget else 0,
        straggler=straggler(batch_work, num_ranks),
        randomness=None
        if following is None
        else randomness(batches, following.columns, sample_work, num_ranks),
        collision_ratio=collision_ratio(batches, sizes.group),
        coverage=float((times_seen > 0).mean()) if len(sizes) else 1.0,
        num_duplicates=int(np.maximum(times_seen - 1, 0).sum()),
        batch_size_histogram=_histogram(batches.counts),
        cost_histogram=_histogram(costs),
        notes=_notes(plan, costs, budget, np.flatnonzero(times_seen == 0)),
    )
    return report


def _notes(
    plan: BatchPlan, costs: NDArray[np.float64], budget: float | None, missing: NDArray[np.int64]
) -> tuple[str, ...]:
    notes = []
    if len(missing):
        rows = ", ".join(map(str, missing[:_SHOWN_ROWS])) + (", ..." if len(missing) > _SHOWN_ROWS else "")
        notes.append(f"{len(missing)} samples are in no batch: rows {rows}")
    if budget and (costs > budget).any():
        notes.append(f"{int((costs > budget).sum())} batches cost more than the budget of {budget:.6g}")
    mean = len(plan.columns.order) / max(1, len(plan.columns.ends))
    if plan.limits.budget and not plan.limits.streams and mean < _FEW_SAMPLES < len(plan.sizes):
        notes.append(
            f"a batch has {mean:.1f} samples on average, too few of like shape to pad little; "
            "a larger budget, or the scheduler 'packed', wastes less"
        )
    return tuple(notes)


def _sums(column: NDArray[np.integer], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.add.reduceat(column, starts) if len(starts) else np.empty(0, np.int64)


def _histogram(values: NDArray[np.number]) -> Histogram:
    counts, edges = np.histogram(values, bins=20) if len(values) else (np.zeros(0), np.zeros(0))
    return Histogram(tuple(edges.tolist()), tuple(counts.astype(int).tolist()))
