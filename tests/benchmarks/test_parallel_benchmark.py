"""The parallel benchmark measures what its goals speak of, and docs/internals/parallel_measured.md has its tables."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlab.parallel.bench import BenchOptions
from mmlab.parallel.bench_report import ParallelBench
from mmlab.parallel.predict import STRATEGIES
from tests.benchmarks import ranks_pipelining
from tests.parallel.test_predict import WORK, links
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

    from mmlab.parallel.bench import train_arm

    options = BenchOptions(model="tiny", batch_size=4, image_side=32, num_tokens=8, device="cpu")
    torch.set_num_threads(1)
    ours = train_arm("single", options, 0, None)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        theirs = script("_parallel_peers").by_hand(options, 0, None)
        losses = [[arm.step()["loss"] for _ in range(2)] for arm in (ours, theirs)]
    finally:
        distributed.destroy_process_group()
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.2)  # matching draws its own negatives
    assert all(later < first for first, later in losses)


def test_winners_cover_every_bandwidth_and_win_where_they_say(script: Any) -> None:
    found, network = script("_parallel_winners"), links(1e-4, 1e9)
    sizes = {"num_devices": 8, "batch_size": 8}
    parts = found.winners(WORK, network, STRATEGIES, **sizes)
    assert parts[0]["strategy"] == "single"  # nothing pays where messages take for ever
    assert [part["from"] for part in parts[1:]] == [part["to"] for part in parts[:-1]]
    assert len(parts) > 1
    for part in parts:
        there = found.with_bandwidth(network, (part["from"] * part["to"]) ** 0.5)
        rates = found.rates(WORK, there, STRATEGIES, **sizes)
        assert max(rates, key=rates.__getitem__) == part["strategy"]


def test_the_figure_has_what_was_measured_beside_the_curves(script: Any) -> None:
    turn = {"steps_s": [1.0], "cpu_s": 0.5, "sent_bytes": 0, "peak_bytes": 1, "values": [{}]}
    bench = ParallelBench(
        options=BenchOptions(device="cpu"),
        device="some",
        num_cores=2,
        costs=WORK,
        network=links(1e-4, 1e9),
        image_layers=None,
        turns={"one core": [[turn]], "ddp": [[turn], [turn]], "branch": [[turn], [turn]]},
    )
    assert bench.note.endswith("a step of one takes 1.60 times as long as alone.")
    slow = {"one core": [[turn | {"steps_s": [2.0]}]]}
    assert replace(bench, turns=slow).note.endswith(
        "0.80 times as long as alone, which is noise of the machine: measure again."
    )
    curves = script("_parallel_figure").draw(bench).axes[0].lines
    squares = [tuple(point) for line in curves if line.get_marker() == "s" for point in line.get_xydata()]
    assert squares == [(1, 16.0), (2, 16.0), (2, 16.0)]


def test_overlap_is_the_share_of_the_shorter_branch(script: Any) -> None:
    overlap = script("_parallel_overlap").overlap
    assert overlap([(0.0, 4.0), (5.0, 6.0)], [(3.0, 5.0), (5.5, 6.5)]) == pytest.approx(1.5 / 3)
    assert overlap([(0.0, 4.0)], [(1.0, 3.0)]) == 1


def test_the_documented_ways_to_place_branches_are_the_measured_ones(script: Any) -> None:
    rows = json.loads((ROOT / "benchmarks/results/branches.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs/internals/parallel_measured.md").read_text(encoding="utf-8")
    assert script("branches").table_of(rows) in text


def test_the_documented_tables_are_the_measured_ones(script: Any) -> None:
    rows = json.loads((ROOT / "benchmarks/results/parallel.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs/internals/parallel_measured.md").read_text(encoding="utf-8")
    tables = script("_parallel_tables").tables(rows)
    assert len(tables) == 4
    for table in tables:
        assert table in text


def test_every_way_to_cut_branches_takes_the_same_noise(script: Any) -> None:
    sizes = script("_branch_ways").Sizes("tiny", 2, 3, image_side=32, num_tokens=5)
    whole, window = sizes.batch(), sizes.window()
    assert [micro.shape for micro in window] == [(2, 5, 32, 32)] * 3
    assert torch.equal(torch.cat([micro.input_ids for micro in window]), sizes.batch().input_ids)
    assert len(whole) == 6
