"""Mixing: the wanted ratio is realised, what is repeated and left out is said exactly, batches are of one modality."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.errors import DataError, OptionError
from mmlab.schedule.mixing import MODALITIES, Mixed, Weighted, modality_of, systematic_counts
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler
from mmlab.types import SampleSizes


def make_sizes(
    num_pairs: int = 300, num_texts: int = 150, num_images: int = 50, *, seed: int = 0
) -> SampleSizes:
    """Samples of all three modalities, shuffled; every five pairs share an image."""
    rng = np.random.default_rng(seed)
    total = num_pairs + num_texts + num_images
    kind = np.repeat([0, 1, 2], [num_pairs, num_texts, num_images])
    group = np.where(kind == 0, np.arange(total) // 5, 1000 + np.arange(total))
    order = rng.permutation(total)
    return SampleSizes(
        num_tokens=np.where(kind == 2, 0, rng.integers(3, 60, total))[order],
        height=np.where(kind == 1, 0, 16 * rng.integers(4, 24, total))[order],
        width=np.where(kind == 1, 0, 16 * rng.integers(4, 24, total))[order],
        group=group[order],
    )


SIZES = make_sizes()
EQUAL = dict.fromkeys(MODALITIES, 1.0)
INNER = [name for name in SCHEDULERS if name not in ("memory", "fastest")]  # which need a fitted model


def modalities_of_batches(plan) -> list[set[int]]:
    kind = modality_of(SIZES)
    return [set(kind[batch].tolist()) for batch in plan]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", INNER)
def test_without_a_ratio_each_sample_comes_once_in_batches_of_one_modality(name, world_size):
    plan = Mixed(inner=make_scheduler(name), world_size=world_size, homogeneous=True).plan(SIZES, epoch=2)
    assert sorted(row for batch in plan for row in batch) == list(range(500))
    kinds = modalities_of_batches(plan)
    assert all(len(kind) == 1 for kind in kinds)
    assert len(kinds) % world_size == 0
    for start in range(0, len(kinds), world_size):  # no rank waits for another with images to encode
        assert len(set(map(frozenset, kinds[start : start + world_size]))) == 1
    report = plan.report()
    assert (report.coverage, report.num_duplicates, report.num_over_budget) == (1.0, 0, 0)
    assert [share.num_samples for share in report.sources.values()] == [300, 150, 50]


def test_modalities_take_turns():
    plan = Mixed(inner=make_scheduler("random", batch_size=10)).plan(SIZES)
    texts = np.array([kind == {1} for kind in modalities_of_batches(plan)])
    assert texts.sum() == 15
    assert all(abs(texts[:end].sum() - 0.3 * end) < 3 for end in range(50))


@given(
    counts=st.tuples(*[st.integers(1, 40)] * 3),
    shares=st.tuples(*[st.floats(0.01, 1)] * 3),
    length=st.sampled_from(["keep", "undersample", "oversample"]),
    epoch=st.integers(0, 3),
)
@settings(deadline=None)
def test_the_report_says_exactly_what_was_drawn(counts, shares, length, epoch):
    sizes = make_sizes(*counts)
    wanted = dict(zip(MODALITIES, (share / sum(shares) for share in shares), strict=True))
    scheduler = Mixed(inner=make_scheduler("random", batch_size=4), ratios=wanted, length=length)
    plan = scheduler.plan(sizes, epoch=epoch)
    times = Counter(row for batch in plan for row in batch)
    total = sum(times.values())
    report = plan.report()
    kind = modality_of(sizes)
    for code, name in enumerate(MODALITIES):
        rows = np.flatnonzero(kind == code)
        seen = [times[row] for row in rows]
        share = report.sources[name]
        assert max(seen) - min(seen) <= 1  # repeats fall on all alike
        assert share.num_drawn == sum(seen)
        assert share.num_left_out == seen.count(0)
        assert share.num_repeats == sum(max(0, count - 1) for count in seen)
        assert share.realised_ratio == pytest.approx(share.num_drawn / total)
        assert abs(share.num_drawn - total * wanted[name]) < 4
        assert share.wanted_ratio == pytest.approx(wanted[name])
    assert plan.dropped.tolist() == [row for row in range(len(sizes)) if not times[row]]
    assert plan.repeated.tolist() == sorted(row for row, count in times.items() if count > 1)
    assert report.num_duplicates == sum(share.num_repeats for share in report.sources.values())
    assert report.coverage == pytest.approx(len(times) / len(sizes))
    if length == "keep":
        assert total == len(sizes)
    elif length == "undersample":
        assert not len(plan.repeated)
    else:
        assert not len(plan.dropped)


def test_over_the_epochs_no_sample_comes_twice_before_all_have_come_once():
    ratios = {"image-text": 0.2, "text-only": 0.3, "image-only": 0.5}
    scheduler = Mixed(inner=make_scheduler("random"), ratios=ratios)
    total = np.zeros(500, dtype=int)
    for epoch in range(7):
        total += scheduler.plan(SIZES, epoch=epoch).times_drawn
        for code in range(3):
            times = total[modality_of(SIZES) == code]
            assert times.max() - times.min() <= 1


def test_a_schedule_moves_in_straight_lines():
    start, end = {"image-text": 1.0, "text-only": 0.0}, {"image-text": 0.5, "text-only": 0.5}
    sizes = make_sizes(200, 200, 0)
    scheduler = Mixed(ratios=[(2, start), (6, end)])
    shares = [
        scheduler.plan(sizes, epoch=epoch).report().sources["text-only"].realised_ratio for epoch in range(8)
    ]
    assert shares == pytest.approx([0, 0, 0, 0.125, 0.25, 0.375, 0.5, 0.5], abs=0.003)


def test_a_source_of_any_name_is_shown_as_text():
    plan = Mixed(sources=["<b>"] * 500, ratios={"<b>": 1}).plan(SIZES)
    assert "<p>&lt;b&gt;: 100.00% of the epoch" in plan.report()._repr_html_()


def test_sources_of_your_own():
    names = ["web" if row % 5 else "curated" for row in range(500)]
    plan = Mixed(sources=names, ratios={"web": 1, "curated": 1}, length="oversample").plan(SIZES)
    found = plan.report().sources
    assert (found["web"].num_drawn, found["web"].num_repeats) == (400, 0)
    assert (found["curated"].num_drawn, found["curated"].num_repeats) == (400, 300)
    assert all(len(kind) == 1 for kind in modalities_of_batches(plan))


def test_mixed_batches_on_request_and_in_packs():
    for options in (
        {"inner": make_scheduler("random"), "homogeneous": False},
        {"inner": make_scheduler("packed")},
    ):
        kinds = modalities_of_batches(Mixed(**options).plan(SIZES))
        assert any(len(kind) > 1 for kind in kinds)


def test_too_few_of_a_modality_for_the_ranks_join_another():
    sizes = make_sizes(100, 50, 3)
    plan = Mixed(inner=make_scheduler("random", batch_size=4), world_size=8).plan(sizes)
    assert sorted(row for batch in plan for row in batch) == list(range(153))
    assert len(plan) % 8 == 0


@pytest.mark.parametrize("length", ["keep", "oversample"])
def test_the_same_budget_holds_for_every_modality(length):
    for budget in (None, 4000):
        plan = Mixed(inner=make_scheduler("budget", budget=budget), ratios=EQUAL, length=length).plan(SIZES)
        assert plan.report().num_over_budget == 0


@pytest.mark.parametrize(
    "scheduler", [Mixed(ratios=EQUAL), Weighted(weights=np.arange(1, 501))], ids=["mixed", "weighted"]
)
def test_plans_are_pure_shard_and_resume(scheduler):
    first, again = list(scheduler.plan(SIZES, epoch=1)), list(scheduler.plan(SIZES, epoch=1))
    assert first == again
    assert first != list(scheduler.plan(SIZES, epoch=0))
    plan = scheduler.plan(SIZES, epoch=1)
    walk = iter(plan)
    before = list(islice(walk, 3))
    state = json.loads(json.dumps(walk.state_dict()))
    assert before + list(scheduler.resume(SIZES, state)) == first
    assert list(plan.skip(3)) == first[3:]
    rest = Counter(row for batch in scheduler.resume(SIZES, state, world_size=4) for row in batch)
    assert rest == Counter(row for batch in first[3:] for row in batch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Weighted(weights=np.ones(500)), Weighted(weights=np.arange(1, 501))),
        (
            Mixed(ratios={"a": 1, "b": 2}, sources=["a"] * 250 + ["b"] * 250),
            Mixed(ratios={"a": 1, "b": 2}, sources=["b"] * 250 + ["a"] * 250),
        ),
    ],
    ids=["weights", "sources"],
)
def test_a_state_of_other_weights_or_sources_is_refused(before, after):
    state = before.plan(SIZES).state_dict(3)
    with pytest.raises(
        DataError, match="cannot resume: the state was saved with other samples, or other sizes of them"
    ):
        after.resume(SIZES, state)


def test_ranks_share_a_mixed_plan():
    plan = Mixed(ratios=EQUAL, world_size=3).plan(SIZES)
    shares = [list(plan.shard(rank, 3)) for rank in range(3)]
    assert len(set(map(len, shares))) == 1
    assert [batch for step in zip(*shares, strict=True) for batch in step] == list(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": {"image-text": -1, "text-only": 2}}, "must not be negative"),
        ({"ratios": {"image-text": 0.0}}, "all zero"),
        ({"ratios": {}}, "all zero"),
        ({"ratios": []}, "a point .epoch, shares. at least"),
        ({"ratios": [(3, EQUAL), (1, EQUAL)]}, "ascending epochs, found"),
        ({"ratios": [(0, EQUAL), (1, {"image-text": 1})]}, "must name the same sources"),
        ({"length": "longer"}, "unknown length 'longer'"),
        ({"inner": Mixed(ratios=EQUAL)}, "cannot wrap Mixed"),
        ({"inner": "random"}, "inner must be a scheduler, .*found 'random'"),
        ({"ratios": [("image-text", 0.5)]}, "a point of ratios must be"),
        ({"ratios": {"image-text": "1"}}, "a point of ratios must be"),
        ({"ratios": 5}, "a point of ratios must be .*found .0, 5."),
        ({"ratios": [1, 2]}, "a point of ratios must be .*found 1"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        Mixed(**options)


@pytest.mark.parametrize("weights", [None, 1.0, ["a"] * 3, np.ones((3, 2))], ids=str)
def test_weights_that_are_not_one_number_a_sample_are_refused(weights):
    with pytest.raises(OptionError, match="weights must be numbers, one a sample, found"):
        Weighted(weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": {"image-text": 1, "text-only": 1}}, "the data also have image-only; give 0"),
        ({"ratios": {**EQUAL, "audio": 1}}, "ask for audio, of which the data have no sample"),
        ({"sources": ["a"]}, "sources must name each of 500 samples, found 1"),
    ],
)
def test_ratios_that_do_not_fit_the_data_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Mixed(**{"ratios": {"a": 1}, **options}).plan(SIZES)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=30), st.integers(1, 60))
def test_each_sample_comes_as_often_as_expected_exactly(weights, num_samples):
    """The counts are constant between the starts at which an end of an interval crosses a whole number, so their mean
    over all starts is a finite sum."""
    expected = np.array(weights) * num_samples / sum(weights)
    crossings = np.sort(np.concatenate([[0.0, 1.0], -np.cumsum(expected) % 1]))
    total = np.zeros(len(weights))
    for start, end in pairwise(crossings):
        if end - start > 1e-9:
            counts = systematic_counts(expected, (start + end) / 2)
            assert counts.sum() == num_samples
            assert (np.floor(expected - 1e-9) <= counts).all()
            assert (counts <= np.ceil(expected + 1e-9)).all()
            total += (end - start) * counts
    assert total == pytest.approx(expected, abs=1e-6)


def test_few_samples_are_drawn_without_replacement():
    scheduler = Weighted(weights=1 + np.arange(500) % 7, num_samples=50, inner=make_scheduler("random"))
    plan = scheduler.plan(SIZES)
    assert len(plan.columns.order) == 50
    assert not len(plan.repeated)
    assert plan.report().coverage == 0.1


def test_a_sample_of_unknown_group_is_not_twice_in_a_batch():
    sizes = SampleSizes(num_tokens=[3] * 20, height=[32] * 20, width=[32] * 20, group=[-1] * 20)
    plan = Weighted(weights=[30.0] + [1.0] * 19, inner=make_scheduler("budget", budget=200)).plan(sizes)
    assert all(len(set(batch)) == len(batch) for batch in plan)


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1, 0], "found 0.0 in row 1"), ([np.nan], "found nan"), ([1, 2], "2 weights for 500 samples")],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, message):
    with pytest.raises(OptionError, match=message):
        Weighted(weights=weights).plan(SIZES)
