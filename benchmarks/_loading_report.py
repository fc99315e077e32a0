"""What the rows of the loading benchmark say: goals, the documentation's table, and its figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from _common import goal, paired
from _loading_arms import ARTICLE, BARE, BATCH_SIZE, CACHED, CROPS, OURS

from mmlab.runs.figures import PALETTE, save_figure

ROOT = Path(__file__).resolve().parents[1]
TUNED = "mmlab, tuned by itself"
TITLES = {"cold": "", "crops": "crops: ", "cached": ""}


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured; ratios are geometric means over the turns of one run."""
    speeds = {
        (row["images"], row["data"], row["loader"]): row["images_per_s"]
        for row in rows
        if row["kind"] == "speed"
    }
    goals = []

    def at_least(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f">= {bound:g}", measured, measured >= bound))

    def at_most(name: str, measured: float, bound: float) -> None:
        goals.append(goal(name, f"<= {bound:g}", measured, measured <= bound))

    kinds = list(dict.fromkeys(row["images"] for row in rows))
    for kind in kinds:
        arms = {(data, name): rates for (images, data, name), rates in speeds.items() if images == kind}
        us, article = arms["cold", OURS.name], arms["cold", ARTICLE.name]
        at_least(f"{kind}: cold, to the articles' loader, 2 workers each", paired(article, us)[0], 2.0)
        at_least(
            f"{kind}: cold, to bare threads that decode and resize",
            paired(arms["cold", BARE.name], us)[0],
            0.92,
        )
        names = [name for data, name in arms if data == "cold" and not name.startswith(("mmlab", "raw"))]
        closest = min(names, key=lambda name: paired(arms["cold", name], us)[1])
        measured = paired(arms["cold", closest], us)[1]
        at_least(f"{kind}: cold, to the closest peer ({closest}), lower end of the interval", measured, 1.0)
        ours, pil, torchvision = (arms["crops", peer.name] for peer in CROPS)
        at_least(f"{kind}: crops, to the articles' loader", paired(pil, ours)[0], 1.9)
        at_least(
            f"{kind}: crops, to torchvision's decoder in a DataLoader", paired(torchvision, ours)[0], 1.0
        )
        if kind != "camera":  # decoding is all there, so that a ratio to it says nothing of reading
            best = max(paired(article, arms["cached", peer.name])[0] for peer in CACHED)
            at_least(f"{kind}: cached, to the articles' loader uncached", best, 20)
    found = {name: rates for (images, data, name), rates in speeds.items() if data == "tuning"}
    best, *articles = [name for name in found if name != TUNED]
    at_least(f"tuned by itself, to the {best}", paired(found[best], found[TUNED])[0], 0.95)
    at_least(
        "tuned by itself, to the articles' 4 and 8 workers",
        min(paired(found[name], found[TUNED])[0] for name in articles),
        1.0,
    )
    given, searched = (row["seconds"] for row in rows if row["kind"] == "first epoch")
    at_most(
        "first 25 batches while searching for workers, to a number given", paired(given, searched)[0], 1.03
    )
    ours, *_ = (row for row in rows if row["kind"] == "speed" and row["loader"] == OURS.name)
    batch_s = BATCH_SIZE / np.median(ours["images_per_s"])
    at_most(
        "start of two threads, s beyond loading a batch", float(np.median(ours["start_s"]) - batch_s), 0.05
    )
    for row in rows:
        if row["kind"] == "disk":
            disk = np.array(row["disk_bytes_per_s"]) / row["image_bytes"]
            reachable = np.minimum(row["memory_images_per_s"], disk)
            ratio = paired(reachable, row["images_per_s"])[0]
            at_least(f"from the disk, {row['source']}: to what memory and disk allow", ratio, 0.8)
    waits = {row["loader"]: row["wait_ratio"] for row in rows if row["kind"] == "wait"}
    at_most("share of time that a slower training waits", waits[OURS.name], 0.01)
    faults = [row for row in rows if row["kind"] == "fault"]
    resumed = [row for row in rows if row["kind"] == "resume"]
    at_most("faults: hangs", sum(row["hung"] for row in faults), 0)
    at_most("faults: wrong batches", sum(row["num_wrong_batches"] or 0 for row in faults), 0)
    at_most("resuming: wrong batches", sum(row["num_wrong_batches"] for row in resumed), 0)
    for backend in dict.fromkeys(row["backend"] for row in resumed):
        seconds = float(np.median([row["resume_s"] for row in resumed if row["backend"] == backend]))
        at_most(f"resuming: seconds to the next batch, {backend}", seconds, 1.0)
    return goals


def table(rows: list[dict[str, Any]]) -> str:
    """The documentation's table: images/s of every loader on every kind of images, relative to the articles' loader."""
    kinds = list(dict.fromkeys(row["images"] for row in rows))
    lines = [
        f"| loader | {' | '.join(kinds)} | CPU ms an image | start, s |",
        f"|---|{'---|' * len(kinds)}---|---|",
    ]
    speeds = [row for row in rows if row["kind"] == "speed" and row["data"] in TITLES]
    for data, title in TITLES.items():
        of_data = [row for row in speeds if row["data"] == data and row["images"] == kinds[0]]
        for row in sorted(of_data, key=lambda row: -np.median(row["images_per_s"])):
            cells = [
                f"{np.median(other['images_per_s']):.0f}"
                for kind in kinds
                for other in speeds
                if (other["images"], other["data"], other["loader"]) == (kind, data, row["loader"])
            ]
            cpu_ms, start_s = np.median(row["cpu_ms_per_image"]), np.median(row["start_s"])
            lines.append(f"| {title}{row['loader']} | {' | '.join(cells)} | {cpu_ms:.2f} | {start_s:.2f} |")
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

    speeds = [
        row
        for row in rows
        if row["kind"] == "speed" and row["data"] == "cold" and row["images"] == rows[0]["images"]
    ]
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
