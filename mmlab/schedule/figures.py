"""A plan drawn: batch sizes, costs in their order, shapes. Loads matplotlib, touches none of its global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from mmlab.schedule.cost import PaddedTokens

if TYPE_CHECKING:
    from mmlab.schedule.plan import BatchPlan


def plot_plan(plan: BatchPlan) -> Figure:
    """Three panels: histogram of batch sizes, cost of each batch in order, longest text against padded image area."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    sizes, costs, shapes = figure.subplots(1, 3)
    counts, text, height, width = plan.shape_columns.T
    most = int(counts.max(initial=1))
    sizes.hist(counts, bins=np.arange(0, most + 2, 1 + most // 60) - 0.5, color="#0072B2")
    sizes.set(title=f"{len(counts):,} batches", xlabel="samples in a batch", ylabel="batches", xlim=(0, None))
    costs.plot(plan.costs(), ".", markersize=3, color="#E69F00")
    if plan.limits.budget:
        costs.axhline(plan.limits.budget, color="#444444", linewidth=1, linestyle="--", label="budget")
        costs.legend(frameon=False, fontsize=8)
    unit = (plan.limits.cost or PaddedTokens()).unit
    costs.set(title="Cost of each batch", xlabel="batch", ylabel=unit, ylim=(0, None))
    shapes.scatter(height * width / 1000, text, s=6, alpha=0.4, color="#009E73")
    shapes.set(title="Padded shapes", xlabel="height x width, thousand pixels", ylabel="longest text, tokens")
    return figure
