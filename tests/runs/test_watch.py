"""The terminal's view tells what the files tell, of every rank, and leaves the runs alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from math import inf, nan
from pathlib import Path

import pytest

from mmlab.cli.main import main
from mmlab.machine import this_process
from mmlab.runs.events import RunLog
from mmlab.runs.watch import summary, text_of
from tests.processes import IGNORING_INTERRUPTS

MEMORY = {"memory_bytes": 3 * 2**30, "memory_total_bytes": 8 * 2**30, "memory_source": "NVML"}
WRITER = """
import sys, time
from mmlab.runs.events import RunLog
from mmlab.machine import this_process
with RunLog(sys.argv[1]) as log:
    log.write("start", 0, num_steps=50_000, **this_process())
    for step in range(1, 50_001):
        log.write("step", step, loss=1 / step, num_samples=8, step_s=0.01)
        time.sleep(0.01)
"""


def write_run(folder: Path, *, rank: int = 0, num_steps: int = 4, loss: float = 2.0, **start: object) -> None:
    with RunLog(folder, rank) as log:
        log.write("start", 0, num_steps=8, **start)
        log.write("device", -1, utilization_ratio=0.5, power_w=310.0, **MEMORY)
        for step in range(1, num_steps + 1):
            log.write(
                "step", step, loss=loss, num_samples=8, padded_tokens=80, padded_patches=80, step_s=0.5, data_wait_s=0.1,
                text_waste=0.2, image_waste=0.1, combined_waste=0.15, peak_bytes=7,
            )  # fmt: skip


def test_every_rank_has_a_line_with_its_own_figures(tmp_path: Path) -> None:
    for rank in range(2):
        write_run(tmp_path / "run", rank=rank, num_steps=4 + rank, **this_process())
    found = summary(tmp_path)
    run = found["runs"]["run"]
    assert (run["status"], run["done_ratio"], run["left_s"]) == ("running", 0.5, pytest.approx(2.0))
    assert [row["steps"] for row in run["ranks"].values()] == [4, 5]
    row = run["ranks"]["0"]
    assert row["samples_per_s"] == pytest.approx(16)
    assert row["data_wait_ratio"] == pytest.approx(0.2)
    assert row["combined_waste"] == pytest.approx(0.15)
    assert (row["loss"], row["memory_bytes"], row["power_w"]) == (2.0, 3 * 2**30, 310.0)
    lines = text_of(found).splitlines()
    assert "samples/s" in lines[1]
    assert len(lines) == 4
    for shown in ("running", "50%", "0:02", "4/8", "16.0", "500.0", "3.00 of 8 NVML", "310"):
        assert shown in lines[2]
    assert "5/8" in lines[3]
    narrow = text_of(found, width=60).splitlines()
    assert max(map(len, narrow)) <= 60
    found["runs"]["x" * 100 + "_seed_1"] = found["runs"].popitem()[1]
    long = text_of(found, width=80)
    assert "x…xxxxxxxxxxxxxxxxxxxxx_seed_1  running" in long, "a long name leaves room for what matters"
    for shown in ("running", "50%", "4/8", "16.0"):
        assert shown in narrow[-2], "what matters most stays"


def test_what_is_not_known_is_a_dash_and_null(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=nan)
        log.write("warning", 1, message="the disk is slow", source="test")
    found = summary(tmp_path)
    json.dumps(found, allow_nan=False)
    assert found["left_s"] is None
    [run] = found["runs"].values()
    assert run["ranks"]["0"]["loss"] is None
    assert "the disk is slow" in text_of(found)


def test_a_run_that_has_written_nothing_yet_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "events-rank0.jsonl").touch()
    assert text_of(summary(tmp_path)).splitlines()[-1].split()[1:] == ["waiting", "0"]


@pytest.mark.parametrize("status", ["done", "stopped", "failed"])
def test_an_ended_run_says_how(tmp_path: Path, status: str) -> None:
    write_run(tmp_path)
    with RunLog(tmp_path) as log:
        log.write("end", 4, status=status, message="it broke" if status == "failed" else None)
    found = summary(tmp_path)
    [run] = found["runs"].values()
    assert run["status"] == status
    assert ("it broke" in text_of(found)) == (status == "failed")


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    write_run(tmp_path, **{**this_process(), "process_id": gone.pid})
    [run] = summary(tmp_path)["runs"].values()
    assert run["status"] == "killed"


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        (
            "start",
            "num_steps",
            "many",
            "num_steps of the start event at step 1 should be a number, found 'many'",
        ),
        ("start", "config", [1], "config of the start event at step 1 should be an object"),
        ("step", "loss", [2], "loss of the step event at step 1 should be a number"),
        ("device", "memory_bytes", "3", "memory_bytes of the device event at step 1 should be a number"),
        ("end", "status", None, "is not an event"),
    ],
)
def test_a_run_with_values_of_another_type_is_unreadable_and_the_others_are_shown(
    tmp_path: Path, kind: str, key: str, value: object, message: str
) -> None:
    write_run(tmp_path / "good", **this_process())
    (tmp_path / "bad").mkdir()
    line = json.dumps({"kind": kind, "step": 1, "rank": 0, "time_s": time.time(), key: value})
    (tmp_path / "bad" / "events-rank0.jsonl").write_text(line + "\n")
    found = summary(tmp_path)
    assert {name: run["status"] for name, run in found["runs"].items()} == {
        "good": "running",
        "bad": "unreadable",
    }
    assert found["done_ratio"] == 0.5, "of the others"
    text = " ".join(text_of(found, width=1000).split())
    assert message in text
    assert "good running 50%" in text
    assert "bad unreadable -" in text


def test_numbers_that_no_process_and_no_batch_has_end_no_view(tmp_path: Path) -> None:
    write_run(tmp_path / "a", **{**this_process(), "process_id": -1})
    with RunLog(tmp_path / "b") as log:
        log.write("start", 0, boot_id="x", config=None)
        log.write("step", 1, num_samples=inf)
    assert [run["status"] for run in summary(tmp_path)["runs"].values()] == ["killed", "running"]


def test_what_a_run_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run") as log:
        log.write("warning", -1, message="a\x1b[2Jb", source="events")
        log.write("end", 0, status="c\x1b[2Jd")
    text = text_of(summary(tmp_path))
    assert r"run: a\x1b[2Jb" in text
    assert r"c\x1b[2Jd" in text


def test_a_folder_without_runs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert f"no run in {tmp_path} or below it" in capsys.readouterr().err
    write_run(tmp_path / "a", **this_process())
    [events] = tmp_path.glob("a/events-*.jsonl")
    assert main(["watch", str(events)]) == 2  # where it had waited for ever
    assert f"{events} is a file; give the folder" in capsys.readouterr().err


def test_the_table_keeps_to_the_width_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", **this_process())
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["watch", str(tmp_path / "a"), "--once"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", **this_process())
    assert main(["watch", str(tmp_path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {"a"}


def test_it_follows_a_run_of_another_process_and_an_interrupt_leaves_that_alone(tmp_path: Path) -> None:
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "mmlab", "watch", str(tmp_path)]
    watching = subprocess.Popen(
        [*IGNORING_INTERRUPTS, *command],
        stdout=its_end,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
    )
    os.close(its_end)
    with watching, subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")]) as writing:
        shown = b""
        while b"/50000" not in shown:
            shown += os.read(terminal, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 0
        assert writing.poll() is None
        writing.kill()
    os.close(terminal)
    assert b"running" in shown


def test_it_ends_by_itself_when_the_last_run_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with RunLog(tmp_path) as log:
        log.write("end", 4, status="done")
    assert main(["watch", str(tmp_path)]) == 0
    assert "done" in capsys.readouterr().out


def test_a_folder_without_a_run_is_named_in_one_line() -> None:
    found = {"folder": "runs/a folder", "runs": {}, "errors": []}
    assert text_of(found).splitlines()[0] == "runs/a folder: waiting for a run"
