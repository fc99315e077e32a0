"""What the rows of the trainer's benchmark say: tables for the documentation, its figure, and the way there.

python benchmarks/_trainer_tables.py

writes the tables of the kept results into docs/internals/training_measured.md and docs/articles.md, between the comments that name them,
and draws docs/images/trainer.png.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _articles_setting import BEFORE, CHAIN, MMLAB, TODAY
from numpy.typing import NDArray

from mmlab.runs.figures import PALETTE, save_figure

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = [ROOT / f"benchmarks/results/{name}.json" for name in ("trainer_overhead", "trainer")]
PAGES = [ROOT / f"docs/{name}.md" for name in ("internals/training_measured", "articles")]
FIGURE = ROOT / "docs/images/trainer.png"
PICTURE = "![A step chart of seconds an epoch, from the articles' setting to mmlab](../images/trainer.png)"
REMEDY = "worker, texts of 512"  # article D's own: load in other processes, texts padded as before


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A Markdown table for every part that was measured, by name."""
    overheads = [row for row in rows if row["kind"] == "overhead"]
    arms = {row["arm"]: row for row in rows if row["kind"] == "articles"}
    found = {"overhead": overhead(overheads)} if overheads else {}
    return found | (
        {"settings": settings(arms), "causes": causes(arms), "claims": claims(arms)} if arms else {}
    )


def overhead(rows: Sequence[Row]) -> str:
    """What a step takes longer than by hand."""
    return table(
        ("step", "loop", "median, ms", "longer, us", "95 % interval, us", "longer, %"),
        (
            (
                row["step"],
                row["loop"],
                f"{1e3 * row['median_step_s']:.2f}",
                f"{row['overhead_us']:.0f}",
                f"{row['least_us']:.0f} to {row['most_us']:.0f}",
                f"{100 * row['overhead_ratio']:.2f}",
            )
            for row in rows
        ),
    )


def settings(arms: Mapping[str, Row]) -> str:
    """Every setting: its time, and what that time was spent on."""
    return table(
        (
            "setting",
            "s an epoch",
            "samples/s",
            "computing, %",
            "padded a sample",
            "optimizer steps an epoch",
            "samples a step",
            "learning rate",
            "predicted peak, MiB",
        ),
        (
            (
                f"**{name}**" if name in (BEFORE, TODAY, MMLAB) else name,
                f"{np.median(epoch_s(row)):.1f} ({epoch_s(row).min():.1f} to {epoch_s(row).max():.1f})",
                f"{np.median(samples_per_s(row)):.1f}",
                f"{100 * np.median(computing(row)):.0f}",
                f"{values(row, 'padded_tokens').sum() / values(row, 'num_samples').sum():.0f}",
                f"{values(row, 'num_steps').mean():.0f}",
                f"{row['mean_batch_size']:.0f}",
                f"{row['lr']:g}",
                "not priced"
                if row["predicted_peak_bytes"] is None
                else f"{row['predicted_peak_bytes'] / 2**20:.0f}",
            )
            for name, row in arms.items()
        ),
    )


def causes(arms: Mapping[str, Row]) -> str:
    """The chain from the articles' setting to ours, one change a line, below its picture."""
    lines = []
    for cause, before, after in changes(arms):
        one, other = arms[before], arms[after]
        lines.append(
            (
                cause,
                f"{np.median(epoch_s(one)):.1f}",
                f"{np.median(epoch_s(other)):.1f}",
                change(epoch_s(other) / epoch_s(one)),
                f"{100 * np.median(computing(one)):.0f} → {100 * np.median(computing(other)):.0f}",
            )
        )
    return f"{PICTURE}\n\n" + table(
        ("one change", "s an epoch before", "after", "time, %", "computing, %"), lines
    )


def claims(arms: Mapping[str, Row]) -> str:
    """The articles' figures beside ours."""
    pairs = ((BEFORE, REMEDY), (BEFORE, MMLAB), (TODAY, MMLAB))
    ratios = [epoch_s(arms[other]) / epoch_s(arms[one]) for one, other in pairs]
    shares = [[100 * np.median(computing(arms[name])) for name in pair] for pair in pairs]
    return table(
        (
            "claim",
            "claimed",
            f"{REMEDY}, against {BEFORE}",
            f"mmlab against {BEFORE}",
            f"mmlab against {TODAY}",
        ),
        (
            ("training time (D)", "-35 %", *(f"{change(ratio)} %" for ratio in ratios)),
            (
                "efficiency of one device (B): samples/s",
                "+30 %",
                *(f"{change(1 / ratio)} %" for ratio in ratios),
            ),
            (
                "utilisation (D): share of the epoch in which the step computes",
                "60 → 90 %",
                *(f"{one:.0f} → {other:.0f} %" for one, other in shares),
            ),
        ),
    )


def changes(arms: Mapping[str, Row]) -> list[tuple[str, str, str]]:
    """(what changes, setting before, setting after) along the chain."""
    names = [BEFORE, *(name for _, name in CHAIN)]
    return [(cause, names[place], name) for place, (cause, name) in enumerate(CHAIN)]


def values(row: Row, key: str) -> NDArray[np.float64]:
    """(r,) of a row's rounds."""
    return np.array([found[key] for found in row["rounds"]], dtype=np.float64)


def epoch_s(row: Row) -> NDArray[np.float64]:
    """(r,) seconds of each epoch."""
    return values(row, "epoch_s")


def samples_per_s(row: Row) -> NDArray[np.float64]:
    """(r,) of each epoch."""
    return values(row, "num_samples") / epoch_s(row)


def computing(row: Row) -> NDArray[np.float64]:
    """(r,) share of each epoch in which the step computes and does not wait for data."""
    return 1 - values(row, "data_wait_s") / epoch_s(row)


def change(ratios: NDArray[np.float64]) -> str:
    """The median of ratios as a change in per cent, and the least and most of the rounds."""
    middle, least, most = (100 * (ratio - 1) for ratio in (np.median(ratios), ratios.min(), ratios.max()))
    return f"{middle:+.0f} ({least:+.0f} to {most:+.0f})"


def draw(rows: Sequence[Row]) -> Any:
    """A step chart: the seconds of an epoch from the articles' setting to ours, one change after another."""
    from matplotlib.figure import Figure

    arms = {row["arm"]: row for row in rows if row["kind"] == "articles"}
    middle = {name: float(np.median(epoch_s(row))) for name, row in arms.items()}
    saved, added, whole = PALETTE[2], PALETTE[5], "#555555"
    bars: list[tuple[str, float, float, str, str]] = []  # label, from, to, colour, text
    wholes = {
        BEFORE: "the articles' setting:\nserial, texts of 512 tokens",
        TODAY: "what everyone does today:\na worker, longest text",
        MMLAB: "mmlab",
    }
    bars.append((wholes[BEFORE], 0.0, middle[BEFORE], whole, f"{middle[BEFORE]:.1f} s"))
    for cause, before, after in changes(arms):
        start, end = middle[before], middle[after]
        colour = saved if end <= start else added
        share = np.median(epoch_s(arms[after]) / epoch_s(arms[before])) - 1  # as in the table
        bars.append((cause, start, end, colour, f"{end - start:+.1f} s ({100 * share:+.0f} %)"))
        if after in wholes:
            bars.append((wholes[after], 0.0, end, whole, f"{end:.1f} s"))
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for place, (_, start, end, colour, text) in enumerate(bars):
        axes.barh(place, end - start, left=start, color=colour, height=0.62)
        axes.text(max(start, end), place, f" {text}", va="center", fontsize=9)
        if place + 1 < len(bars):
            axes.plot([end, end], [place, place + 1], color="#999999", lw=0.8)
    axes.axvline(middle[TODAY], color="#999999", lw=0.8, ls=":")
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(middle.values()))
    axes.set_xlabel(
        f"seconds an epoch, median of {len(arms[BEFORE]['rounds'])}; green saves time, orange costs it"
    )
    axes.set_title(title(arms, middle), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def title(arms: Mapping[str, Row], middle: Mapping[str, float]) -> str:
    """What the picture shows, in figures."""
    best, *_ = min(changes(arms), key=lambda found: middle[found[2]] - middle[found[1]])
    return (
        f"From {middle[BEFORE]:.0f} to {middle[MMLAB]:.0f} seconds an epoch, and {middle[TODAY]:.0f} as everyone does "
        f"it today; {best.partition(':')[0]} changes most"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def kept_rows() -> list[Row]:
    """The rows of the result files."""
    return [row for path in RESULTS if path.exists() for row in json.loads(path.read_text("utf-8"))["rows"]]


def documented(text: str, found: Mapping[str, str]) -> str:
    """A page with the tables in their places; the others stay as they are."""
    for name, content in found.items():
        text = re.sub(
            rf"(<!-- table: {name} -->\n).*?(<!-- end -->)",
            lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}",
            text,
            flags=re.S,
        )
    return text


def document(rows: Sequence[Row]) -> None:
    """Put the tables into the pages, and draw the figure."""
    for page in PAGES:
        page.write_text(documented(page.read_text("utf-8"), tables(rows)), "utf-8")
    if any(row["kind"] == "articles" for row in rows):
        save_figure(draw(rows), FIGURE)


if __name__ == "__main__":
    document(kept_rows())
