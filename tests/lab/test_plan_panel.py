"""The explorer of plans answers, and shows every error; real widgets, no front-end."""

from __future__ import annotations

import time

import pytest

from mmlab.data.records import Records
from mmlab.lab.notebook import draw_sizes
from mmlab.lab.plan_panel import MAX_EXPLORED, PlanExplorer
from mmlab.types import Aspect, SampleSizes

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


@pytest.mark.serial
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
