"""The explorer of plans answers, and shows every error; real widgets, no front-end."""

from __future__ import annotations

import base64
import re
import time

import numpy as np
import pytest

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import OptionError
from mmlab.lab.notebook import draw_sizes
from mmlab.lab.plan_figure import IMAGE, PADDING, TEXT, plan_figure, thumbnails
from mmlab.lab.plan_panel import MAX_EXPLORED, PlanExplorer
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect, SampleSizes


@pytest.fixture(scope="module")
def many() -> SampleSizes:
    return draw_sizes(20_000).resized(Aspect(224**2))


@pytest.mark.parametrize("name", ["rndom", "fastest"])
def test_a_scheduler_that_cannot_be_explored_is_refused_by_name(name: str) -> None:
    with pytest.raises(OptionError, match=f"unknown scheduler to explore '{name}'"):
        PlanExplorer(draw_sizes(10), name)
    with pytest.raises(OptionError, match="schedulers must be a list of names, found 3"):
        PlanExplorer(draw_sizes(10), 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no samples to explore"):
        PlanExplorer([])  # type: ignore[arg-type]


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
        before, picture = explorer.table.value, explorer.picture.value
        control.value = value
        assert explorer.message.value == ""
        copy, now = (
            re.search("<style.*?#T_(.*?) ", text, re.DOTALL)[1] for text in (before, explorer.table.value)
        )
        assert copy != now, "a saved copy that stays on the page would set the bars of both"
        assert explorer.table.value != before, control.description
        assert explorer.picture.value != picture, control.description
    assert "sorted" in explorer.table.value
    assert "bucket" not in explorer.table.value
    assert "Packs" not in explorer.table.value
    explorer.schedulers.value = ("sorted", "packed")
    assert "their waste is the unfilled end of a stream, which no picture shows" in explorer.table.value
    assert "combined waste" in explorer.table.value
    explorer.schedulers.value = ()
    assert explorer.message.value == ""


def test_the_sliders_of_the_explorer_go_below_the_list_on_a_narrow_page() -> None:
    assert PlanExplorer(draw_sizes(10)).children[0].layout.flex_flow == "row wrap"


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
def test_sliders_take_no_longer_with_ten_times_the_data(many: SampleSizes) -> None:
    explorers = PlanExplorer(many.take(np.arange(MAX_EXPLORED))), PlanExplorer(many)
    assert len(many) == 100_000
    assert "of 100,000 samples" in explorers[1].table.value
    answers_s: tuple[list[float], list[float]] = ([], [])
    for samples in (48, 64, 40, 24, 56):
        for explorer, taken_s in zip(explorers, answers_s, strict=True):
            started = time.thread_time()  # other work on the machine does not count
            explorer.samples.value = samples
            taken_s.append(time.thread_time() - started)
    assert min(answers_s[1]) < 2 * min(answers_s[0])


def test_the_explored_part_holds_whole_images(many: SampleSizes) -> None:
    part = PlanExplorer(many, ("random",))._sizes
    assert MAX_EXPLORED - 5 < len(part) <= MAX_EXPLORED
    assert {int((part.group == group).sum()) for group in part.group[:50]} == {5}
    unknown = SampleSizes(
        num_tokens=many.num_tokens, height=many.height, width=many.width, group=[-1] * len(many)
    )
    assert len(PlanExplorer(unknown, ("random",))._sizes) == MAX_EXPLORED


def test_a_picture_of_batches_fills_what_is_useful_and_leaves_padding() -> None:
    sizes = SampleSizes(num_tokens=[4, 8, 8], height=[64, 32, 96], width=[64, 64, 96], group=[0, 1, 2])
    cells, places = thumbnails(BatchPlan.from_batches([[0, 1]], sizes))
    shown = cells[:8, :12]
    assert (shown[:4, :4] == IMAGE).all()
    assert (shown[:4, 6:10] == [[IMAGE] * 4] * 2 + [[PADDING] * 4] * 2).all(), (
        "half of the second image's place"
    )
    assert (shown[4:6, :4] == [TEXT, TEXT, PADDING, PADDING]).all(), (
        "half as long as the batch's longest text"
    )
    assert (shown[4:6, 6:10] == TEXT).all()
    assert (places[0, 0], places[0, 6]) == (0, 1)


def test_the_images_of_a_data_set_are_shown_in_their_places(records: Records) -> None:
    dataset = MultimodalDataset(records, image_policy=Aspect(96**2))
    explorer = PlanExplorer(dataset, ("random", "budget"))
    assert explorer.picture.value != PlanExplorer(dataset.sizes, ("random", "budget")).picture.value
    plan = make_scheduler("random").plan(dataset.sizes)
    figure = plan_figure({"random": plan}, 500.0, photo=lambda row: dataset[row]["image"])
    _, places = thumbnails(plan)
    (top, left), row = next(iter(places.items()))
    image = dataset[row]["image"][:, ::2, ::2].permute(1, 2, 0)
    shown = figure.axes[0].images[0].get_array()[8 * top :, 8 * left :, :3]
    assert (shown[: image.shape[0], : image.shape[1]] == image.numpy()).all()


def test_costs_are_drawn_against_the_limit() -> None:
    sizes = draw_sizes(200).resized(Aspect(96**2))
    plans = {name: make_scheduler(name).plan(sizes) for name in ("random", "budget")}
    area = plan_figure(plans, 500.0).axes[2]
    assert area.lines[0].get_xdata()[0] == 500
    assert area.get_xlim()[1] >= 500
    assert [int(stairs.get_data().values.sum()) for stairs in area.patches] == list(map(len, plans.values()))
    names = ("random", "sorted", "bucket", "length_grouped", "aspect_bucket", "budget", "packed")
    few = draw_sizes(3).resized(Aspect(96**2))
    figure = plan_figure({name: make_scheduler(name).plan(few) for name in names}, 500.0)
    figure.draw_without_rendering()
    legend, title = figure.legends[0].get_window_extent(), figure.axes[0].title
    assert legend.x0 > 0
    assert title.get_text() == "random: 2 of 2 batches"
    assert legend.y0 > title.get_window_extent().y1, "the legend of all schedulers covers no title"


def test_without_a_front_end_for_widgets_the_figures_are_text_and_the_saved_view_has_the_picture() -> None:
    explorer = PlanExplorer(draw_sizes(200).resized(Aspect(96**2)), ("random", "budget"))
    text = explorer._repr_mimebundle_()["text/plain"]
    assert text.startswith("PlanExplorer: budget: ")
    assert "combined_waste" in text
    page = explorer._saved._bundle["text/html"]
    assert explorer.table.value in page
    assert base64.b64encode(explorer.picture.value).decode() in page
    explorer.samples.value = 8
    assert explorer._saved._bundle["text/html"] != page
    assert explorer._saved._bundle["text/plain"] == repr(explorer) != text
