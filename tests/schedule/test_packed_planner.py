"""The packed planner fills both streams, starves nobody, and gives oversize samples a pack of their own."""

import numpy as np
import pytest

from mmlab.errors import OptionError
from mmlab.schedule._pack_loops import fill_packs
from mmlab.schedule.cost import MaxPolynomial
from mmlab.schedule.metrics import lengths, padded_streams
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import PATCH, SampleSizes
from tests.schedule.planning import make_sizes

SIZES = make_sizes(6000)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_both_streams_are_filled_and_every_rank_gets_as_many_packs(world_size):
    plan = make_scheduler("packed", world_size=world_size).plan(SIZES)
    report = plan.report()
    assert len(plan) % world_size == 0
    assert max(report.text_waste, report.image_waste) < 0.03
    assert report.peak_over_budget <= 1
    assert report.collision_ratio == 0
    assert report.straggler < 0.02


def test_captions_kept_apart_leave_no_room_in_large_packs():
    mean = make_scheduler("random", batch_size=1).plan(SIZES).report().mean_cost
    plan = make_scheduler("packed", budget=256 * mean).plan(SIZES)
    assert plan.report().collision_ratio == 0
    assert len(plan) <= 1.15 * 6000 / 256


def test_rooms_follow_the_budget():
    assert sum(make_scheduler("packed", budget=8000).plan(SIZES).limits.streams) in (7999, 8000)
    with pytest.raises(OptionError, match="budget must be above 0, found 0"):
        make_scheduler("packed", budget=0)


def test_rooms_fit_sources_that_alternate():
    one_in_two = np.arange(600_000) % 2
    sizes = SampleSizes(
        num_tokens=20 * one_in_two,
        height=160 * (1 - one_in_two),
        width=[160] * 600_000,
        group=np.arange(600_000),
    )
    text_room, image_room = make_scheduler("packed", budget=3600).plan(sizes).limits.streams
    assert text_room == pytest.approx(600, rel=0.01)
    assert image_room == pytest.approx(3000, rel=0.01)


def test_an_oversize_sample_gets_a_pack_of_its_own_and_a_warning():
    tokens = np.full(200, 10)
    tokens[77] = 5000
    sizes = SampleSizes(num_tokens=tokens, height=[64] * 200, width=[64] * 200, group=np.arange(200))
    with pytest.warns(UserWarning, match="1 samples exceed.*first: sample 77, 5000 tokens, 16 patches"):
        plan = make_scheduler("packed", budget=260).plan(sizes)
    assert [77] in list(plan)
    assert plan.report().coverage == 1


def test_packs_fill_a_cost_that_grows_with_the_square_and_never_exceed_it():
    cost = MaxPolynomial(
        [[1e6, 3e3, 2e3, 0.5]], [(0, 0, 0), (1, 1, 0), (1, 0, 1), (1, 2, 0)], unit="bytes", patch=PATCH
    )
    plan = make_scheduler("packed", cost=cost, budget=2e7).plan(SIZES)
    text, image = lengths(SIZES, PATCH)
    sums = [(text[rows].sum(), image[rows].sum()) for rows in plan]
    assert plan.costs().tolist() == pytest.approx([cost.at(1, *pack) for pack in sums])
    assert plan.costs().max() <= 2e7
    assert np.median(plan.costs()) > 0.97 * 2e7
    with pytest.raises(OptionError, match="cost goes with a budget in bytes; give both"):
        make_scheduler("packed", cost=cost)
    with pytest.raises(OptionError, match=r"sample \d+ alone .* costs .* MiB, above the budget"):
        make_scheduler("packed", cost=cost, budget=1.01e6).plan(SIZES)


def test_texts_alone_and_images_alone_pack_too():
    for tokens, side in ((10, 0), (0, 64)):
        sizes = SampleSizes(
            num_tokens=[tokens] * 99, height=[side] * 99, width=[side] * 99, group=np.arange(99)
        )
        report = make_scheduler("packed").plan(sizes).report()
        assert report.coverage == 1
        assert report.combined_waste < 0.1


def test_no_sample_waits_for_more_packs_than_the_pool_has_samples():
    rng = np.random.default_rng(0)
    text, image = rng.integers(1, 60, 20_000), rng.integers(20, 600, 20_000)
    order, ends = fill_packs(text, image, np.arange(20_000), 960, 9600, 512)
    pack = np.empty(20_000, np.int64)
    pack[order] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    expected = np.arange(20_000) * len(ends) / 20_000
    assert (pack - expected).max() < 512


def test_streams_of_short_steps_are_halved_as_often_as_all_packs_fit():
    text, image = np.array([100, 90, 20, 30]), np.array([10, 1000, 20, 200])
    padded_text, padded_image = padded_streams(text, image, (100, 1000), 2)
    assert padded_text.tolist() == [100, 100, 50, 50]
    assert padded_image.tolist() == [1000, 1000, 500, 500]
    assert padded_streams(np.array([140]), np.array([0]), (100, 1000), 1)[0].tolist() == [140]


@pytest.mark.parametrize("mean_samples", [8, 16])
def test_images_of_whole_tiles_leave_nothing_over_in_either_stream(mean_samples):
    """As a decoder reads them: 1 to 13 tiles of 256 tokens, among the text, and answers of 5 to 800 tokens."""
    rng = np.random.default_rng(0)
    patches = 256 * rng.integers(1, 14, 16_000)
    tokens = 30 + patches + np.exp(rng.uniform(np.log(5), np.log(800), 16_000)).astype(int)
    sizes = SampleSizes(num_tokens=tokens, height=16 * patches, width=[16] * 16_000, group=np.arange(16_000))
    scheduler = make_scheduler("packed", world_size=8, budget=mean_samples * float((tokens + patches).mean()))
    plan = scheduler.plan(sizes)
    report = plan.report(num_ranks=8, following=scheduler.plan(sizes, epoch=1))
    assert plan.limits.streams[1] % 256 == 0
    assert sum(plan.limits.streams) <= scheduler.budget
    assert max(report.text_waste, report.image_waste) <= 0.01
    assert report.straggler <= 0.005
    assert report.randomness >= 0.95
