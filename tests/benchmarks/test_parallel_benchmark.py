"""The parallel benchmark measures what its goals speak of, and docs/parallel.md has its tables."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import ranks_pipelining
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_a_budget_leaves_ranks_less_to_wait_for_and_less_to_pad(script: Any) -> None:
    rows = script("_parallel_balance").measure_balance(num_steps=1)
    found = {(row["scheduler"], row["num_ranks"]): row for row in rows}
    for num_ranks in (2, 8):
        for figure in ("planned_imbalance", "padded_over_useful"):
            assert found["budget", num_ranks][figure] < found["random", num_ranks][figure]
    assert 0 <= found["budget", 2]["measured_imbalance"] < 0.5
    assert len(found["budget", 2]["repeats_s"]) == 2  # a batch for each of two ranks


def test_torchs_pipeline_has_the_gradient_of_a_window() -> None:
    run_ranks(ranks_pipelining.main, 2)


def test_the_loop_by_hand_learns_what_one_process_learns(script: Any) -> None:
    from torch import distributed

    from mmlab.parallel.bench_turns import BENCH_STRATEGIES, Setting

    setting = Setting(strategies=(), model="tiny", batch_size=4, image_side=32, num_tokens=8, num_ranks=1)
    torch.set_num_threads(1)
    ours = BENCH_STRATEGIES["single"].build(setting, 0, None)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        theirs = script("_parallel_peers").by_hand(setting, 0)
        losses = [[arm.step() for _ in range(2)] for arm in (ours, theirs)]
    finally:
        distributed.destroy_process_group()
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.2)  # matching draws its own negatives
    assert all(later < first for first, later in losses)


def test_the_documented_ways_to_place_branches_are_the_measured_ones(script: Any) -> None:
    rows = json.loads((ROOT / "benchmarks/results/branches.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
    assert script("branches").table_of(rows) in text


def test_the_documented_tables_are_the_measured_ones(script: Any) -> None:
    rows = json.loads((ROOT / "benchmarks/results/parallel.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")
    tables = script("_parallel_tables").tables(rows)
    assert len(tables) == 4
    for table in tables:
        assert table in text
