"""Strategies side by side in real processes: what is counted is what the system counted, and nothing is left out."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from typing import Any

import pytest
import torch
from torch import distributed

from mmlab.cli.main import main
from mmlab.errors import RunError
from mmlab.parallel.bench import bench_parallel
from mmlab.parallel.bench_figure import draw
from mmlab.parallel.bench_turns import BenchStrategy, Setting, make_batch

SIZES = {"model": "tiny", "batch_size": 4, "image_side": 32, "num_tokens": 8, "steps": 2, "rounds": 2}
PARTS = ("image", "text", "fusion")
ARGUMENTS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


def test_shares_of_the_batch_are_padded_alike_and_differ() -> None:
    setting = Setting(strategies=("single",), batch_size=8, num_ranks=2, image_side=16, num_tokens=12)
    whole, halves = make_batch(setting), [make_batch(setting, rank, 2) for rank in range(2)]
    assert all(half.attention_mask.any(0).all() for half in halves)
    assert torch.equal(torch.cat([half.input_ids for half in halves]), whole.input_ids)
    assert not torch.equal(halves[0].pixel_values, halves[1].pixel_values)


@pytest.fixture(scope="module")
def document() -> Any:
    """What the command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["bench", "parallel", "--device=cpu", "--json", *ARGUMENTS]) == 0
    return json.loads(printed.getvalue())


def test_every_strategy_has_every_repetition(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    assert {"one core", "single", "ddp"} <= set(rows)
    for row in rows.values():
        assert len(row["rounds_s"]) == 2
        assert [len(steps) for steps in row["steps_s"]] == [2, 2]
        assert 0 < row["step_p50_s"] <= row["step_p95_s"]
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
        assert all(0 <= ratio <= 1 for ratio in row["idle_ratio"])
        assert all(size > 2**20 for size in row["memory_bytes"])
    assert rows["one core"]["efficiency"] == pytest.approx(1)


def test_the_same_weights_and_samples_in_every_turn(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    for row in rows.values():
        assert row["losses"][0] == row["losses"][1]  # both turns began anew
    assert rows["single"]["losses"][0] == pytest.approx(rows["one core"]["losses"][0], rel=1e-4)


def test_what_is_sent_is_what_was_predicted(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    assert {"ddp", "fsdp", "branch"} <= set(rows)
    for row in rows.values():
        if row["processes"] == 1:
            assert row["sent_bytes"] == [0]
        else:
            # gloo reduces to all ranks and drops what is not asked for; the rest are headers of messages
            most = 1.6 if row["strategy"] == "fsdp" else 1.05
            assert row["predicted_sent_bytes"] <= max(row["sent_bytes"]) * 1.001
            assert max(row["sent_bytes"]) <= most * row["predicted_sent_bytes"] + 20_000


def test_the_model_speaks_of_every_number_of_devices(document: Any) -> None:
    assert {row["num_devices"] for row in document["scaling"]} >= {1}
    assert set(document["winners"]) == {"2", "4", "8", "16", "32", "64"}
    assert document["branch_bound"] > 0
    assert document["sentence"].count("samples/s") == 1


def test_the_figure_has_what_was_measured_beside_the_curves(document: Any) -> None:
    lines = [line for line in draw(document).axes[1].lines if line.get_marker() == "s"]
    squares = [tuple(point) for line in lines for point in line.get_xydata()]
    rows = [row for row in document["rows"] if row["predicted_s"] is not None]
    assert squares == [(row["devices"], row["samples_per_s"]) for row in rows]
    assert {row["strategy"] for row in rows} >= {"ddp", "branch"}


def fails_on_rank_1(setting: Setting, rank: int, cut: int | None) -> Any:
    if rank == 1:
        raise ValueError("no such luck")
    distributed.barrier()


def test_a_rank_that_fails_is_named_with_its_error() -> None:
    broken = {"broken": BenchStrategy(fails_on_rank_1)}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunError, match="rank 1 failed: ValueError: no such luck"):
        bench_parallel(["broken"], device="cpu", more=broken, progress=False, **SIZES)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before  # the launcher's handlers are gone with it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "single,pipeline"], "pipeline"),
        (["--strategies", ","], "at least one of one core, single"),
        (["--strategies", "reduce", "--ranks", "1"], "needs at least 2 ranks, found 1"),
        (["--ranks", "0"], "ranks must be at least 1, found 0"),
        (["--ranks", "3", "--batch-size", "8"], "must divide by the 3 ranks' micro-batches, found 8"),
        (["--batch-size", "2"], "batch_size must be at least 4, found 2"),
        (["--model", "huge"], "huge"),
        (["--precision", "int3"], "int3"),
        (["--plot", "figure.txt"], "figure.txt"),
    ],
)
def test_bad_input_exits_with_2_before_anything_is_launched(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "parallel", "--device", "cpu", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
