"""The pictures of a comparison, drawn from its figures alone. Needs no display."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mmlab.runs.figures import as_label, colours_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mmlab.comparison.result import Comparison

WASTES = {"text_waste": "#56B4E9", "image_waste": "#E69F00", "combined_waste": "#444444"}


def draw_comparison(comparison: Comparison) -> Figure:
    """Six panels side by side: waste, throughput, time, memory, cost of each batch, loss over the seconds of training."""
    import pandas as pd
    from matplotlib.figure import Figure

    config, table, steps = comparison.config, comparison.table.rename(index=as_label), comparison.steps
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    data = Path(*Path(config["data"]).parts[-2:])  # short enough for a heading
    figure.suptitle(as_label(fill(f"{comparison.headline} ({data})", 110)), fontsize=13)
    colours = colours_of(table.index)
    keys, scale, limit, unit = ["padded_tokens", "padded_patches"], 1.0, config["budget"], "padded tokens"
    if limit is None:  # memory is what is limited
        keys, scale, limit, unit = ["predicted_bytes"], 2.0**20, config["memory_limit_bytes"], "predicted MiB"
    (waste, throughput, time), (memory, costs, loss) = figure.subplots(2, 3)
    draw_waste(waste, comparison.table[list(WASTES)])
    planned = 100 * table["planned_combined_waste"]
    on_its_bar = [index + 0.8 / 3 for index in range(len(table))]
    dots: Any = {"color": "black", "mfc": "white", "ms": 5}
    waste.plot(on_its_bar, planned, "D", label="combined, as planned", **dots)
    table["samples_per_s"].plot.bar(ax=throughput, color=list(colours.values()), alpha=0.75, label="measured")
    waits = 1000 * table["data_wait_ratio"] / table["samples_per_s"]
    spent = {"training step": 1000 / table["samples_per_s"] - waits, "waiting for data": waits}
    pd.DataFrame(spent).plot.bar(ax=time, stacked=True, color=["#0072B2", "#E69F00"])
    (table["peak_bytes"] / 2**20).plot.bar(ax=memory, color=list(colours.values()))
    if table["predicted_samples_per_s"].notna().all():
        throughput.plot(range(len(table)), table["predicted_samples_per_s"], "D", label="predicted", **dots)
    for index, arm in enumerate(comparison.arms):
        name, epochs = as_label(arm.scheduler), pd.DataFrame(arm.epochs)
        colour, speeds, losses = colours[name], epochs["samples_per_s"], epochs["held_out_loss"]
        throughput.plot([index] * len(speeds), speeds, "o", color="black", ms=3)
        seconds = (epochs["num_samples"] / speeds).cumsum()
        loss.plot(seconds, losses, marker="o", ms=4, color=colour, label=name)
        if {*keys} <= {*steps}:
            found = (steps.loc[steps["run"] == arm.scheduler, keys].dropna().sum(axis=1) / scale).tolist()
            spread = [index + 0.5 * (place / max(1, len(found) - 1) - 0.5) for place in range(len(found))]
            costs.plot(spread, found, ".", color=colour, ms=4, alpha=0.7)
    shown = f"limit {limit / scale:,.0f} {unit.split()[-1]}"
    costs.axhline(limit / scale, color="black", ls="--", lw=1, label=shown)
    for axes in (waste, throughput, time):
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
    costs.set_xlim(-0.5, len(table) - 0.5)
    throughput.set(title="Throughput (median, dots are epochs)", ylabel="samples/s")
    time.set(title="Time per sample", ylabel="ms")
    memory.set(title=f"Peak memory ({table['peak_source'].iloc[0]})", ylabel="MiB")
    costs.set(title="Cost of each batch, first to last", ylabel=unit, ylim=(0, None))
    loss.set(title="Held-out loss after each epoch", ylabel="nats", xlim=(0, None))
    low, high = loss.get_ylim()
    spare = max(0.0, 0.1 - (high - low)) / 2  # noise alone must not look like a ranking
    loss.set_ylim(low - spare, high + spare)
    tilted: Any = {"rotation": 30, "ha": "right"} if len(table) > 5 else {"rotation": 0}
    for axes in figure.axes:
        if axes is not loss:
            axes.set_xticks(range(len(table)), table.index, **tilted)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("seconds of training" if axes is loss else "")
        if axes.get_legend_handles_labels()[1] and axes is not memory:
            axes.legend(frameon=False, fontsize=8, ncols=2 if axes is waste else 1)
    return figure


def draw_waste(axes: Axes, shares: pd.DataFrame) -> None:
    """Bars of the padding that each scheduler causes: of texts, of images, of both."""
    (100 * shares).rename(index=as_label, columns=lambda name: name.split("_")[0]).plot.bar(
        ax=axes, width=0.8, rot=0, color=list(WASTES.values())
    )
    axes.set(title="Padding waste, %", ylabel="% of padded elements", xlabel="")
    axes.legend(frameon=False, fontsize=8)
