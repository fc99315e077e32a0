"""The benchmark of predicted seconds judges by what was measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("seconds")


def epoch(scheduler: str, *, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {
        "kind": "epochs",
        "model": "tiny",
        "num_workers": 0,
        "scheduler": scheduler,
        "predicted_s": predicted_s,
        "measured_s": 1.1 * measured_s,
        "error_ratio": predicted_s / (1.1 * measured_s) - 1,
        "paced_s": measured_s,  # the machine has become a tenth slower since the fit
        "paced_error_ratio": predicted_s / measured_s - 1,
    }


def test_an_order_that_was_predicted_wrongly_is_named(script):
    rows = [
        epoch("random", predicted_s=1.0, measured_s=1.05),
        epoch("bucket", predicted_s=0.9, measured_s=1.15),
        epoch("sorted", predicted_s=0.95, measured_s=1.03),
    ]
    error, paced, order = script.judge(rows)
    assert not error["met"]
    assert error["measured"] == pytest.approx(1 - 0.9 / (1.1 * 1.15))
    assert not paced["met"]
    assert paced["measured"] == pytest.approx(1 - 0.9 / 1.15)
    assert not order["met"]
    assert order["measured"] == "0 of 2 pairs, not random/bucket, bucket/sorted"


def test_the_model_that_was_calibrated_on_is_not_judged(script):
    rows = [
        {"kind": "roofline", "model": name, "calibrated_on": "tiny", "p50_ratio": ratio}
        for name, ratio in (("tiny", 0.9), ("small", 0.1), ("resnet18", 0.3))
    ]
    assert [goal["met"] for goal in script.judge(rows)] == [True, False]


def arm(scheduler: str, *, all_s: list[float]) -> dict[str, Any]:
    return {
        "kind": "arms",
        "model": "tiny",
        "data": "scenes",
        "scheduler": scheduler,
        "all_measured_s": all_s,
    }


def test_fastest_is_judged_by_rounds_in_pairs(script):
    fastest = arm("fastest", all_s=[1.0, 2.0, 4.0])  # the machine slows down, for all arms alike
    rows = [arm("random", all_s=[1.5, 3.0, 6.0]), arm("bucket", all_s=[1.01, 2.02, 4.04]), fastest]
    rows += [arm("sorted", all_s=[0.8, 3.0, 4.0]), arm("fastest with collisions", all_s=[0.9, 1.8, 3.6])]
    rows += [arm("bucket with collisions", all_s=[0.8, 1.6, 3.2])]
    random, bucket, noisy, together, apart = script.judge(rows)
    assert (random["met"], bucket["met"], noisy["met"]) == (True, True, False)
    assert random["measured"] == "1.500, interval from 1.500"
    assert (together["met"], together["measured"]) == (False, "0.889, interval from 0.889")
    assert (apart["met"], apart["measured"]) == (False, "0.900, interval from 0.900")


def test_planning_is_judged_by_the_number_of_samples(script):
    row = {"kind": "planning", "num_samples": 1_000_000, "epoch_cpu_s": [1.6], "first_batch_ms": [20.0]}
    cpu, first = script.judge([row])
    assert (cpu["goal"], cpu["met"], first["met"]) == ("<= 1.5", False, True)
