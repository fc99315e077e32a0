"""The notebooks' panels answer, run, stop, and show every error; real widgets, real runs, no front-end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import ipywidgets as widgets
import psutil
import pytest

from mmlab.comparison import Comparison
from mmlab.dashboard import MAX_EXPLORED, CompareDashboard, PlanExplorer
from mmlab.errors import OptionError, RunError
from mmlab.images import Aspect
from mmlab.notebook import draw_sizes
from mmlab.records import Records
from mmlab.types import SampleSizes

SMALL = {"image": "aspect:48", "batch_size": 8, "num_workers": 0, "progress": False}
ANSWER_S = 0.2


@pytest.fixture(scope="module")
def many() -> SampleSizes:
    return draw_sizes(20_000).resized(Aspect(224**2))


def test_every_slider_of_the_explorer_changes_the_table() -> None:
    explorer = PlanExplorer(draw_sizes(1000).resized(Aspect(224**2)), ("random", "bucket", "budget"))
    shown = explorer.table.value
    explorer._update()
    assert explorer.table.value == shown
    moves = {
        explorer.samples: 8,
        explorer.window: 256,
        explorer.text_step: 1,
        explorer.classes: 1,
        explorer.ranks: 4,
        explorer.schedulers: ("sorted",),
    }
    for control, value in moves.items():
        before = explorer.table.value
        control.value = value
        assert explorer.message.value == ""
        assert explorer.table.value != before, control.description
    assert "sorted" in explorer.table.value
    assert "bucket" not in explorer.table.value
    assert "combined waste" in explorer.table.value
    explorer.schedulers.value = ()
    assert explorer.message.value == ""


def test_a_budget_that_is_too_small_is_shown_and_mended_by_the_next_move(records: Records) -> None:
    sizes = records.sizes(Aspect(96**2))
    sizes = SampleSizes(
        num_tokens=[9000, *sizes.num_tokens[1:]], height=sizes.height, width=sizes.width, group=sizes.group
    )
    explorer = PlanExplorer(sizes, ("random",))
    shown = explorer.table.value
    explorer.schedulers.value = ("budget",)
    assert "OptionError: sample 0 alone (9000 tokens" in explorer.message.value
    assert "<details><summary>traceback" in explorer.message.value
    assert explorer.table.value == shown
    explorer.samples.value = 256
    assert explorer.message.value == ""
    assert explorer.table.value != shown


def test_sliders_answer_at_once_on_a_hundred_thousand_samples(many: SampleSizes) -> None:
    explorer = PlanExplorer(many)
    assert len(many) == 100_000
    assert "of 100,000 samples" in explorer.table.value
    answers_s = []
    for samples in (48, 64, 40, 24, 56):
        started = time.perf_counter()
        explorer.samples.value = samples
        answers_s.append(time.perf_counter() - started)
    assert min(answers_s) < ANSWER_S


def test_the_explored_part_holds_whole_images(many: SampleSizes) -> None:
    part = PlanExplorer(many, ("random",))._sizes
    assert MAX_EXPLORED - 5 < len(part) <= MAX_EXPLORED
    assert {int((part.group == group).sum()) for group in part.group[:50]} == {5}
    unknown = SampleSizes(
        num_tokens=many.num_tokens, height=many.height, width=many.width, group=[-1] * len(many)
    )
    assert len(PlanExplorer(unknown, ("random",))._sizes) == MAX_EXPLORED


def test_a_run_goes_on_in_the_background_and_ends_with_a_comparison(scenes: Path, tmp_path: Path) -> None:
    panel = CompareDashboard(scenes, schedulers=("random", "budget"), out=tmp_path / "run", epochs=2, **SMALL)
    with pytest.raises(RunError, match=r"nothing is running; press Start or call start\(\) first"):
        panel.wait()
    panel.stop()
    panel.start_button.click()
    first = panel._run
    assert first is not None
    assert first.state == "running"
    assert panel.start_button.disabled
    assert not panel.stop_button.disabled
    panel.start()
    assert panel._run is first
    comparison = panel.wait()
    assert isinstance(comparison, Comparison)
    assert [arm.scheduler for arm in comparison.arms] == ["random", "budget"]
    assert not comparison.interrupted
    assert panel.message.value == ""
    assert "combined waste" in panel.result.value
    assert bytes(panel.picture.value).startswith(b"\x89PNG")
    assert panel.picture.layout.display is None
    assert (panel.progress.value, panel.progress.description) == (1.0, "done")
    assert not panel.start_button.disabled
    assert panel.stop_button.disabled


def test_an_error_in_the_run_is_shown_and_raised_by_wait(scenes: Path, tmp_path: Path) -> None:
    panel = CompareDashboard(scenes, schedulers=("budget",), out=tmp_path / "run", budget=3, **SMALL)
    panel.start()
    with pytest.raises(OptionError, match="above the budget of 3"):
        panel.wait()
    assert "OptionError: sample" in panel.message.value
    assert panel.progress.description == "failed"
    assert not panel.start_button.disabled


def test_an_error_in_starting_is_shown_by_the_button_and_raised_in_code(tmp_path: Path) -> None:
    panel = CompareDashboard(iter([]).__next__, out=tmp_path / "run", hook=lambda: None)
    panel.start_button.click()
    assert "OptionError: cannot send these arguments to another process" in panel.message.value
    with pytest.raises(OptionError, match="give paths and names"):
        panel.start()


def test_a_stopped_run_keeps_the_epochs_that_all_finished(scenes: Path, tmp_path: Path) -> None:
    options = {
        **SMALL,
        "schedulers": ("random", "sorted"),
        "out": tmp_path / "run",
        "epochs": 20,
        "image": "aspect:32",
    }
    panel = CompareDashboard(scenes, **options)
    panel.start()
    while panel.progress.value <= 0.1 and panel.stop_button.disabled is False:
        time.sleep(0.1)
    panel.stop_button.click()
    assert panel.progress.description in ("stopping", "stopped")
    comparison = panel.wait()
    assert comparison.interrupted
    assert 1 <= len(comparison.arms[0].epochs) < 20
    assert panel.progress.description == "stopped"
    assert "Interrupted" in panel.result.value

    panel.start()  # into the same folder, and stopped before there is anything new: the old result must not come back
    panel.stop()
    with pytest.raises(RunError, match="stopped before every scheduler had finished an epoch"):
        panel.wait()
    assert "RunError" in panel.message.value
    assert panel.result.value == ""
    assert panel.progress.value == 0


def test_a_run_ends_with_the_process_that_started_it(scenes: Path, tmp_path: Path) -> None:
    code = (
        "from mmlab.background import start_compare\n"
        f"run = start_compare({str(scenes)!r}, ['random'], out={str(tmp_path)!r}, epochs=10_000, num_workers=0)\n"
        "print(run._process.pid)"
    )
    started = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    try:
        run = psutil.Process(int(started.stdout))
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([run], timeout=30)
    assert not alive or run.status() == psutil.STATUS_ZOMBIE  # nobody collects it where init does not


def test_controls_take_their_values_from_the_options(tmp_path: Path) -> None:
    panel = CompareDashboard(tmp_path, schedulers=("bucket",), batch_size=4, epochs=7, precision="bf16")
    found = (panel.schedulers.value, panel.batch_size.value, panel.epochs.value, panel.precision.value)
    assert found == (("bucket",), 4, 7, "bf16")
    assert isinstance(panel, widgets.VBox)
