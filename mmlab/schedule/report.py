"""What a plan costs, computed from sizes alone: waste, balance, collisions, coverage. Nothing is decoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.cost import PATCH, PaddedTokens, batch_costs
from mmlab.schedule.metrics import cells, collision_ratio, straggler, waste, work

if TYPE_CHECKING:
    from mmlab.schedule.plan import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The figures of one plan. Wastes, ratios, straggler and coverage are fractions."""

    num_samples: int  # in the data set
    num_batches: int
    mean_batch_size: float
    max_batch_size: int
    text_waste: float  # share of padded text tokens that are padding
    image_waste: float  # share of padded image patches that are padding
    combined_waste: float  # share of padded tokens and patches together that are padding
    cost_unit: str
    mean_cost: float  # of a batch
    peak_cost: float
    peak_over_budget: float  # peak cost / budget; nan without a budget
    num_over_budget: int  # batches above it
    straggler: float  # 1 - mean / max work (see `metrics.work`) over the batches of one step, one a rank
    collision_ratio: float  # share of samples with another sample of the same image in their batch
    coverage: float  # share of the samples that are in the plan
    num_duplicates: int

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{name:18} {_show(value)}" for name, value in self.as_dict().items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{_show(value)}</td></tr>"
            for name, value in self.as_dict().items()
        )
        return f"<table>{rows}</table>"


def report_plan(plan: BatchPlan, *, budget: float | None = None, num_ranks: int = 8) -> PlanReport:
    """Measure a plan (see `BatchPlan.report`)."""
    sizes, (order, ends) = plan.sizes, plan.columns
    budget = plan.budget if budget is None else budget
    cost = PaddedTokens() if plan.cost is None else plan.cost
    patch = getattr(cost, "patch", PATCH)
    counts, text, height, width = plan.shape_columns.T
    image = cells(height, patch) * cells(width, patch)
    real_text = int(sizes.num_tokens[order].sum(dtype=np.int64))
    real_image = int((cells(sizes.height, patch) * cells(sizes.width, patch))[order].sum())
    padded_text, padded_image = int((counts * text).sum()), int((counts * image).sum())
    costs = batch_costs(cost, plan.shape_columns)
    num_distinct = int((np.bincount(order, minlength=1) > 0).sum()) if len(order) else 0
    return PlanReport(
        num_samples=len(sizes),
        num_batches=len(ends),
        mean_batch_size=len(order) / max(1, len(ends)),
        max_batch_size=int(counts.max(initial=0)),
        text_waste=waste(real_text, padded_text),
        image_waste=waste(real_image, padded_image),
        combined_waste=waste(real_text + real_image, padded_text + padded_image),
        cost_unit=cost.unit,
        mean_cost=float(costs.mean()) if len(costs) else 0.0,
        peak_cost=float(costs.max(initial=0.0)),
        peak_over_budget=float(costs.max(initial=0.0) / budget) if budget else float("nan"),
        num_over_budget=int((costs > budget).sum()) if budget else 0,
        straggler=straggler(counts * (work(text) + work(image)), num_ranks),
        collision_ratio=collision_ratio(plan.columns, sizes.group),
        coverage=num_distinct / len(sizes) if len(sizes) else 1.0,
        num_duplicates=len(order) - num_distinct,
    )


def _show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
