"""`make gpu` refuses a machine without a GPU, and its cases work: here on the CPU, at toy sizes."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mmlab.comparison.sizing import SHORT_FIT
from tests.prices import speck

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toy sizes gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def toy(gpu: ModuleType) -> Iterator[Any]:
    with speck():
        yield gpu.Bench(
            device="cpu",
            block_bytes=(64 * 2**20,),
            matrix_side=256,
            busy_s=0.3,
            model="tiny",
            batch_sizes=(4,),
            image_side=32,
            num_tokens=8,
            num_repeats=2,
            steps_per_repeat=1,
            num_warmup_steps=1,
            timed_models=("speck", "tiny"),
            timed_budget=100,
            fit_s=0.5,
            compiled_models=("speck",),
            compile="eager",
            num_compiled_shapes=2,
            specification="H200",
            overhead_rounds=2,
            num_new_shapes=2,
            compare_images=20,
            compare_model="speck",
            compare_image="aspect:32",
            compare_epochs=1,
            compare_batch_size=8,
            article_images=8,
            article_captions=2,
            article_rounds=1,
            article_batch_size=4,
            num_workers=1,
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_line(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1)
    assert "torch sees no CUDA device" in child.stderr
    assert not list(tmp_path.iterdir())


def test_readings_follow_a_block_of_known_size(toy: Any) -> None:
    """In a process of its own: one that has freed much gives out a block without growing."""
    code = (
        "import json, pickle, sys, torch, gpu; torch.set_num_threads(1); "
        "print(json.dumps(gpu.readings(pickle.load(sys.stdin.buffer))))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
        input=pickle.dumps(toy),
        check=True,
        stdout=subprocess.PIPE,
    )
    row, goals = json.loads(child.stdout)
    (block,) = row["blocks"]
    assert block["meter_bytes"] == pytest.approx(64 * 2**20, rel=0.2)
    assert row["idle_utilization_ratio"] < row["busy_utilization_ratio"]
    assert {goal["name"] for goal in goals} >= {
        "meter sees a block of known size",
        "busy device reads as busy",
    }


def test_precisions_keep_every_repetition(gpu: ModuleType, toy: Any) -> None:
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    row, goals = gpu.precisions(toy)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before
    assert set(row["step_s"]) == {"fp32", "bf16", "fp16", "bf16 again"}  # tf32 on CUDA only
    assert all(len(times) == 2 and min(times) > 0 for times in row["step_s"].values())
    assert row["flop_per_step"] > 1e6
    assert row["loss"]["fp32"] == pytest.approx(row["loss"]["bf16"], rel=0.1)
    assert goals[0]["measured"] == pytest.approx(row["median_step_s"]["fp32"] / row["median_step_s"]["bf16"])


def test_live_bytes_are_counted_for_each_precision(gpu: ModuleType, toy: Any) -> None:
    row, _ = gpu.live_bytes(toy)
    assert [step["precision"] for step in row["steps"]] == ["fp32", "bf16"]
    assert all(step["live_peak_bytes"] > 2**20 for step in row["steps"])


def test_the_comparison_runs_and_keeps_its_epochs(
    gpu: ModuleType, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHORT_FIT, "seconds", 1.0)
    row, goals = gpu.compare_schedulers(toy)
    assert [arm["scheduler"] for arm in row["arms"]] == ["random", "sorted", "bucket", "budget", "fastest"]
    assert all(len(arm["epochs"]) == 1 for arm in row["arms"])
    assert row["memory_sources"] == ["process RSS"]
    for arm in row["arms"]:
        assert len(row["steps"][arm["scheduler"]]) == arm["num_batches"]
    assert goals[0]["name"] == "padding, fastest over random"
    assert sum("predicted" in goal["name"] for goal in goals) == len(row["arms"])


def test_seconds_are_predicted_by_a_time_model_and_from_a_data_sheet(gpu: ModuleType, toy: Any) -> None:
    row, goals = gpu.step_seconds(toy)
    assert (row["specification"], [model["model"] for model in row["models"]]) == ("H200", ["speck", "tiny"])
    for model in row["models"]:
        assert len(model["shapes"]) == len(model["measured_s"]) == len(model["calibrated_s"]) == 8
        assert max(model["data_sheet_s"]) < min(model["measured_s"])  # a CPU is no H200
    assert row["models"][0]["calibrated_p50_ratio"] < row["models"][0]["data_sheet_p50_ratio"]
    assert {goal["name"] for goal in goals} >= {
        "speck: held-out p50 error",
        "tiny: seconds of a fit",
        "H200 calibrated on speck: tiny, median error",
    }


def test_new_shapes_are_timed_beside_known_ones(gpu: ModuleType, toy: Any) -> None:
    row, goals = gpu.new_shapes(toy)
    assert [(found["work"], found["seen"]) for found in row["works"]] == [
        (work, seen)
        for work in ("patch embedding", "attention by cuDNN", "attention without cuDNN", "step")
        for seen in ("first", "again", "once more")
        for _ in range(2)
    ]
    assert goals[0]["name"] == "a new shape makes a step longer by"


def test_compiled_steps_are_timed_beside_those_as_written(gpu: ModuleType, toy: Any) -> None:
    row, goals = gpu.compiling(toy)
    (model,) = row["models"]
    assert {len(found) for found in model["first_s"].values()} == {2} == {len(model["shapes"])}
    assert {len(found) for found in model["step_s"].values()} == {4}
    assert goals[0]["measured"] > 0


def test_epochs_from_loaders_are_timed_beside_the_same_epochs_from_memory(gpu: ModuleType, toy: Any) -> None:
    row, goals = gpu.loading(toy)
    names = [found["loader"] for found in row["loaders"]]
    assert names == ["kept in memory", "threads", "processes", "DataLoader of torch"]
    for found in row["loaders"]:
        assert len(found["epochs"]) == toy.article_rounds
        for epoch in found["epochs"]:
            assert len(epoch["step_s"]) == len(epoch["wait_s"]) == found["num_steps"]
            assert sum(epoch["step_s"]) + sum(epoch["wait_s"]) <= epoch["epoch_s"]
    assert len(goals) == 3, "one for each loader"


def test_loops_and_the_articles_setting_run_where_the_steps_are_computed(
    gpu: ModuleType, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_articles_setting.SIDE", 32)
    row, goals = gpu.loops(toy)
    assert {"by hand", "FusionTrainer"} <= {found["loop"] for found in row["loops"]}
    assert [goal["name"] for goal in goals] == ["overhead of FusionTrainer, short step, us"]
    row, goals = gpu.articles(toy)
    assert all(found["on"]["device"] == "cpu" and len(found["rounds"]) == 1 for found in row["arms"])
    assert {found["rounds"][0]["num_samples"] for found in row["arms"]} == {16}
    assert any("as claimed" in goal["goal"] for goal in goals)


def test_waiting_for_the_device_is_told_of_on_cuda_only(gpu: ModuleType, toy: Any) -> None:
    with pytest.raises(gpu.Skipped, match="only CUDA"):
        gpu.device_reads(toy)


def test_cases_are_skipped_cut_off_or_failed_by_name_and_all_is_saved(
    gpu: ModuleType, toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = {"name": "a bound", "goal": "<= 3", "measured": 2.0, "met": True}

    def fine(bench: Any) -> Any:
        return {"figure": [1.0, 2.0]}, [bound]

    def endless(bench: Any) -> Any:
        while True:
            time.sleep(0.01)

    def lacking(bench: Any) -> Any:
        import no_such_module  # noqa: F401

    def broken(bench: Any) -> Any:
        raise ValueError("wrong")

    cases = {
        "fine": (fine, 0),
        "lacking": (lacking, 0),
        "broken": (broken, 0),
        "endless": (endless, 0),
        "late": (fine, 60),
    }
    monkeypatch.setattr(gpu, "CASES", {name: gpu.Case(*case) for name, case in cases.items()})
    path = tmp_path / "new" / "gpu.json"
    gpu.write_results(path, [], [])  # the first one works out which code it measures
    gpu.run_cases(
        toy,
        list(cases),
        deadline=time.monotonic() + 0.5,
        save=lambda rows, goals: gpu.write_results(path, rows, goals),
    )
    found = json.loads(path.read_text())
    rows = {row["case"]: row for row in found["rows"]}
    assert (rows["fine"]["status"], rows["fine"]["figure"]) == ("done", [1.0, 2.0])
    assert (rows["lacking"]["status"], rows["lacking"]["reason"]) == (
        "skipped",
        "No module named 'no_such_module'",
    )
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("failed", "ValueError('wrong')")
    assert "in broken" in rows["broken"]["traceback"]
    assert (rows["endless"]["status"], rows["endless"]["reason"]) == ("skipped", "cut off after 0 s")
    assert rows["late"]["reason"].endswith("it needs 60")
    assert found["goals"] == [{"case": "fine", **bound}]
    assert {"machine", "versions", "date"} < set(found)


def test_cases_that_were_not_measured_again_keep_what_an_earlier_run_found(gpu: ModuleType) -> None:
    def row(case: str, status: str, date: str) -> dict[str, str]:
        return {"case": case, "status": status, "date": date}

    before = {
        "rows": [row(case, "done", "Monday") for case in ("new_shapes", "loops", "doctor")],
        "goals": [{"case": case, "measured": 1} for case in ("new_shapes", "loops")],
    }
    rows = [
        row("loops", "done", "Friday"),
        row("doctor", "skipped", "Friday"),
        row("compare", "skipped", "Friday"),
    ]
    found, goals = gpu.with_earlier(before, rows, [{"case": "loops", "measured": 2}])
    assert found == [
        row("new_shapes", "done", "Monday"),
        row("doctor", "done", "Monday"),
        row("loops", "done", "Friday"),
        row("compare", "skipped", "Friday"),
    ]
    assert goals == [{"case": "new_shapes", "measured": 1}, {"case": "loops", "measured": 2}]
