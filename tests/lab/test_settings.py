"""Runs under several settings start from the same weights, are kept in files, and stand in one table and one figure."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.errors import OptionError
from mmlab.lab.settings import settings_figure, train_with
from mmlab.model.presets import build_model
from mmlab.runs.events import RunEvent
from mmlab.runs.follow import Runs, RunState
from mmlab.runs.summaries import verdict_of
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.options import TrainOptions
from mmlab.types import Aspect

OBJECTIVES = {"contrastive": Contrastive(), "matching": Matching()}


@pytest.fixture(scope="module")
def batches():
    records = read_records(Path(__file__).parents[2] / "data/sample", progress=False)
    dataset = MultimodalDataset(records, image_policy=Aspect(32 * 32))
    return [collate([dataset[row] for row in range(first, 60, 15)]) for first in range(6)]


def test_runs_of_several_settings_are_compared(batches, tmp_path):
    model = build_model("tiny", vocab_size=4096, image_depth=1, text_depth=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train = partial(train_with, tmp_path, model, batches, batches[:2], OBJECTIVES)
    plain = TrainOptions(device="cpu", lr=1e-3)
    with pytest.raises(OptionError, match=r"no run in .* has taken a step"):
        settings_figure(tmp_path)
    assert train(plain).loc["fp32", "steps"] == 6
    train(plain)  # anew: the run before is moved aside
    other = dataclasses.replace(plain, precision="bf16", accumulation_steps=2, weighting="uncertainty")
    found = train(other)
    assert found["steps"].to_dict() == {"fp32": 6, "bf16 x2 uncertainty": 3}
    assert np.isfinite(found[["held-out loss", "step, ms"]]).all(axis=None)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert (tmp_path / "fp32/previous-1").is_dir()
    with pytest.raises(OptionError, match="unknown precision 'fp8'"):
        train(dataclasses.replace(plain, precision="fp8"))
    runs = Runs(tmp_path)
    runs.poll()
    assert [run.name for run in runs.ordered if "fp8" in run.name] == [], (
        "a panel would call the folder failed"
    )
    said = verdict_of(runs.states.values())
    assert "did not take turns" in said
    assert "padding" not in said, "both had the same batches"
    first = RunState("first")
    first.apply(
        RunEvent(kind, 0, 0, 0.0, {"epoch": 0, "step_s": 1e-9, "num_samples": 1}) for kind in ("step", "eval")
    )
    assert " % samples/s over the next fastest, " in verdict_of([first, *runs.states.values()])
    assert "paired" not in said
    assert "an epoch of 3 steps is too short to judge speed" in said
    assert "memory" not in said, "both are of this process, which holds what the first left"
    (loss,) = settings_figure(tmp_path).axes  # weights and loss scale are 1 throughout
    assert len(loss.lines) == 4, "two objectives of two runs"
    with pytest.raises(OptionError, match=r"unknown run in .* 'fp16'\. Known: bf16 x2 uncertainty, fp32"):
        settings_figure(tmp_path, ["fp16"])
    alone = settings_figure(tmp_path, ["bf16 x2 uncertainty"]).axes[0]
    assert {line.get_color() for line in alone.lines} == {line.get_color() for line in loss.lines[2:]}


def test_weights_move_only_where_a_rule_moves_them(batches, tmp_path):
    model = build_model("tiny", vocab_size=4096, image_depth=1, text_depth=1)
    for rule in ("fixed", "uncertainty"):
        options = TrainOptions(device="cpu", lr=1e-3, weighting=rule)
        train_with(tmp_path, model, batches, batches[:2], OBJECTIVES, options)
    runs = Runs(tmp_path)
    runs.poll()
    assert set(runs.states["fp32"].column("contrastive_weight")) == {1.0}
    assert len(set(runs.states["fp32 uncertainty"].column("contrastive_weight"))) > 1
    figure = settings_figure(tmp_path)
    _loss, weights = figure.axes
    assert len(weights.lines) == 4
    assert figure.legends[0].get_title().get_text() == "solid: contrastive\ndashed: matching"


def test_an_error_is_raised_and_stands_in_the_run(batches, tmp_path):
    model = build_model("tiny", vocab_size=4096, image_depth=1, text_depth=1)
    strange = dataclasses.replace(batches[0], input_ids=batches[0].input_ids + 10**6)
    with pytest.raises(IndexError):
        train_with(tmp_path, model, [strange], batches[:2], OBJECTIVES, TrainOptions(device="cpu"))
    runs = Runs(tmp_path)
    runs.poll()
    assert runs.states["fp32"].status == "failed"
    with pytest.raises(OptionError, match="lr must be at least 0"):
        train_with(tmp_path, model, batches, batches, OBJECTIVES, TrainOptions(device="cpu", lr=-1.0))
    after = train_with(
        tmp_path, model, batches, batches[:2], OBJECTIVES, TrainOptions(device="cpu", precision="bf16")
    )
    assert list(after.index) == ["bf16"], "the table has no row of a run without a step"
