"""The measured tables of docs/internals/memory.md are those of the committed result file."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())
TEXT = (ROOT / "docs/internals/memory.md").read_text()


def accuracy_lines() -> list[str]:
    rows = [row for row in RESULTS["rows"] if row["kind"] == "accuracy"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        shapes = sum(row["closed_form_num_shapes"] for row in own)
        steps = sum(row["real_num_shapes"] for row in own)
        closed, simulator, real = (
            100 * max(row[key] for row in own)
            for key in ("closed_form_max_ratio", "simulator_to_real_max_ratio", "real_max_ratio")
        )
        fit_s = max(row["fit_cpu_s"] for row in own)
        lines.append(
            f"| {model} | {len(own)} | {shapes} | {closed:.3f} % | {steps} | {simulator:.3f} % | {real:.3f} % "
            f"| {fit_s:.0f} |"
        )
    return lines


def policy_lines() -> list[str]:
    return [
        f"| {row['policy']} | {row['package'].split()[0]} | {row['num_out_of_memory']} | {row['num_restarts']} | "
        f"{row['num_wasted_samples']} | {100 * row['mean_of_limit']:.0f} % | {100 * row['peak_of_limit']:.0f} % |"
        for row in RESULTS["rows"]
        if row["kind"] == "policy"
    ]


def test_tables_are_those_of_the_result_file() -> None:
    lines = accuracy_lines() + policy_lines()
    assert len(lines) > 8
    for line in lines:
        assert line in TEXT, f"docs/internals/memory.md lacks {line}"
