"""The tables of docs/internals/parallel_measured.md, from the rows of parallel.json.

python benchmarks/_parallel_tables.py benchmarks/results/parallel.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _trainer_tables import table

Row = Mapping[str, Any]
MIB = 2**20
_HEAD = (
    "strategy", "processes x threads", "samples/s", "p50, ms", "p95, ms", "idle, %", "MiB sent", "MiB memory",
    "of linear, %", "model, ms", "model's error, %",
)  # fmt: skip


def tables(rows: Sequence[Row]) -> list[str]:
    """Each part with strategies as a table, in the order of the file; then who wins at which bandwidth."""
    parts = dict.fromkeys(row["part"] for row in rows if row["kind"] == "strategy")
    found = [
        strategies([row for row in rows if row["kind"] == "strategy" and row["part"] == part])
        for part in parts
    ]
    models = [row for row in rows if row["kind"] == "model" and row["part"] == "strategies"]
    return [*found, *(outlook(row) for row in models)]


def strategies(rows: Sequence[Row]) -> str:
    """What every strategy reached, and what the model said."""
    return table(
        _HEAD,
        (
            (
                f"`{row['strategy']}`",
                f"{row['processes']} x {row['threads']}",
                f"{row['samples_per_s']:.1f}",
                f"{1e3 * np.percentile(row['steps_s'], 50):.0f}",
                f"{1e3 * np.percentile(row['steps_s'], 95):.0f}",
                ", ".join(f"{100 * ratio:.0f}" for ratio in row["idle_ratio"]),
                _mib(row["sent_bytes"]),
                ", ".join(f"{size / MIB:.0f}" for size in row["memory_bytes"]),
                f"{100 * row['efficiency']:.0f}",
                "" if row["predicted_s"] is None else f"{1e3 * row['predicted_s']:.0f}",
                "" if row["error"] is None else f"{100 * row['error']:+.0f}",
            )
            for row in rows
        ),
    )


def outlook(row: Row) -> str:
    """Samples/s of the model, and the fastest strategy by bandwidth."""
    names = list(
        dict.fromkeys(point["strategy"] for point in row["scaling"] if point["strategy"] != "single")
    )
    rates = {(point["strategy"], point["num_devices"]): point for point in row["scaling"]}
    alone = rates["single", 1]["samples_per_s"]
    counts = sorted({point["num_devices"] for point in row["scaling"]} - {1})
    return table(
        (
            "devices",
            *(f"`{name}`, samples/s (% of linear)" for name in names),
            "fastest, from the slowest link up",
        ),
        (
            (
                str(count),
                *(
                    f"{rates[name, count]['samples_per_s']:.0f} ({100 * rates[name, count]['samples_per_s'] / (count * alone):.0f})"
                    for name in names
                ),
                ", ".join(
                    f"`{part['strategy']}`"
                    if place == 0
                    else f"`{part['strategy']}` from {_rate(part['from'])}"
                    for place, part in enumerate(row["winners"][str(count)])
                ),
            )
            for count in counts
        ),
    )


def _mib(sent_bytes: list[float] | float | None) -> str:
    """Measured by rank in older results, predicted in newer ones."""
    most = max(sent_bytes) if isinstance(sent_bytes, list) else sent_bytes
    return "" if most is None else f"{most / MIB:.1f}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


if __name__ == "__main__":
    print(*tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["rows"]), sep="\n\n")
