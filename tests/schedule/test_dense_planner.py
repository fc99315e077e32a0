"""The dense planner pads least among its cuts, never exceeds its budget, and honours its options."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.errors import OptionError
from mmlab.schedule._dense_loops import cut_optimally
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import SampleSizes
from tests.schedule.planning import BYTES, PAIRS, SlowTokens, make_sizes

SIZES = make_sizes(3000)
ALIKE = make_sizes(3000, captions=1, most_patches=6)


def price_of_cut(text, high, wide, edges, overhead):
    spans = [slice(start, end) for start, end in pairwise(edges)]
    return sum(
        (span.stop - span.start) * (max(text[span]) + max(high[span]) * max(wide[span])) + overhead
        for span in spans
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_cut_is_the_best_of_all_cuts(data):
    num = data.draw(st.integers(1, 7))
    text, high, wide = (
        np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num))) for _ in range(3)
    )
    budget, overhead = data.draw(st.integers(90, 400)), data.draw(st.integers(0, 50))
    cost = PaddedTokens().as_polynomial()
    ends = cut_optimally(
        text, high, wide, np.zeros(num, np.int64), cost.coefficients, cost.exponents,
        float(budget), float(overhead), 4096,
    )  # fmt: skip
    found = price_of_cut(text, high, wide, [0, *ends], overhead)
    every_cut = [
        [0, *(place for place in range(1, num) if mask >> place & 1), num] for mask in range(0, 2**num, 2)
    ]
    allowed = [
        edges
        for edges in every_cut
        if all(price_of_cut(text, high, wide, pair, 0) <= budget for pair in pairwise(edges))
    ]
    assert found == min(price_of_cut(text, high, wide, edges, overhead) for edges in allowed)


@pytest.mark.parametrize(
    "cost", [PaddedTokens(), BYTES, PAIRS, SlowTokens()], ids=["tokens", "bytes", "pairs", "slow"]
)
def test_batches_are_full_but_never_above_the_budget(cost):
    budget = 20_000.0 if cost.unit == "bytes" else 1000.0
    plan = make_scheduler("budget", cost=cost, budget=budget, overhead_ratio=0.2).plan(ALIKE)
    costs = batch_costs(cost, plan.shape_columns)
    assert costs.max() <= budget
    assert costs.mean() > 0.75 * budget
    assert plan.report().combined_waste < 0.15


def test_the_default_budget_holds_32_average_samples():
    patches = (SIZES.height // 16) * (SIZES.width // 16)
    plan = make_scheduler("budget").plan(SIZES)
    assert plan.limits.budget == pytest.approx(32 * (SIZES.num_tokens + patches).mean())


def test_a_sample_above_the_budget_is_named_with_its_cost_and_the_remedy():
    sizes = SampleSizes(num_tokens=[10, 50, 5], height=[160] * 3, width=[160] * 3, group=[0, 1, 2])
    with pytest.raises(
        OptionError,
        match=r"sample 1 alone \(50 tokens, 160 x 160 pixels\) costs 150 padded tokens.*budget of 149",
    ):
        make_scheduler("budget", budget=149).plan(sizes)
    assert len(make_scheduler("budget", budget=150).plan(sizes)) == 3


def test_one_giant_sets_the_default_budget():
    sizes = SampleSizes(num_tokens=[10] * 40 + [9000], height=[16] * 41, width=[16] * 41, group=np.arange(41))
    plan = make_scheduler("budget").plan(sizes)
    assert plan.limits.budget == 9001


@pytest.mark.parametrize("cost", [PaddedTokens(), SlowTokens()], ids=["tokens", "slow"])
def test_no_batch_has_more_samples_than_asked_for(cost):
    plan = make_scheduler("budget", cost=cost, budget=20_000, max_batch_size=10).plan(SIZES)
    assert plan.columns.counts.max() == 10


def test_fewer_fuller_batches_pad_more():
    few, many = (
        make_scheduler("budget", budget=20_000, overhead_ratio=ratio).plan(SIZES).report()
        for ratio in (0.5, 0.0)
    )
    assert few.num_batches < many.num_batches
    assert few.combined_waste > many.combined_waste


@pytest.mark.parametrize(("captions", "most_batches"), [(2, 1.3), (5, 1.6), (40, 6.0)])
def test_captions_of_one_image_are_parted_without_many_more_batches(captions, most_batches):
    sizes = make_sizes(4000, captions=captions)
    loose = make_scheduler("budget", budget=9000, allow_collisions=True).plan(sizes)
    strict = make_scheduler("budget", budget=9000).plan(sizes)
    assert loose.report().collision_ratio > 0.05
    assert strict.report().collision_ratio == 0
    assert len(strict) < most_batches * len(loose)


def test_two_images_with_fifty_captions_each_give_batches_of_two():
    sizes = SampleSizes(
        num_tokens=np.arange(100) % 9 + 3, height=[64] * 100, width=[64] * 100, group=np.arange(100) % 2
    )
    plan = make_scheduler("budget", budget=10_000).plan(sizes)
    assert [len(batch) for batch in plan] == [2] * 50


def test_many_captions_of_one_image_do_not_slow_planning():
    sizes = SampleSizes(
        num_tokens=[8] * 20_000, height=[64] * 20_000, width=[64] * 20_000, group=np.arange(20_000) % 2
    )
    assert len(make_scheduler("budget", budget=10_000).plan(sizes)) == 10_000


def test_small_batches_are_pointed_out():
    report = make_scheduler("budget", budget=1500).plan(SIZES).report()
    assert "the scheduler 'packed', wastes less" in report.notes[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"budget": 0}, "budget must be above 0 padded tokens, found 0"),
        ({"budget": -5.0}, "budget must be above 0"),
        ({"window": 0}, "window must be at least 1, found 0"),
        ({"overhead_ratio": -0.1}, "overhead_ratio must be at least 0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, found 0"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"bugdet": 5}, "has no option 'bugdet'"),
    ],
)
def test_impossible_options_are_refused(options, named):
    with pytest.raises(OptionError, match=named):
        make_scheduler("budget", **options)


def test_memory_plans_below_its_share_of_the_device():
    plan = make_scheduler("memory", cost=BYTES, budget=40_000, target_ratio=0.9).plan(ALIKE)
    costs = batch_costs(BYTES, plan.shape_columns)
    assert costs.max() <= 36_000
    assert costs.mean() > 27_000
    with pytest.raises(
        OptionError, match="needs a cost model in bytes and a budget, found a cost in padded tokens"
    ):
        make_scheduler("memory", budget=1e9)
    with pytest.raises(OptionError, match=r"target_ratio must lie in \(0, 1\], found 1.5"):
        make_scheduler("memory", cost=BYTES, budget=1e9, target_ratio=1.5)
