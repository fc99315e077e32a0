"""The pictures of a comparison, drawn from its figures alone. Needs no display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmlab.runs.figures import colours_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mmlab.comparison.result import ArmResult


def draw_comparison(
    arms: list[ArmResult], steps: pd.DataFrame, *, title: str, budget: float, unit: str
) -> Figure:
    """Six panels side by side: waste, throughput, time, memory, cost of each batch, loss.

    Args:
        steps: `run` and `predicted_cost` of every training step; may be empty.
        budget: what a batch may cost, in `unit`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    colours = colours_of(arm.scheduler for arm in arms)
    axes = figure.subplots(2, 3)
    _draw_waste(axes[0, 0], arms)
    _draw_throughput(axes[0, 1], arms, colours)
    _draw_time(axes[0, 2], arms)
    _draw_memory(axes[1, 0], arms, colours)
    _draw_batch_costs(axes[1, 1], arms, steps, budget, unit, colours)
    _draw_loss(axes[1, 2], arms, colours)
    return figure


def _draw_waste(axes: Axes, arms: list[ArmResult]) -> None:
    kinds = ("text_waste", "image_waste", "combined_waste")
    for offset, (kind, colour) in enumerate(zip(kinds, ("#56B4E9", "#E69F00", "#444444"), strict=True)):
        positions = [index + 0.27 * (offset - 1) for index in range(len(arms))]
        axes.bar(
            positions,
            [100 * getattr(arm, kind) for arm in arms],
            0.25,
            color=colour,
            label=kind.split("_")[0],
        )
    planned = [100 * arm.planned_combined_waste for arm in arms]
    axes.plot(
        [index + 0.27 for index in range(len(arms))],
        planned,
        "D",
        color="#D55E00",
        ms=5,
        label="combined, as planned",
    )
    axes.set(title="Padding waste, %", ylabel="% of padded elements")
    axes.legend(frameon=False, fontsize=8)
    _name_bars(axes, arms)


def _draw_throughput(axes: Axes, arms: list[ArmResult], colours: dict[str, str]) -> None:
    axes.bar(
        range(len(arms)),
        [arm.samples_per_s for arm in arms],
        0.6,
        color=[colours[arm.scheduler] for arm in arms],
        alpha=0.75,
    )
    for index, arm in enumerate(arms):
        speeds = [epoch["samples_per_s"] for epoch in arm.epochs]
        axes.plot([index] * len(speeds), speeds, "o", color="black", ms=3)
    axes.set(title="Throughput (median, dots are epochs)", ylabel="samples/s")
    _name_bars(axes, arms)


def _draw_time(axes: Axes, arms: list[ArmResult]) -> None:
    wait = [1000 * arm.data_wait_ratio / arm.samples_per_s for arm in arms]
    step = [1000 / arm.samples_per_s - waited for arm, waited in zip(arms, wait, strict=True)]
    axes.bar(range(len(arms)), step, 0.6, color="#0072B2", label="training step")
    axes.bar(range(len(arms)), wait, 0.6, bottom=step, color="#E69F00", label="waiting for data")
    axes.set(title="Time per sample", ylabel="ms")
    axes.legend(frameon=False, fontsize=8)
    _name_bars(axes, arms)


def _draw_memory(axes: Axes, arms: list[ArmResult], colours: dict[str, str]) -> None:
    axes.bar(
        range(len(arms)),
        [arm.peak_bytes / 2**20 for arm in arms],
        0.6,
        color=[colours[arm.scheduler] for arm in arms],
    )
    axes.set(title=f"Peak memory ({arms[0].peak_source})" if arms else "Peak memory", ylabel="MiB")
    _name_bars(axes, arms)


def _draw_batch_costs(
    axes: Axes, arms: list[ArmResult], steps: pd.DataFrame, budget: float, unit: str, colours: dict[str, str]
) -> None:
    for index, arm in enumerate(arms):
        costs = [] if steps.empty else steps.loc[steps["run"] == arm.scheduler, "predicted_cost"].tolist()
        spread = [index + 0.5 * (place / max(1, len(costs) - 1) - 0.5) for place in range(len(costs))]
        axes.plot(spread, costs, ".", color=colours[arm.scheduler], ms=4, alpha=0.7)
    axes.axhline(budget, color="black", ls="--", lw=1, label="budget")
    axes.set(title="Cost of each batch, in order", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    _name_bars(axes, arms)


def _draw_loss(axes: Axes, arms: list[ArmResult], colours: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for arm, style in zip(arms, ("-", "--", "-.", ":") * len(arms), strict=False):
        losses = [epoch["held_out_loss"] for epoch in arm.epochs]
        epochs = range(1, len(losses) + 1)
        axes.plot(epochs, losses, style, marker="o", ms=4, color=colours[arm.scheduler], label=arm.scheduler)
    axes.set(title="Held-out loss", xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)


def _name_bars(axes: Axes, arms: list[ArmResult]) -> None:
    axes.set_xticks(range(len(arms)), [arm.scheduler for arm in arms], rotation=0 if len(arms) < 6 else 30)
    axes.spines[["top", "right"]].set_visible(False)
