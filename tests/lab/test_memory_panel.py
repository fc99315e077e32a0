"""The memory panel answers every move of a slider, and shows what does not fit."""

from __future__ import annotations

import re

import pytest

from mmlab.errors import OptionError
from mmlab.lab.memory_panel import MemoryPanel
from mmlab.lab.notebook import draw_sizes
from mmlab.machine import GIB
from mmlab.pricing.memory import MemoryModel
from mmlab.schedule.cost import MaxPolynomial
from mmlab.types import aspect

SIZES = draw_sizes(400).resized(aspect(224**2))


def memory(scale: float) -> MemoryModel:
    rows = MaxPolynomial([[GIB, scale * 1e5, scale * 3e5]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], "bytes")
    return MemoryModel(rows=rows, fingerprint="none", conditions={})


MODELS = {"bf16": memory(1), "bf16, checkpointing": memory(0.3)}


def test_every_control_changes_the_answer() -> None:
    panel = MemoryPanel(SIZES, MODELS, memory_gb=(0.5, 80, 8))
    assert panel.planned().memory is MODELS["bf16"]
    moves = {panel.memory: 4.0, panel.model: "bf16, checkpointing"}
    for control, value in moves.items():
        summary, picture = panel.summary.value, panel.picture.value
        control.value = value
        assert panel.message.value == ""
        assert panel.summary.value != summary
        assert panel.picture.value != picture
    planned = panel.planned()
    assert planned.batch_bytes.max() <= 4 * GIB
    assert planned.memory is MODELS["bf16, checkpointing"]


def test_too_little_memory_is_shown_and_mended_by_the_next_move() -> None:
    panel = MemoryPanel(SIZES, MODELS, memory_gb=(0.5, 80, 0.5))
    assert re.search("Does not fit:.* one sample needs 1.* GiB, has 0", panel.summary.value)
    assert (panel.picture.layout.display, panel.picture.value) == ("none", b""), "two empty plots"
    panel.memory.value = 16.0
    assert panel.picture.layout.display is None
    assert "samples a batch" in panel.summary.value
    assert "a fixed batch size that always fits is " in panel.summary.value
    everything = MemoryPanel(SIZES, MODELS, memory_gb=(0.5, 400, 400))
    assert "<b>400 samples a batch</b>" in everything.summary.value
    assert "larger batches would hold two captions of one image" in everything.summary.value


def test_without_models_there_is_no_panel() -> None:
    with pytest.raises(OptionError, match=r"models must be .* at least one, found None"):
        MemoryPanel(SIZES, {})
    with pytest.raises(OptionError, match=r"models must be fitted memory models .*found 3"):
        MemoryPanel(SIZES, 3)
