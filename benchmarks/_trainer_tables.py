"""The tables of docs/training.md, from the rows of trainer.json.

python benchmarks/_trainer_tables.py benchmarks/results/trainer.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> list[str]:
    """Every part that was measured as a Markdown table."""
    kinds = {"overhead": overhead, "articles": articles, "verdict": convergence}
    return [
        make(part) for kind, make in kinds.items() if (part := [row for row in rows if row["kind"] == kind])
    ]


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


def articles(rows: Sequence[Row]) -> str:
    """Epochs in the articles' setting and in ours."""
    first = rows[0]["all_epochs_s"]
    return table(
        (
            "batches",
            "s an epoch",
            "all epochs, % of the first row",
            "waiting for data, %",
            "padded a sample",
            "held-out loss",
        ),
        (
            (
                row["arm"],
                f"{row['epoch_s']:.1f}",
                f"{100 * row['all_epochs_s'] / first:.0f}",
                f"{100 * row['data_wait_ratio']:.1f}",
                f"{row['epochs'][0]['padded_cost'] / row['epochs'][0]['num_samples']:.0f}",
                f"{row['held_out_loss']:.3f}",
            )
            for row in rows
        ),
    )


def convergence(rows: Sequence[Row]) -> str:
    """What each scheduler has learnt at equal samples."""
    return table(
        ("scheduler", "optimizer steps", "held-out loss", "against random", "R@1, %", "against random"),
        (
            (
                f"`{row['scheduler']}`",
                f"{row['num_steps']:.0f}",
                f"{row['held_out_loss']:.3f} ± {row['held_out_loss_sd']:.3f}",
                row["held_out_loss_verdict"],
                f"{100 * row['recall']:.1f} ± {100 * row['recall_sd']:.1f}",
                row["recall_verdict"],
            )
            for row in rows
        ),
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"])))
