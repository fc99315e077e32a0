"""The table of measured figures in the documentation is the one in the results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TITLES = {"cold": "", "crops": "crops: ", "cached": ""}
ARTICLES = "DataLoader, PIL, v1 transforms"  # the loader with the same work is measured cold, and with crops


def test_the_documented_figures_are_the_measured_ones():
    text = (ROOT / "docs/internals/loading.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks/results/loading.json").read_text(encoding="utf-8"))
    rows = {
        TITLES[row["data"]] + row["loader"]: row
        for row in results["rows"]
        if row["kind"] == "speed" and row["data"] in TITLES
    }
    shown = re.findall(r"^\| ([^|]+) \|((?: [\d.]+ \|){3})$", text, re.MULTILINE)
    assert {name for name, _ in shown} == set(rows)
    for name, figures in shown:
        images_per_s, cpu_ms, ratio = map(float, figures.strip(" |").split(" | "))
        base = f"crops: {ARTICLES}" if name.startswith("crops: ") else f"{ARTICLES}, 2 workers"
        to_the_articles = np.median(rows[name]["images_per_s"]) / np.median(rows[base]["images_per_s"])
        assert to_the_articles == pytest.approx(ratio, abs=0.006)
        assert np.median(rows[name]["images_per_s"]) == pytest.approx(images_per_s, abs=0.6)
        assert np.median(rows[name]["cpu_ms_per_image"]) == pytest.approx(cpu_ms, abs=0.006)
