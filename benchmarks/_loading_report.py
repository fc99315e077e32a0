"""What the rows of the loading benchmark say: goals, the documentation's table, and its figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from _common import goal
from _loading_arms import ARTICLE, CACHED, CROPS, LIMIT, OURS

from mmlab.runs.figures import PALETTE, save_figure

ROOT = Path(__file__).resolve().parents[1]
TUNED = "mmlab, tuned by itself"


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured; ratios are medians over the turns of one run."""
    speeds = {(row["data"], row["loader"]): row["images_per_s"] for row in rows if row["kind"] == "speed"}
    goals = []

    def at_least(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f">= {bound:g}", measured, measured >= bound))

    def at_most(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f"<= {bound:g}", measured, measured <= bound))

    def ratio(mine: tuple[str, str], other: tuple[str, str]) -> float:
        pairs = zip(speeds[mine], speeds[other], strict=False)
        return float(np.median([first / second for first, second in pairs]))

    def sure_ratio(mine: tuple[str, str], other: tuple[str, str]) -> float:
        """The lower of two: by the turns that both took, and by the medians over all turns, as in the table."""
        return min(ratio(mine, other), float(np.median(speeds[mine]) / np.median(speeds[other])))

    us, article = ("cold", OURS.name), ("cold", ARTICLE.name)
    at_least("cold, to the articles' loader, 2 workers each", ratio(us, article), 2.0)
    names = [name for data, name in speeds if data == "cold" and not name.startswith(("mmlab", "raw"))]
    closest = min(names, key=lambda name: sure_ratio(us, ("cold", name)))
    at_least(f"cold, to the fastest other loader ({closest})", sure_ratio(us, ("cold", closest)), 1.0)
    at_least("cold, to raw libjpeg-turbo decoding on 2 threads", ratio(us, ("cold", LIMIT.name)), 0.85)
    at_least(
        "random-resized crops, to the articles' loader",
        ratio(("crops", CROPS[0].name), ("crops", CROPS[1].name)),
        1.9,
    )
    cached = max(float(np.median(speeds["cached", peer.name])) for peer in CACHED)
    at_least("cached, to the articles' loader uncached", cached / float(np.median(speeds[article])), 30)
    best, *articles = [name for data, name in speeds if data == "tuning" and name != TUNED]
    tuned = ("tuning", TUNED)
    at_least(f"tuned by itself, to the {best}", ratio(tuned, ("tuning", best)), 0.95)
    at_least(
        "tuned by itself, to the articles' 4 and 8 workers",
        min(ratio(tuned, ("tuning", name)) for name in articles),
        1.0,
    )
    waits = {row["loader"]: row["wait_ratio"] for row in rows if row["kind"] == "wait"}
    at_most("share of time that a slower training waits", waits[OURS.name], 0.01)
    faults = [row for row in rows if row["kind"] == "fault"]
    resumed = [row for row in rows if row["kind"] == "resume"]
    at_most("faults: hangs", sum(row["hung"] for row in faults), 0)
    at_most("faults: wrong batches", sum(row["num_wrong_batches"] or 0 for row in faults), 0)
    at_most("resuming: wrong batches", sum(row["num_wrong_batches"] for row in resumed), 0)
    for backend in ("threads", "torch"):
        seconds = float(np.median([row["resume_s"] for row in resumed if row["backend"] == backend]))
        at_most(f"resuming: seconds to the next batch, {backend}", seconds, 1.0)
    return goals


def table(rows: list[dict[str, Any]]) -> str:
    """The documentation's table: speed and processor time of every loader."""
    lines = ["| loader | images/s | CPU ms an image | to the articles' |", "|---|---|---|---|"]
    medians = {
        (row["data"], row["loader"]): float(np.median(row["images_per_s"]))
        for row in rows
        if row["kind"] == "speed"
    }
    # the articles' loader with the same work; it has no cache, so cached loaders are compared with its cold epochs
    articles = {"cold": medians["cold", ARTICLE.name], "crops": medians["crops", CROPS[1].name]}
    articles["cached"] = articles["cold"]
    for data, title in (("cold", ""), ("crops", "crops: "), ("cached", "")):
        speeds = [row for row in rows if row["kind"] == "speed" and row["data"] == data]
        for row in sorted(speeds, key=lambda row: -np.median(row["images_per_s"])):
            images_per_s, cpu_ms = medians[data, row["loader"]], np.median(row["cpu_ms_per_image"])
            times = images_per_s / articles[data]
            lines.append(f"| {title}{row['loader']} | {images_per_s:.0f} | {cpu_ms:.2f} | {times:.2f} |")
    return "\n".join(lines)


def document(rows: list[dict[str, Any]]) -> None:
    """Put the table into docs/internals/loading.md, in place of the one there, and the figure beside it."""
    page = ROOT / "docs/internals/loading.md"
    text, num_tables = re.subn(
        r"^\| loader \|.*?\n(?=\n)", f"{table(rows)}\n", page.read_text("utf-8"), flags=re.M | re.S
    )
    assert num_tables == 1, page
    page.write_text(text, "utf-8")
    save_figure(draw(rows), ROOT / "docs/images/loading.png")


def draw(rows: list[dict[str, Any]]) -> Any:
    """Two panels: images/s and processor time of every uncached loader, fastest first."""
    from matplotlib.figure import Figure

    speeds = [row for row in rows if row["kind"] == "speed" and row["data"] == "cold"]
    speeds.sort(key=lambda row: float(np.median(row["images_per_s"])))
    names = [row["loader"] for row in speeds]
    figure = Figure(figsize=(12, 0.6 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(
        panels, ("images_per_s", "cpu_ms_per_image"), ("images/s", "CPU ms an image"), strict=True
    ):
        medians = [float(np.median(row[key])) for row in speeds]
        ours_or_limit = {"mmlab": PALETTE[0], "raw": PALETTE[7]}
        colours = [ours_or_limit.get(name.split(",")[0].split(" ")[0], PALETTE[4]) for name in names]
        axes.barh(names, medians, color=colours)
        for place, row in enumerate(speeds):
            axes.plot(row[key], [place] * len(row[key]), ".", color="black", ms=3)
        axes.set(xlabel=f"{label} (dots: each turn)")
        axes.spines[["top", "right"]].set_visible(False)
    return figure
