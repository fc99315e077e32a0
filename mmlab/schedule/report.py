"""What a plan costs, computed from sizes alone: waste, balance, collisions, coverage. O(N), nothing decoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.cost import PATCH, PaddedTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    straggler: float  # 1 - mean / max cost over the batches of one step, all ranks
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
    shapes = plan.shape_columns
    counts = shapes[:, 0]
    real_text = int(sizes.num_tokens[order].sum(dtype=np.int64))
    real_image = int((_cells(sizes.height[order], patch) * _cells(sizes.width[order], patch)).sum())
    padded_text = int((counts * shapes[:, 1]).sum())
    padded_image = int((counts * _cells(shapes[:, 2], patch) * _cells(shapes[:, 3], patch)).sum())
    costs = np.array([cost(shape) for shape in plan.shapes], dtype=np.float64)
    num_distinct = len(np.unique(order))
    return PlanReport(
        num_samples=len(sizes),
        num_batches=len(ends),
        mean_batch_size=len(order) / max(1, len(ends)),
        max_batch_size=int(counts.max(initial=0)),
        text_waste=_waste(real_text, padded_text),
        image_waste=_waste(real_image, padded_image),
        combined_waste=_waste(real_text + real_image, padded_text + padded_image),
        cost_unit=cost.unit,
        mean_cost=float(costs.mean()) if len(costs) else 0.0,
        peak_cost=float(costs.max(initial=0.0)),
        peak_over_budget=float(costs.max(initial=0.0) / budget) if budget else float("nan"),
        num_over_budget=int((costs > budget).sum()) if budget else 0,
        straggler=straggler(costs, num_ranks),
        collision_ratio=collision_ratio(order, ends, sizes.group),
        coverage=num_distinct / len(sizes) if len(sizes) else 1.0,
        num_duplicates=len(order) - num_distinct,
    )


def straggler(costs: NDArray[np.float64], num_ranks: int) -> float:
    """1 - mean / max cost over each `num_ranks` consecutive batches, weighted by time: the idle share."""
    num_whole = len(costs) // num_ranks * num_ranks
    steps = costs[:num_whole].reshape(-1, num_ranks)
    waited_for = steps.max(axis=1).sum() * num_ranks
    return float(1 - steps.sum() / waited_for) if waited_for else 0.0


def collision_ratio(order: NDArray[np.int64], ends: NDArray[np.int64], group: NDArray[np.int64]) -> float:
    """Share of samples that share their batch with another sample of the same image (negative groups never do)."""
    batch = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    image = group[order]
    batch, image = batch[image >= 0], image[image >= 0]
    by_image = np.lexsort((image, batch))
    same = (np.diff(batch[by_image]) == 0) & (np.diff(image[by_image]) == 0)
    collides = np.concatenate((same, [False])) | np.concatenate(([False], same)) if len(image) else same
    return float(collides.sum() / max(1, len(order)))


def _cells(side: NDArray[np.integer], patch: int) -> NDArray[np.int64]:
    return -(-side.astype(np.int64) // patch)


def _waste(real: int, padded: int) -> float:
    return 1 - real / padded if padded else 0.0


def _show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
