"""The training panel trains with what its settings say, keeps every run, and tells what went wrong."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.errors import OptionError, RunError
from mmlab.lab.training_panel import TrainingPanel
from mmlab.loading.collate import collate
from mmlab.model.presets import build_model
from mmlab.runs.follow import Runs
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.types import Aspect

OBJECTIVES = {"contrastive": Contrastive(), "matching": Matching()}


@pytest.fixture(scope="module")
def batches():
    records = read_records(Path(__file__).parents[2] / "data/sample", progress=False)
    dataset = MultimodalDataset(records, image_policy=Aspect(32 * 32))
    return [collate([dataset[row] for row in range(first, 60, 15)]) for first in range(6)]


@pytest.fixture
def make_panel(batches, tmp_path):
    def make(batches=batches, **options) -> TrainingPanel:
        model = build_model("tiny", vocab_size=4096, image_depth=1, text_depth=1)
        options = {"objectives": OBJECTIVES, "device": "cpu", "out": tmp_path / "runs", **options}
        return TrainingPanel(model, batches, batches[:2], **options)

    return make


def test_each_run_has_the_settings_values_and_starts_from_the_same_weights(make_panel):
    panel = make_panel(interval=2)
    assert panel.state == "idle"
    before = {name: weight.clone() for name, weight in panel._model.state_dict().items()}
    panel.start()
    assert panel.wait().loc["fp32", "steps"] == 6
    panel.precision.value, panel.accumulation.value, panel.weighting.value = "bf16", 4, "trend"
    panel.start()
    found = panel.wait()
    assert panel.state == "done"
    assert panel.progress == (1.0, 0.0)
    assert found.loc["bf16 x4 trend", "steps"] == 2
    assert {"held-out loss", "skipped"} <= set(found.columns)
    for name, weight in panel._model.state_dict().items():
        assert torch.equal(weight, before[name])
    loss, weights, scale = panel.figure().axes
    assert len(loss.lines) == 4, "two objectives of two runs"
    assert len(weights.lines) == 4
    assert len(scale.lines) >= 2


def test_the_runs_files_have_what_the_live_view_draws(make_panel):
    panel = make_panel()
    panel.start()
    panel.wait()
    panel.start()  # anew: the run before is moved aside
    panel.wait()
    runs = Runs(panel.folder)
    runs.poll()
    [run] = runs.states.values()
    assert (run.name, run.latest("start")["num_steps"], run.status) == ("fp32", 6, "done")
    assert {"device", "eval", "step"} <= {kind for kind, _ in run._columns}
    assert np.isfinite(run.column("loss")).all()
    assert (panel.folder / "fp32/previous-1").is_dir()
    make_panel()  # in the same folder, as when a notebook is run again: begins without the runs before
    assert not Runs(panel.folder).poll()


def test_weights_move_only_where_a_rule_moves_them(make_panel):
    panel = make_panel(interval=2)
    for rule in ("fixed", "uncertainty"):
        panel.weighting.value = rule
        panel.start()
        panel.wait()
    fixed, moved = (
        set(panel.runs[name].column("contrastive_weight")) for name in ("fp32", "fp32 uncertainty")
    )
    assert fixed == {1.0}
    assert len(moved) > 1


def test_a_run_is_paused_resumed_and_stopped_and_keeps_its_curve(make_panel):
    panel = make_panel(num_epochs=1000)
    panel.stop()  # nothing is there to stop
    panel.start()
    panel.start()  # nor to start: it goes on
    panel.pause()
    until(lambda: panel.state == "paused")
    held = panel.runs["fp32"].count()
    panel.resume()
    until(lambda: panel.runs["fp32"].count() >= held + 2)
    assert panel.state == "running"
    assert 0 < panel.progress[0] < 1
    assert panel.progress[1] > 0
    panel.stop()
    found = panel.wait()
    assert panel.state == "stopped"
    assert held + 2 <= found["steps"].iloc[0] < 6000
    panel.close()


def test_an_error_is_told_to_the_view_and_raised(make_panel, batches):
    strange = dataclasses.replace(batches[0], input_ids=batches[0].input_ids + 10**6)
    panel = make_panel([strange])
    panel.start()
    with pytest.raises(RunError, match="IndexError"):
        panel.wait()
    assert panel.state == "failed"
    assert panel.error.startswith("Traceback")


def test_what_cannot_run_is_refused(make_panel):
    with pytest.raises(OptionError, match="no batches"):
        make_panel([])
    with pytest.raises(OptionError, match="lr must be at least 0"):
        make_panel(lr=-1.0)
    with pytest.raises(RunError, match="press Start"):
        make_panel().wait()


def until(condition) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "waited for two minutes"
        time.sleep(0.01)
