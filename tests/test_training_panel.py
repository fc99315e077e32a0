"""The training panel trains with what its controls say, keeps every run, and shows what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmlab.dataset import MultimodalDataset
from mmlab.errors import OptionError, RunError
from mmlab.images import Aspect
from mmlab.loader import collate
from mmlab.losses import Contrastive, Matching
from mmlab.model import build_model
from mmlab.readers import read_records
from mmlab.training_panel import TrainingPanel

OBJECTIVES = {"contrastive": Contrastive(), "matching": Matching()}


@pytest.fixture(scope="module")
def batches():
    records = read_records(Path(__file__).parents[1] / "data/sample", progress=False)
    dataset = MultimodalDataset(records, image_policy=Aspect(32 * 32))
    return [collate([dataset[row] for row in range(first, 60, 15)]) for first in range(6)]


def make_panel(batches, **options) -> TrainingPanel:
    model = build_model("tiny", vocab_size=4096, image_depth=1, text_depth=1)
    return TrainingPanel(model, batches, batches[:2], objectives=OBJECTIVES, device="cpu", **options)


def test_each_run_has_the_controls_values_and_starts_from_the_same_weights(batches):
    panel = make_panel(batches, interval=2)
    before = {name: weight.clone() for name, weight in panel._model.state_dict().items()}
    panel.start()
    assert panel.wait().loc["fp32, 1 a step, fixed", "steps"] == 6
    picture = panel.picture.value
    panel.precision.value, panel.accumulation.value, panel.weighting.value = "bf16", 4, "trend"
    panel.start()
    found = panel.wait()
    assert found.loc["bf16, 4 a step, trend", "steps"] == 2
    assert panel.picture.value != picture
    assert {"held-out loss", "skipped"} <= set(found.columns)
    for name, weight in panel._model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_weights_move_only_where_a_rule_moves_them(batches):
    panel = make_panel(batches, interval=2)
    for rule in ("fixed", "uncertainty"):
        panel.weighting.value = rule
        panel.start()
        panel.wait()
    fixed, moved = (
        {step["contrastive_weight"] for step in panel.runs[f"fp32, 1 a step, {rule}"]}
        for rule in ("fixed", "uncertainty")
    )
    assert fixed == {1.0}
    assert len(moved) > 1


def test_a_run_can_be_stopped_and_keeps_its_curve(batches):
    panel = make_panel(batches, num_epochs=1000)
    panel.start()
    while not any(panel.runs.values()):
        panel.stop()
    panel.stop()
    assert 1 <= panel.wait()["steps"].iloc[0] < 6000
    assert not panel.train_button.disabled


def test_an_error_is_shown_and_raised(batches):
    panel = make_panel(batches, lr=-1.0)
    panel.start()
    with pytest.raises(RunError, match="lr"):
        panel.wait()


def test_what_cannot_run_is_refused(batches):
    with pytest.raises(OptionError, match="no batches"):
        make_panel([])
    with pytest.raises(RunError, match="press Train"):
        make_panel(batches).wait()
