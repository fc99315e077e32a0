"""The figure of docs/internals/parallel_measured.md: throughput against the number of devices, measured and predicted."""

from __future__ import annotations

from matplotlib.figure import Figure

from mmlab.parallel.bench_report import DEVICES, ParallelBench
from mmlab.parallel.predict import STRATEGIES
from mmlab.runs.figures import PALETTE

_COLOURS = dict(zip(STRATEGIES, ("#000000", *PALETTE[:4]), strict=True))


def draw(bench: ParallelBench) -> Figure:
    """Curves are predicted, squares measured."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["strategy"] for row in bench.scaling):
        points = [
            (row["num_devices"], row["samples_per_s"]) for row in bench.scaling if row["strategy"] == name
        ]
        axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS[name], ms=4, label=name)
    for row in bench.rows:
        colour = _COLOURS.get(row["strategy"], "#888888")
        axes.plot(row["devices"], row["samples_per_s"], "s", mfc="none", color=colour, ms=8)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s")
    axes.set_title(f"Squares are measured, curves predicted\n{bench.title}", fontsize=8)
    axes.set_xticks(DEVICES, [str(count) for count in DEVICES])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure
