"""The figure of `mmlab bench parallel`: what was measured, and what the model makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmlab.parallel.scaling.outlook import DEVICES, HIGHEST, LOWEST
from mmlab.parallel.scaling.predict import STRATEGIES
from mmlab.runs.figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmlab.parallel.bench.report import ParallelBench

COLOURS = dict(zip(STRATEGIES, ("#000000", *PALETTE[:4]), strict=True))


def draw(bench: ParallelBench) -> Figure:
    """Throughput measured; throughput against devices; the winner at each bandwidth. One panel without the model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4) if bench.scaling else (5, 4.4), layout="constrained")
    figure.suptitle(bench.title, fontsize=10)
    panels = figure.subplots(1, 3 if bench.scaling else 1, squeeze=False)[0]
    _draw_measured(panels[0], bench)
    if bench.scaling:
        _draw_scaling(panels[1], bench)
        _draw_winners(panels[2], bench)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _colour(name: str) -> str:
    return COLOURS.get(name.split()[0], "#888888")


def _draw_measured(axes: Any, bench: ParallelBench) -> None:
    batch_size = bench.setting.batch_size
    for place, row in enumerate(bench.rows):
        axes.bar(place, row["samples_per_s"], 0.6, color=_colour(row["strategy"]), alpha=0.75)
        axes.plot(
            [place] * len(row["rounds_s"]),
            [batch_size / seconds for seconds in row["rounds_s"]],
            "o",
            color="black",
            ms=3,
        )
        if row["predicted_s"] is not None:
            axes.plot(
                place, batch_size / row["predicted_s"], "D", mfc="none", color="#D55E00", ms=8,
                label=None if axes.get_legend_handles_labels()[1] else "model",
            )  # fmt: skip
    axes.margins(y=0.15)  # room for the legend
    names = [
        "\n".join([f"{row['processes']} x {row['threads']}", *row["strategy"].split()]) for row in bench.rows
    ]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(title="Measured (dots are rounds)", ylabel="samples/s", xlabel="processes x threads")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_scaling(axes: Any, bench: ParallelBench) -> None:
    alone = next(row["samples_per_s"] for row in bench.scaling if row["strategy"] == "single")
    axes.plot(DEVICES, [alone * count for count in DEVICES], ":", color="#888888", label="linear")
    for name in bench.modelled:
        points = [row for row in bench.scaling if row["strategy"] == name]
        axes.plot(
            [row["num_devices"] for row in points],
            [row["samples_per_s"] for row in points],
            "o" if len(points) == 1 else "o-",
            color=_colour(name),
            ms=4,
            label=name,
        )
    for row in bench.rows:
        if row["predicted_s"] is not None:
            axes.plot(
                row["devices"], row["samples_per_s"], "s", mfc="none", color=_colour(row["strategy"]), ms=8
            )
    axes.plot([], "s", mfc="none", color="black", ms=8, label="measured")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s", title="Model, these links")
    axes.set_xticks(DEVICES, [str(count) for count in DEVICES])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def _draw_winners(axes: Any, bench: ParallelBench) -> None:
    seen: set[str] = set()
    for place, found in enumerate(bench.winners.values()):
        for part in found:
            name = part["strategy"]
            axes.barh(
                place, part["to"] - part["from"], 0.8, left=part["from"], color=_colour(name), alpha=0.75,
                label=None if name in seen else name,
            )  # fmt: skip
            seen.add(name)
    if bench.network is not None:
        axes.axvline(bench.network.send.bytes_per_s, color="black", ls="--", lw=1, label="measured here")
    axes.set(
        xscale="log",
        xlabel="bandwidth between devices, bytes/s",
        ylabel="devices",
        title="Fastest, by the model",
    )
    axes.set_yticks(range(len(bench.winners)), list(bench.winners))
    axes.set_xlim(LOWEST, HIGHEST)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
