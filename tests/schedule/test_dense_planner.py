"""The dense planner pads least among its cuts, never exceeds its budget, and honours its options."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import DataError, OptionError
from mmlab.schedule._dense_loops import cut_optimally
from mmlab.schedule.cost import MaxPolynomial, PaddedTokens, batch_costs, costliest_sample
from mmlab.schedule.metrics import straggler
from mmlab.schedule.preview import read_lengths
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect, BatchShape, SampleSizes, parse_image_policy
from tests.schedule.planning import BYTES, COCO_LENGTHS, PAIRS, TIME, make_sizes

SIZES = make_sizes(3000)
ALIKE = make_sizes(3000, captions=1, most_patches=6)
SOME_PER_BATCH = MaxPolynomial([[200.0, 1.0, 1.0]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="seconds")
EXPONENTS = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 2, 0), (2, 0, 0)]


def price_of_cut(cost, text, high, wide, edges):
    spans = [slice(start, end) for start, end in pairwise(edges)]
    return [
        cost.at(span.stop - span.start, max(text[span]), max(high[span]) * max(wide[span])) for span in spans
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_cut_is_the_best_of_all_cuts(data):
    num = data.draw(st.integers(1, 7))
    columns = [np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num))) for _ in range(3)]
    budget, most = data.draw(st.integers(90, 400)), data.draw(st.integers(1, 7))
    limit = PaddedTokens().as_polynomial()
    numbers = st.lists(st.integers(0, 50), min_size=len(EXPONENTS), max_size=len(EXPONENTS))
    rows = data.draw(st.lists(numbers, min_size=1, max_size=2))
    objective = MaxPolynomial(rows, EXPONENTS)
    ends, total = cut_optimally(
        *columns, np.zeros(num, np.int64), limit.columns, objective.columns, float(budget), most
    )
    found = sum(price_of_cut(objective, *columns, [0, *ends]))
    every_cut = [
        [0, *(place for place in range(1, num) if mask >> place & 1), num] for mask in range(0, 2**num, 2)
    ]
    allowed = [
        edges
        for edges in every_cut
        if max(np.diff(edges)) <= most and max(price_of_cut(limit, *columns, edges)) <= budget
    ]
    assert found == total == min(sum(price_of_cut(objective, *columns, edges)) for edges in allowed)


@pytest.mark.parametrize("cost", [PaddedTokens(), BYTES, PAIRS], ids=["tokens", "bytes", "pairs"])
def test_batches_are_full_but_never_above_the_budget(cost):
    budget = 20_000.0 if cost.unit == "bytes" else 1000.0
    plan = make_scheduler("budget", cost=cost, budget=budget, time=SOME_PER_BATCH).plan(ALIKE)
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


def test_no_batch_has_more_samples_than_asked_for():
    plan = make_scheduler("budget", budget=20_000, max_batch_size=10).plan(SIZES)
    assert plan.columns.counts.max() == 10


@pytest.mark.parametrize("name", ["budget", "fastest"])
def test_the_fastest_plan_has_fewer_batches_and_more_padding(name):
    least_padding = make_scheduler("budget", budget=3000).plan(SIZES)
    fastest = make_scheduler(name, budget=3000, time=TIME).plan(SIZES)
    assert fastest.costs(TIME).sum() < 0.8 * least_padding.costs(TIME).sum()
    assert len(fastest) < 0.7 * len(least_padding)
    assert fastest.report().combined_waste > least_padding.report().combined_waste
    assert fastest.costs().max() <= 3000


def test_texts_of_like_length_come_together_where_that_is_faster():
    """Small images of forty shapes, texts of 4 or 400 tokens: batches by shape would be tiny, or pad texts."""
    shape = np.arange(600) % 40
    tokens = np.where(np.arange(600) // 40 % 2, 400, 4)
    sizes = SampleSizes(
        num_tokens=tokens, height=16 + 16 * (shape % 8), width=16 + 16 * (shape // 8), group=np.arange(600)
    )
    report = make_scheduler("fastest", budget=20_000, time=TIME).plan(sizes).report()
    assert report.text_waste == 0
    assert report.num_batches < 20


@pytest.mark.parametrize("constant_s", [0.03, 0.15])
def test_keeping_captions_of_one_image_apart_costs_few_seconds(constant_s):
    """As many samples as 720 images with five captions have, of the shapes that small aspect buckets have."""
    rng = np.random.default_rng(0)
    image, rows = np.arange(3600) // 5, np.array([4, 6, 5, 3])
    shape = rng.choice(4, 720, p=[0.65, 0.25, 0.07, 0.03])[image]
    tokens = np.clip(rng.lognormal(2.6, 0.3, 3600), 8, 60).astype(np.int32)
    sizes = SampleSizes(num_tokens=tokens, height=16 * rows[shape], width=16 * rows[::-1][shape], group=image)
    time = replace(TIME, coefficients=[[constant_s, 0.0009, 21e-6, 21e-6]])
    loose, strict = (
        make_scheduler("fastest", budget=2900, time=time, allow_collisions=allowed).plan(sizes)
        for allowed in (True, False)
    )
    assert loose.report().collision_ratio > 0.05
    assert strict.report().collision_ratio == 0
    assert strict.costs(time).sum() < 1.05 * loose.costs(time).sum()


def test_ranks_wait_little_in_predicted_seconds():
    sizes = read_lengths(COCO_LENGTHS).resized(Aspect(384 * 384))
    plan = make_scheduler("fastest", budget=32 * 530, time=TIME, world_size=8).plan(sizes)
    report = plan.report()
    assert report.straggler == straggler(plan.costs(TIME), 8) < 0.01
    assert report.randomness > 0.9
    assert report.collision_ratio == 0


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
    assert report.combined_waste < 0.05  # so the note speaks of the samples, not of padding
    assert report.notes[0].endswith("the scheduler 'packed', may make larger ones")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"budget": 0}, "budget must be above 0, found 0"),
        ({"budget": -5.0}, "budget must be above 0"),
        ({"window": 0}, "window must be at least 1, found 0"),
        ({"time": PaddedTokens()}, "time must predict seconds.*PaddedTokens in padded tokens"),
        ({"cost": sum}, "cost must be a cost model with as_polynomial.*found <built"),
        ({"time": replace(TIME, patch=32)}, "time counts image patches of 32 pixels and cost those of 16"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, found 0"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"bugdet": 5}, "unknown option of the budget scheduler 'bugdet'; did you mean 'budget'"),
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
    with pytest.raises(OptionError, match=r"target_ratio must be at most 1.0, found 1.5"):
        make_scheduler("memory", cost=BYTES, budget=1e9, target_ratio=1.5)
    with pytest.raises(OptionError, match=r"target_ratio must be a number, found None"):
        make_scheduler("memory", cost=BYTES, budget=1e9, target_ratio=None)


def test_the_budget_that_the_memory_scheduler_asks_for_is_enough():
    _, cost = costliest_sample(BYTES, ALIKE, enough=0)
    with pytest.raises(OptionError, match=r"raise the budget to this cost / 0\.5"):
        make_scheduler("memory", cost=BYTES, budget=cost, target_ratio=0.5).plan(ALIKE)
    make_scheduler("memory", cost=BYTES, budget=cost / 0.5, target_ratio=0.5).plan(ALIKE)


def test_costs_that_are_none_and_samples_that_are_none_are_refused():
    with pytest.raises(OptionError, match="time must predict seconds, found float in no unit"):
        make_scheduler("fastest", time=3.0)
    for name in ("budget", "packed"):
        with pytest.raises(OptionError, match=r"cost must be a cost model with as_polynomial\(\), found"):
            make_scheduler(name, cost=3.0)
    for samples in ("lengths.csv", None, [{"height": 16}]):
        with pytest.raises(DataError, match="samples must be records, SampleSizes, or have sizes"):
            make_scheduler("budget").plan(samples)


def test_a_data_set_is_planned_as_its_sizes(records):
    dataset = MultimodalDataset(records, image_policy=parse_image_policy("aspect:48"))
    for name in ("random", "budget"):
        assert list(make_scheduler(name).plan(dataset)) == list(make_scheduler(name).plan(dataset.sizes))


def test_the_fastest_plan_needs_a_time_model():
    with pytest.raises(OptionError, match=r"'fastest' needs a time model; give time=.*or take .*'budget'"):
        make_scheduler("fastest", budget=1000)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_a_budget_of_exactly_the_costliest_sample_holds_whatever_way_its_cost_is_summed(seed):
    rng = np.random.default_rng(seed)
    cost = MaxPolynomial(rng.random((1, 6)) * 10.0 ** rng.integers(-3, 6, 6), EXPONENTS)
    num_samples = int(rng.integers(3, 60))
    height, width = rng.integers(0, 400, (2, num_samples))
    tokens, group = rng.integers(0, 40, num_samples), np.arange(num_samples)
    sizes = SampleSizes(num_tokens=tokens, height=height, width=width, group=group)
    budget = max(cost(BatchShape(*row)) for row in sizes.alone.tolist())
    plan = make_scheduler("budget", cost=cost, budget=budget).plan(sizes)
    assert plan.costs().max() <= budget * (1 + 1e-9)
    assert plan.report().num_over_budget == 0
