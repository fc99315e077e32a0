"""The figure of `mmlab bench parallel`: what was measured, and what is predicted for more devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmlab.parallel.predict import DEVICES, HIGHEST, LOWEST, STRATEGIES
from mmlab.runs.figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(zip(STRATEGIES, ("#000000", *PALETTE[:4]), strict=True))


def draw(document: Mapping[str, Any]) -> Figure:
    """Measured throughput; throughput against devices; the winner at each bandwidth. One panel without predictions.

    Args:
        document: `ParallelBench.as_dict()`.
    """
    from matplotlib.figure import Figure

    num_panels = 3 if document["scaling"] else 1
    figure = Figure(figsize=(13 if num_panels > 1 else 5, 4.4), layout="constrained")
    figure.suptitle(document["title"], fontsize=10)
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, draw_panel in zip(panels, (_draw_measured, _draw_scaling, _draw_winners), strict=False):
        draw_panel(axes, document)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#888888")


def _draw_measured(axes: Any, document: Mapping[str, Any]) -> None:
    rows, batch_size = document["rows"], document["setting"]["batch_size"]
    for place, row in enumerate(rows):
        rates = [batch_size / seconds for seconds in row["rounds_s"]]
        axes.bar(place, row["samples_per_s"], 0.6, color=_colour(row["strategy"]), alpha=0.75)
        axes.plot([place] * len(rates), rates, "o", color="black", ms=3)
    predicted = [
        (place, batch_size / row["predicted_s"]) for place, row in enumerate(rows) if row["predicted_s"]
    ]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), "D", mfc="none", color="#D55E00", ms=8, label="predicted")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.margins(y=0.15)  # room for the legend
    names = ["\n".join([f"{row['processes']} x {row['threads']}", *row["strategy"].split()]) for row in rows]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(title="Measured (dots are rounds)", ylabel="samples/s", xlabel="processes x threads")


def _draw_scaling(axes: Any, document: Mapping[str, Any]) -> None:
    scaling = document["scaling"]
    alone = next(row["samples_per_s"] for row in scaling if row["strategy"] == "single")
    axes.plot(DEVICES, [alone * count for count in DEVICES], ":", color="#888888", label="linear")
    for name in dict.fromkeys(row["strategy"] for row in scaling):
        points = [(row["num_devices"], row["samples_per_s"]) for row in scaling if row["strategy"] == name]
        axes.plot(*zip(*points, strict=True), "o-", color=_colour(name), ms=4, label=name)
    for row in document["rows"]:
        if row["predicted_s"] is not None:
            axes.plot(
                row["devices"], row["samples_per_s"], "s", mfc="none", color=_colour(row["strategy"]), ms=8
            )
    axes.plot([], "s", mfc="none", color="black", ms=8, label="measured")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s", title="Predicted, these links")
    axes.set_xticks(DEVICES, [str(count) for count in DEVICES])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def _draw_winners(axes: Any, document: Mapping[str, Any]) -> None:
    winners = document["winners"]
    for place, parts in enumerate(winners.values()):
        for part in parts:
            width = part["to"] - part["from"]
            axes.barh(place, width, 0.8, left=part["from"], color=_colour(part["strategy"]), alpha=0.75)
    for name in dict.fromkeys(part["strategy"] for parts in winners.values() for part in parts):
        axes.barh([], [], color=_colour(name), alpha=0.75, label=name)
    if document["network"]:
        here = document["network"]["send"]["bytes_per_s"]
        axes.axvline(here, color="black", ls="--", lw=1, label="measured here")
    axes.set(
        xscale="log",
        xlabel="bandwidth between devices, bytes/s",
        ylabel="devices",
        title="Fastest, predicted",
    )
    axes.set_yticks(range(len(winners)), list(winners))
    axes.set_xlim(LOWEST, HIGHEST)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
