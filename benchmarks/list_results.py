"""Write `benchmarks/results/README.md`: what was measured when, whether its goals were met, and what changed since.

    python benchmarks/list_results.py

A result knows a digest of the code it measured, room by room. A room that has changed since is named, so that nobody
takes an old figure for a new one; comments and docstrings do not count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _common import room_digest

RESULTS = Path(__file__).resolve().parent / "results"
HEAD = """# Results

Each file is written by the benchmark of its name, on the machine and with the versions that it states. This list is
written by `python benchmarks/list_results.py`, which compares the code that was measured with the code that is here.

| result | measured on | goals met | code that changed since |
|---|---|---|---|
"""


def changed_rooms(result: dict[str, Any]) -> str:
    """The rooms whose code is no longer what was measured, for the last column."""
    codes = [part["code"] for part in (result, *result.get("rows", ())) if "code" in part]
    if not codes:
        return "not recorded"
    changed = {room for code in codes for room, digest in code.items() if room_digest(room) != digest}
    return ", ".join(f"`{room}`" for room in sorted(changed)) or "none"


def render() -> str:
    """The page."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        goals = result.get("goals", [])
        met = f"{sum(goal['met'] for goal in goals)} of {len(goals)}" if goals else "none set"
        day = str(result.get("date", "not recorded"))[:10]
        lines.append(f"| [{path.stem}]({path.name}) | {day} | {met} | {changed_rooms(result)} |\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(render(), encoding="utf-8")
