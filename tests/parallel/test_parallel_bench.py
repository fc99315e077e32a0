"""Strategies side by side in real processes: what is counted is what the system counted, and nothing is left out."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from mmlab.cli.main import main
from mmlab.parallel.bench import Arm, BenchOptions, bench_parallel, make_batch, train_arm
from mmlab.parallel.bench_report import DEVICES

SIZES = {"model": "tiny", "batch_size": 4, "image_side": 32, "num_tokens": 8, "steps": 2, "rounds": 2}
COUNTED = ("single", "ddp", "fsdp", "branch")
ARGUMENTS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


def test_shares_of_the_batch_are_padded_alike_and_differ() -> None:
    options = BenchOptions(batch_size=8, ranks=2, image_side=16, num_tokens=12)
    whole, halves = make_batch(options), [make_batch(options, rank, 2) for rank in range(2)]
    assert all(half.attention_mask.any(0).all() for half in halves)
    assert torch.equal(torch.cat([half.input_ids for half in halves]), whole.input_ids)
    assert not torch.equal(halves[0].pixel_values, halves[1].pixel_values)


def counting(name: str, options: BenchOptions, rank: int, cut: int | None) -> Arm:
    """A strategy whose steps return what the system counts that this process writes to its sockets."""
    arm, process = train_arm(name, options, rank, cut), psutil.Process()

    def step() -> dict[str, float]:
        before = process.io_counters().write_chars
        values = arm.step()
        return {**values, "written_bytes": process.io_counters().write_chars - before}

    return Arm(step, arm.held)


@pytest.fixture(scope="module")
def document() -> Any:
    """What the command prints, with strategies that count what they send."""
    more = {name: partial(counting, name) for name in COUNTED}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmlab.parallel.bench.bench_parallel", partial(bench_parallel, more=more))
        assert main(["bench", "parallel", "--device=cpu", "--json", *ARGUMENTS]) == 0
    return json.loads(printed.getvalue())


def test_every_strategy_has_every_repetition(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    assert {"one core", "single", "ddp"} <= set(rows)
    for row in rows.values():
        assert [len(steps) for steps in row["steps_s"]] == [2, 2]
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
        assert all(0 <= ratio <= 1 for ratio in row["idle_ratio"])
        assert all(size > 2**20 for size in row["memory_bytes"])
    assert rows["one core"]["efficiency"] == pytest.approx(1)


def test_the_same_weights_and_samples_in_every_turn(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    losses = {
        name: [[step["loss"] for step in turn] for turn in row["values"][0]] for name, row in rows.items()
    }
    for first, second in losses.values():
        assert first == second  # both turns began anew
    assert losses["single"][0] == pytest.approx(losses["one core"][0], rel=1e-4)
    assert losses["branch"] == losses["one core"]


def test_what_is_sent_is_what_was_predicted(document: Any) -> None:
    rows = {row["strategy"]: row for row in document["rows"]}
    for name in COUNTED:
        steps = [step for rank in rows[name]["values"] for turn in rank for step in turn]
        written, predicted = max(step["written_bytes"] for step in steps), rows[name]["sent_bytes"]
        # gloo reduces to all ranks and drops what is not asked for; the rest are headers of messages
        most = 1.6 if name == "fsdp" else 1.05
        assert predicted <= written * 1.001
        assert written <= most * predicted + 20_000 * (name != "single")


def test_the_model_speaks_of_every_number_of_devices(document: Any) -> None:
    rates = {(row["strategy"], row["num_devices"]): row["samples_per_s"] for row in document["scaling"]}
    assert set(rates) == {("single", 1), *((name, n) for name in ("ddp", "fsdp", "branch") for n in DEVICES)}
    assert all(rates[name, 1] == pytest.approx(rates["single", 1]) for name in ("ddp", "fsdp", "branch"))
    assert document["branch_bound"] > 0
    assert document["sentence"].count("samples/s") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "single,pipeline"], "pipeline"),
        (["--strategies", ","], "unknown strategy ','. Known: branch, ddp, fsdp, one core"),
        (["--strategies", "branch", "--ranks", "4"], "needs 2 ranks, found 4"),
        (["--ranks", "1"], "ranks must be at least 2, found 1"),
        (["--ranks", "3", "--batch-size", "8"], "must be divisible by the 3 ranks' micro-batches, found 8"),
        (["--batch-size", "2"], "batch_size must be at least 4, found 2"),
        (["--model", "huge"], "huge"),
        (["--precision", "int3"], "int3"),
        (["--precision", "fp16", "--strategies", "ddp,fsdp"], "'fsdp' does not train in fp16"),
        (["--num-tokens", "513"], "--num-tokens must be at most 512, found 513"),
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


@pytest.mark.parametrize("name", ["ranks", "rounds", "steps", "seed"])
def test_a_number_is_not_auto_whatever_its_help_says(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number, found 'auto'"):
        BenchOptions(**{"device": "cpu", name: "auto"})


def test_fp16_is_left_to_the_strategies_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def arms_of(_: Any, options: Any, arms: dict[str, Any], *__: Any, **___: Any) -> None:
        raise RuntimeError(" ".join(arms))

    monkeypatch.setattr("mmlab.parallel.bench.run_on_ranks", arms_of)
    with pytest.raises(RuntimeError, match=r"^one core single ddp$"):
        bench_parallel(model="tiny", device="cpu", precision="fp16")
    with pytest.raises(RuntimeError, match=r"^one core single ddp fsdp branch$"):
        bench_parallel(model="tiny", device="cpu")
