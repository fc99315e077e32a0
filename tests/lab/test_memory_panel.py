"""The memory panel answers every move of a slider, and shows what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from mmlab.errors import OptionError
from mmlab.lab.memory_panel import MemoryPanel
from mmlab.lab.notebook import draw_sizes
from mmlab.machine import GIB
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.memory_report import plan_memory
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


def test_what_hardly_fits_not_is_shown_apart_from_the_limit() -> None:
    planned = MemoryPanel(SIZES, MODELS).planned()
    needed = planned.sample_bytes.max() * planned.limit_bytes / planned.target_bytes
    little = 0.999 * needed / GIB
    said = MemoryPanel(SIZES, MODELS, memory_gb=(little, 80, little)).summary.value
    needs, has = re.search(r"needs (\S+) GiB, has (\S+)\.$", said).groups()
    assert float(needs) > float(has)


def test_samples_of_unknown_images_are_images_of_their_own() -> None:
    model, few = MODELS["bf16"], replace(SIZES.take(range(3)), group=np.full(3, -1))
    enough = plan_memory(model, few, 400 * GIB)
    assert (enough.plan.columns.counts.max(), enough.limited_by_images) == (3, False)
    ratio = enough.limit_bytes / enough.target_bytes
    alone = plan_memory(model, few, int(1.001 * ratio * enough.sample_bytes.max()))
    assert (alone.plan.columns.counts.max(), alone.limited_by_images) == (1, False), "by the memory"


def test_without_models_there_is_no_panel() -> None:
    with pytest.raises(OptionError, match=r"models must be .* at least one, found None"):
        MemoryPanel(SIZES, {})
    with pytest.raises(OptionError, match=r"models must be fitted memory models .*found 3"):
        MemoryPanel(SIZES, 3)
