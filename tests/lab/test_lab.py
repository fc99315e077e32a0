"""A lab starts, pauses, goes on, stops and is opened again, in real processes; every error reaches whoever waits."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from html import escape
from math import isnan
from pathlib import Path

import pandas as pd
import psutil
import pytest

import mmlab
from mmlab.comparison.background import PROCESS, BackgroundRun, find_run, job_of
from mmlab.comparison.experiment import compare
from mmlab.comparison.options import PRECISIONS, ComparisonOptions
from mmlab.comparison.result import Comparison, load_comparison
from mmlab.errors import DataError, OptionError, RunError
from mmlab.lab.lab import Lab
from mmlab.lab.messages import earlier_of, saved_view, tile_of
from mmlab.machine import this_process
from mmlab.runs.control import CONTROL
from mmlab.runs.events import RunLog
from mmlab.runs.follow import Runs
from mmlab.runs.summaries import verdict_of
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.precision import PRECISIONS as ALL_PRECISIONS
from tests.ranks import fork_background_runs

SMALL = {"image": "aspect:48", "batch_size": 8, "num_workers": 0, "equal": "batch_size"}


@pytest.fixture(autouse=True)
def forked_background_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are started in this process; those of processes that tests start have an interpreter of their own."""
    fork_background_runs(monkeypatch)


def until(true: Callable[[], object], lab: Lab | None = None) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"{inspect.getsource(true).strip()}: {lab and (lab.state, lab.progress, lab.error)}"
            )
        time.sleep(0.05)


def test_a_run_is_paused_looked_at_opened_again_and_finished(scenes: Path, tmp_path: Path) -> None:
    lab = Lab(scenes, schedulers=("random", "budget"), out=tmp_path / "out", epochs=2, **SMALL)
    assert (lab.state, lab.error) == ("idle", None)
    assert all(map(isnan, lab.progress))
    for too_early in (lab.wait, lab.table):
        with pytest.raises(RunError, match=r"press Start or call start\(\) first"):
            too_early()
    lab.pause()
    lab.stop()
    assert lab.start() is lab
    assert lab.state == "running"
    with pytest.raises(RunError, match="running, no step written yet"):
        lab.table()
    run = lab._run
    assert lab.start()._run is run, "a second start does nothing"

    assert lab.wait_for(done_ratio=1e-6, timeout_s=120) == "running"
    assert 0 < lab.progress.done_ratio < 1
    lab.pause()
    assert lab.wait_for("paused") == "paused"
    with pytest.raises(RunError, match=r"still paused after 0.2 s, waited for running"):
        lab.wait_for("running", timeout_s=0.2)
    done, left_s = lab.progress
    assert 0 < done < 1
    assert left_s > 0
    assert lab.figure().axes[0].get_title() == "training loss"
    table = lab.table()
    assert set(table.index) == {"random", "budget"}
    assert "paused" in set(table["status"])
    steps = pd.read_csv(lab.to_csv(tmp_path / "steps.csv"))
    assert len(steps) == table["steps"].sum()
    assert {"run", "step", "loss", "step_s", "predicted_cost"} <= set(steps)
    page = lab.report(tmp_path / "report.html").read_text()
    assert "data:image/png;base64" in page
    assert 'src="http' not in page

    other = Lab.open(tmp_path / "out")
    other._run = BackgroundRun(
        run.folder, json.loads((run.folder / PROCESS).read_text()), None
    )  # as if elsewhere
    assert other.state == "paused"
    assert other.options["epochs"] == 2
    again = Lab(scenes, schedulers=("random", "budget"), out=tmp_path / "out", epochs=2, **SMALL).start()
    assert again.state == "paused", "the same lab made anew, as when its cell is run twice, finds its run"
    with pytest.raises(OptionError, match="a run with other options is active in"):
        Lab(scenes, schedulers=("random",), out=tmp_path / "out", **SMALL).start()

    other.resume()
    until(lambda: lab.state != "paused", lab)
    assert lab.progress[0] >= done
    comparison = lab.wait()
    assert [arm.scheduler for arm in comparison.arms] == ["random", "budget"]
    assert not comparison.interrupted
    assert (lab.state, other.state, lab.error) == ("done", "done", None)
    time.sleep(0.1)
    assert lab.progress == other.progress == (1.0, 0.0)
    assert "What each batch scheduler costs" in lab.report(tmp_path / "report.html").read_text()
    assert isinstance(Lab.open(tmp_path / "out").wait(), Comparison)


def test_a_stopped_run_keeps_the_epochs_that_all_finished(scenes: Path, tmp_path: Path) -> None:
    options = {**SMALL, "schedulers": ("random", "sorted"), "out": tmp_path, "image": "aspect:32"}
    lab = Lab(scenes, epochs=300, **options).start()
    until(
        lambda: [bool(state.latest("eval")) for state in lab._poll(at_once=True).values()] == [True, True],
        lab,
    )
    lab.stop()
    assert lab.state in ("stopping", "stopped")
    comparison = lab.wait()
    assert comparison.interrupted
    assert 1 <= len(comparison.arms[0].epochs) < 300
    assert lab.state == "stopped"

    lab.start()  # into the same folder, and stopped before there is anything new: the old result must not come back
    lab.stop()
    stopping = lab._run
    assert lab.start()._run is not stopping, "it waits for the end, and starts anew"
    lab.stop()
    with pytest.raises(RunError, match="stopped before every scheduler had finished an epoch"):
        lab.wait()
    assert (lab.state, lab.error) == ("stopped", None)
    assert (tmp_path / "previous-1" / "comparison.json").exists()


def test_a_run_that_is_killed_has_failed_and_says_so_everywhere(scenes: Path, tmp_path: Path) -> None:
    lab = Lab(scenes, schedulers=("random",), out=tmp_path, epochs=1_000, **SMALL).start()
    until(lambda: (tmp_path / "comparison.json").exists(), lab)
    assert lab._run is not None
    os.kill(lab._run._identity["process_id"], signal.SIGKILL)
    with pytest.raises(RunError, match=r"exit code -9 .* has the epochs that all") as raised:
        lab.wait()
    assert load_comparison(tmp_path).interrupted
    assert str(raised.value).count("exit code -9") == 1
    assert lab.state == "failed"
    assert "exit code -9" in str(lab.error)
    assert not str(lab.error).endswith("Its log ends:\n"), "an empty log is not announced"
    runs = Runs(tmp_path)
    runs.poll()
    assert {name: state.status for name, state in runs.states.items()} == {"runs/random": "killed"}
    assert find_run(tmp_path) is lab._run
    killed, panel = lab._run, lab.panel()
    until(lambda: lab.state == "failed", lab)
    assert lab._run is killed
    (tmp_path / "process.json").write_text(json.dumps({"process": this_process(), "job": killed.job}))
    assert lab.state == "running", "a later run, which another process has started and the panel draws"
    panel.close()
    shutil.rmtree(tmp_path)
    assert killed.error == f"its process ended with exit code -9 after {tmp_path} was removed"


CELL = """
import signal, sys
from mmlab import Lab
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a notebook's kernel when a button is pressed
lab = Lab({scenes!r}, schedulers=("random",), out={out!r}, epochs=1_000, image="aspect:32", equal="batch_size", num_workers=0,
          detached={detached})
lab.start()
signal.signal(signal.SIGINT, signal.default_int_handler)
print(lab._run._identity["process_id"], flush=True)
{then}
"""


def start_elsewhere(scenes: Path, out: Path, then: str, *, detached: bool = False) -> subprocess.Popen[str]:
    code = CELL.format(scenes=str(scenes), out=str(out), then=then, detached=detached)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_interrupt_of_whoever_waits_stops_the_run_cleanly(scenes: Path, tmp_path: Path) -> None:
    then = "comparison = lab.wait()\nprint(comparison.interrupted, lab.state)"
    with start_elsewhere(scenes, tmp_path, then) as kernel:
        until(lambda: b'"kind":"eval"' in b"".join(map(Path.read_bytes, tmp_path.glob("runs/*/*.jsonl"))))
        kernel.send_signal(signal.SIGINT)
        found = kernel.communicate(timeout=60)[0]
    assert found.splitlines()[1] == "True stopped"


def test_a_run_ends_with_the_process_that_started_it_unless_it_is_detached(
    scenes: Path, tmp_path: Path
) -> None:
    for detached in (False, True):
        out = tmp_path / str(detached)
        with start_elsewhere(scenes, out, "", detached=detached) as kernel:
            process_id = int(kernel.communicate(timeout=60)[0])
        if not detached:
            attached_id = process_id
    lab = Lab.open(tmp_path / "True")
    until(lambda: lab.progress[0] > 0, lab)
    assert lab.state == "running"
    lab.pause()
    until(lambda: lab.state == "paused", lab)
    lab.stop()
    with suppress(RunError):  # where it was paused in its first epoch there is nothing to compare
        assert lab.wait().interrupted
    assert lab.state == "stopped"
    until(lambda: not is_running(attached_id))


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE  # nobody collects it here
    except psutil.NoSuchProcess:
        return False


def test_a_panel_offers_to_compare_with_what_another_process_has_moved_aside(tmp_path: Path) -> None:
    lab = Lab("data/sample", schedulers=("random",), epochs=3, out=tmp_path)
    panel = lab.panel()
    assert panel.earlier.children == ()
    about = {"process": this_process(), "job": job_of(lab.data, ("random",), lab.options)}
    for folder in (tmp_path / "previous-1", tmp_path):  # as another process leaves it that starts a run
        folder.mkdir(exist_ok=True)
        (folder / "process.json").write_text(json.dumps(about))
    panel.message.value = "epochs must be at least 1"
    assert lab.state == "running"
    assert [box.tooltip for box in panel.earlier.children[1:] if box.value] == ["previous-1"]
    assert panel._followed == [tmp_path, tmp_path / "previous-1"]
    assert panel.message.value == "epochs must be at least 1", "it stays until it is corrected"
    panel.close()


def test_a_comparison_that_no_lab_started_can_be_opened(scenes: Path, tmp_path: Path) -> None:
    found = compare(scenes, ("random",), out=tmp_path, epochs=1, progress=False, **SMALL)
    lab = Lab.open(tmp_path)
    assert lab.state == "done"
    assert lab.options["epochs"] == 1
    for key in ("text_waste", "image_waste", "combined_waste"):
        assert lab.table().loc["random", key] == pytest.approx(found.table.loc["random", key])
    assert lab.wait().arms[0].scheduler == "random"
    lab.stop()
    assert not (tmp_path / CONTROL).exists(), "there is nobody to tell"
    with pytest.raises(DataError, match="no comparison in"):
        Lab.open(tmp_path / "nowhere")


def test_a_comparison_that_reads_its_images_can_be_stopped(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with RunLog(
            tmp_path / "runs" / "random"
        ) as log:  # it has the files of its runs, and nothing in them yet
            lab = Lab.open(tmp_path)
            assert lab.state == "waiting"
            waiting = pool.submit(lab.wait)
            lab.stop()
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            log.write("start", 0, scheduler="random")
            log.write("end", 0, status="stopped")
        with pytest.raises(DataError, match="no comparison"):
            waiting.result(timeout=30)
    assert json.loads((tmp_path / "control.json").read_text())["command"] == "stop"


def test_a_run_keeps_its_result_when_a_later_one_uses_the_folder(scenes: Path, tmp_path: Path) -> None:
    lab = Lab(scenes, schedulers=("random",), out=tmp_path, epochs=1, **SMALL).start()
    found = lab.wait()
    num_steps = len(found.steps)
    first = lab.table()
    later = Lab(scenes, schedulers=("random",), out=tmp_path, epochs=2, **SMALL).start()
    assert (lab.state, lab.error) == ("done", None), "the later run moved its files aside"
    assert len(later.wait().steps) == 2 * num_steps
    assert len(lab.wait().steps) == len(found.steps) == num_steps, "of the result in hand, too"
    assert lab.table().equals(first)
    assert lab.progress.done_ratio == 1.0
    assert len(lab.to_csv(tmp_path / "steps.csv").read_text().splitlines()) == 1 + num_steps
    assert f"{found.arms[0].samples_per_s:.1f}" in lab.report(tmp_path / "page.html").read_text()


def test_what_a_run_was_asked_for_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    points = [(0, {"image-text": 1.0})]
    job = json.loads(json.dumps(job_of("~/data", ("random",), {"ratios": points})))
    assert job["data"] == str(tmp_path / "data")
    assert job["options"]["ratios"] == [[0, {"image-text": 1.0}]]
    assert job_of("s3://bucket/0.tar", ("random",), {})["data"] == "s3://bucket/0.tar"
    lab = Lab("~/data", schedulers=("random",), out=tmp_path / "lab", ratios=points)
    asked = json.loads(json.dumps(job_of(lab.data, ("random",), {**lab.options, "schedulers": None})))
    assert lab.differences(asked) == ""
    del asked["options"]["ratios"]
    assert lab.differences(asked) == "ratios=None"
    one, other = (
        Lab("~/data", schedulers={"mine": make_scheduler("random", batch_size=size)}, out=tmp_path / "lab")
        for size in (8, 64)
    )
    asked = job_of(one.data, one.options["schedulers"], {**one.options, "schedulers": None})
    assert one.differences(asked) == ""
    assert "batch_size=8" in other.differences(asked), "a configured scheduler is more than its name"
    fewer, more = (Lab(data, out=tmp_path / "lab") for data in (["a"], ["a", "b"]))
    asked = job_of(fewer.data, fewer.options["schedulers"], {**fewer.options, "schedulers": None})
    assert fewer.differences(asked) == ""
    assert "data in memory=\"['a']" in more.differences(asked)
    asked = job_of(one.data, one.options["schedulers"], {**one.options, "schedulers": None})
    other.options["schedulers"], other._opened = ("mine",), True
    assert other.differences(asked) == "", "only the names are known to a lab that was opened"
    (tmp_path / "broken").mkdir()
    for damaged in ("[]", '{"job": {}, "process": {}}'):
        (tmp_path / "broken/process.json").write_text(damaged)
        with pytest.raises(DataError, match=r"process.json is damaged .*; remove it"):
            Lab.open(tmp_path / "broken")


def test_the_code_of_a_lab_makes_the_same_lab(tmp_path: Path) -> None:
    lab = Lab("data/sample", schedulers=("random", "packed"), budget=99.0, epochs=7, out=tmp_path, lr=0.5)
    lab.configure(precision="bf16")
    names: dict = {}
    exec(lab.code().split("lab.start()")[0], names)
    assert (names["lab"].options, names["lab"].folder) == (lab.options, lab.folder)
    configured = Lab("data/sample", schedulers={"mine": make_scheduler("bucket", batch_size=4)})
    names = {}
    exec(configured.code().split("lab.start()")[0], names)
    assert names["lab"].options == configured.options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, found 0"),
        ({"epochs": 1.5}, "epochs: expected a valid integer, found 1.5"),
        ({"batch_size": -2}, "batch_size must be at least 1, found -2"),
        ({"budget": 0}, "budget must be above 0, found 0"),
        ({"budget": "much"}, "budget: expected a valid number, found 'much'"),
        ({"precision": "fp8"}, "precision: expected 'fp32', 'tf32', 'bf16' or 'fp16', found 'fp8'"),
        ({"image": "round:3"}, "image policy 'round:3'"),
        ({"schedulers": 3}, "schedulers must be a list of names, found 3"),
        ({"schedulers": ()}, "no schedulers to compare; give at least one name"),
        ({"schedulers": ("rndom",)}, "unknown scheduler 'rndom'; did you mean 'random'"),
        ({"schedulers": ("random", "random")}, "'random' is named twice"),
        ({"epoch": 3}, "unknown option of Lab 'epoch'; did you mean 'epochs'"),
    ],
)
def test_what_cannot_work_is_refused_and_changes_nothing(change: dict, message: str) -> None:
    lab = Lab("data/sample")
    before = dict(lab.options)
    with pytest.raises(OptionError, match=message):
        lab.configure(**change)
    assert lab.options == before
    with pytest.raises(OptionError, match=message):
        Lab("data/sample", **change)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Lab("data/sample", out=3), "out"),  # type: ignore[arg-type]
        (lambda: compare("data/sample", out=3), "out"),  # type: ignore[arg-type]
        (lambda: mmlab.train(3), "config"),  # type: ignore[arg-type]
        (lambda: mmlab.train("examples/train.toml", resume=3), "resume"),  # type: ignore[arg-type]
        (lambda: mmlab.fit_time("tiny", None), "model"),  # type: ignore[arg-type]
        (lambda: mmlab.fit_time(mmlab.build_model("tiny", vocab_size=9), 3), "sizes"),  # type: ignore[arg-type]
        (lambda: mmlab.LoadingPanel(3, "cache"), "dataset"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be "):
        call()


def test_what_cannot_be_sent_to_another_process_is_raised_by_start(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot send this to another process"):
        Lab(lambda: None, out=tmp_path).start()


def test_a_lab_takes_what_a_comparison_takes() -> None:
    assert set(Lab("data/sample").options) == {
        "schedulers",
        *(item.name for item in fields(ComparisonOptions)),
    }
    assert tuple(ALL_PRECISIONS) == PRECISIONS


def test_a_change_of_a_widget_is_a_change_of_the_next_run(tmp_path: Path) -> None:
    lab = Lab("data/sample", schedulers=("random",), out=tmp_path)
    panel = lab.panel()
    assert lab.panel() is panel
    panel.epochs.value, panel.batch_size.value, panel.budget.value = 9, 4, "512"
    panel.schedulers.value, panel.precision.value = ("bucket", "budget"), "bf16"
    found = {key: lab.options[key] for key in ("schedulers", "epochs", "batch_size", "budget", "precision")}
    assert list(found.values()) == [("bucket", "budget"), 9, 4, 512.0, "bf16"]
    assert "budget=512.0" in panel.code.value
    panel.epochs.value = 0
    panel.budget.value = "much"
    assert "epochs must be at least 1, found 0" in panel.message.value
    assert "budget must be a number of padded tokens, or empty; found &#x27;much&#x27;" in panel.message.value
    assert (lab.options["epochs"], lab.options["budget"]) == (9, 512.0)
    panel.epochs.value, panel.budget.value = 2, ""
    assert panel.message.value == ""
    assert (lab.options["epochs"], lab.options["budget"]) == (2, None)
    panel.close()
    again = lab.panel()
    assert (again.comm is None, again.epochs.value) == (False, 2)
    again.close()


def test_the_progress_of_a_run_does_not_follow_the_options_of_the_next(tmp_path: Path) -> None:
    with RunLog(tmp_path / "runs" / "random") as log:
        log.write("start", 0, num_steps=4)
        log.write("step", 1, step_s=1.0)
    lab = Lab("data/sample", schedulers=("random",), out=tmp_path)
    gone = this_process() | {"process_start_s": 0.0}
    about = {"job": {"schedulers": ["random"]}, "process": gone}
    lab._run = BackgroundRun(tmp_path, about, None)
    lab.configure(schedulers=("random", "budget"))
    assert lab.progress == (0.25, 3.0)
    assert lab.state == "failed"
    panel = lab.panel()
    assert lab.state == "running", "`mmlab compare` trains in the folder, and the panel draws it"
    lab.stop()
    assert json.loads((tmp_path / CONTROL).read_text())["command"] == "stop"
    panel.close()


def test_start_refuses_while_a_field_has_a_value_that_cannot_work(tmp_path: Path) -> None:
    lab = Lab("data/sample", schedulers=("random",), out=tmp_path, **SMALL)
    panel = lab.panel()
    panel.batch_size.value = 1.5
    assert "batch_size: expected a valid integer, found 1.5" in panel.message.value
    assert lab.options["batch_size"] == 8
    with pytest.raises(OptionError, match=r"not started: Lab batch_size.*found 1.5; correct it in the panel"):
        lab.start()
    assert (lab.state, list(tmp_path.iterdir())) == ("idle", [])
    panel.close()


def test_an_error_is_raised_by_wait_and_mended_by_the_next_start_whose_run_is_kept_to_compare(
    scenes: Path, tmp_path: Path
) -> None:
    """And a new lab can stop what goes on."""
    options = {**SMALL, "schedulers": ("budget",), "out": tmp_path}
    lab = Lab(scenes, epochs=1, budget=3, **options).start()
    with pytest.raises(OptionError, match="above the budget of 3"):
        lab.wait()
    assert lab.state == "failed"
    assert lab.error is not None
    assert "Traceback" in lab.error
    options["budget"] = 400.0
    lab.configure(budget=400.0)
    panel = lab.panel()
    assert not lab.start().wait().interrupted
    assert (lab.state, lab.error) == ("done", None)
    assert panel.earlier.children == ()
    panel.epochs.value = 1_000
    lab.start()
    _, box = panel.earlier.children
    assert (box.description, box.value) == ("previous-1: epochs=1", True)
    assert panel._followed == [tmp_path, tmp_path / "previous-1"]

    runs = Runs(panel._followed)  # as the live view reads it
    until(
        lambda: runs.poll() and all(run.count() > 3 for run in runs.states.values()) and len(runs.states) == 2
    )
    before, now = sorted(runs.states.values(), key=lambda run: run.first_s)
    # stopped in its first epoch, a run has failed
    until(lambda: runs.poll() and now.count() > before.count() + 1)
    assert (before.name, now.name) == ("previous-1/budget", "budget")
    assert earlier_of([before, now]) == earlier_of([before], begins=True) == [before]
    assert dict(tile_of(now, [before])["figures"])["over previous-1"].endswith(" %")
    page = saved_view([before, now])
    assert page.startswith(f"<p>{escape(verdict_of([now]))}</p>"), (
        "the verdict is on the new run, as in the live view"
    )
    assert "over previous-1" in page
    box.value = False
    assert panel._followed == [tmp_path]

    again = Lab(scenes, epochs=2, **options)  # the cell is run again with other options
    with pytest.raises(OptionError, match=r"a run with other options is active in .* \(epochs=1000\)"):
        again.start()
    assert again.state == "running"
    again.stop()
    until(lambda: again.state != "stopping")
    assert (again.state, lab.state) == ("stopped", "stopped")
    box = Lab(scenes, **options).panel().earlier.children[1]
    assert (box.description, box.layout.width) == ("previous-1: epochs=1", "auto")  # 300 pixels would cut it
    (tmp_path / "previous-1" / "process.json").write_text("{")
    assert "process.json is damaged" in Lab(scenes, **options).panel().earlier.children[1].description
    panel.close()
