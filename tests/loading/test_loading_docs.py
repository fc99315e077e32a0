"""The table of measured figures in the documentation is the one in the results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TITLES = {"cold": "", "crops": "crops: ", "cached": ""}


def test_the_documented_figures_are_the_measured_ones():
    text = (ROOT / "docs/internals/loading.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks/results/loading.json").read_text(encoding="utf-8"))
    rows = {
        (TITLES[row["data"]] + row["loader"], row["images"]): row
        for row in results["rows"]
        if row["kind"] == "speed" and row["data"] in TITLES
    }
    (head,) = re.findall(r"^\| loader \|(.*)\| CPU ms an image \| start, s \|$", text, re.MULTILINE)
    kinds = head.strip(" |").split(" | ")
    shown = re.findall(rf"^\| ([^|]+) \|((?: [\d.]+ \|){{{len(kinds) + 2}}})$", text, re.MULTILINE)
    assert {(name, kind) for name, _ in shown for kind in kinds} == set(rows)
    for name, figures in shown:
        *speeds, cpu_ms, start_s = map(float, figures.strip(" |").split(" | "))
        for kind, images_per_s in zip(kinds, speeds, strict=True):
            assert np.median(rows[name, kind]["images_per_s"]) == pytest.approx(images_per_s, abs=0.6)
        first = rows[name, kinds[0]]
        assert np.median(first["cpu_ms_per_image"]) == pytest.approx(cpu_ms, abs=0.006)
        assert np.median(first["start_s"]) == pytest.approx(start_s, abs=0.006)
