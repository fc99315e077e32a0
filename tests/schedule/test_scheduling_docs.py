"""The table of measured figures in the documentation is the one in the results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_documented_figures_are_the_measured_ones():
    text = (ROOT / "docs/internals/scheduling_measured.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks/results/schedulers.json").read_text(encoding="utf-8"))
    rows = {row["scheduler"]: row for row in results["rows"] if row.get("data") == "coco"}
    shown = re.findall(r"^\| `?([^|`]+)`? \|((?: [\d.]+ \|){8})$", text, re.MULTILINE)
    assert len(shown) >= 8
    for name, figures in shown:
        waste, text_waste, image_waste, peak, straggler, randomness, collisions, _ = map(
            float, figures.strip(" |").split(" | ")
        )
        row = rows[name]
        assert 100 * row["combined_waste"] == pytest.approx(waste, abs=0.006)
        assert 100 * row["text_waste"] == pytest.approx(text_waste, abs=0.06)
        assert 100 * row["image_waste"] == pytest.approx(image_waste, abs=0.006)
        assert row["peak_over_budget"] == pytest.approx(peak, abs=0.006)
        assert 100 * row["straggler"] == pytest.approx(straggler, abs=0.006)
        assert row["randomness"] == pytest.approx(randomness, abs=0.006)
        assert 100 * row["collision_ratio"] == pytest.approx(collisions, abs=0.06)
