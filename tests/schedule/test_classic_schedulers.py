"""The classics do what their users know."""

import numpy as np
import pytest
import torch
from transformers import trainer_pt_utils

from mmlab.errors import OptionError
from mmlab.schedule.columns import Limits
from mmlab.schedule.order import derive_key, permute
from mmlab.schedule.schedulers import make_scheduler
from tests.schedule.planning import make_sizes

SIZES = make_sizes(1003)
PATCHES = (SIZES.height // 16) * (SIZES.width // 16)


def test_random_has_full_batches_and_one_rest():
    counts = make_scheduler("random", batch_size=10).plan(SIZES).columns.counts
    assert counts.tolist() == [10] * 100 + [3]


def test_sorted_is_the_same_every_epoch():
    scheduler = make_scheduler("sorted", batch_size=10)
    assert list(scheduler.plan(SIZES, epoch=0)) == list(scheduler.plan(SIZES, epoch=7))


@pytest.mark.parametrize("batch_size", [4, 10, 400])
def test_length_grouped_is_the_algorithm_of_transformers(batch_size, monkeypatch):
    rows = permute(np.arange(1003), 1003, derive_key(0, 0))
    monkeypatch.setattr(torch, "randperm", lambda *args, **kwargs: torch.from_numpy(rows))
    lengths = (SIZES.num_tokens * 2000 + PATCHES).tolist()
    expected = trainer_pt_utils.get_length_grouped_indices((SIZES.num_tokens + PATCHES).tolist(), batch_size)
    scheduler = make_scheduler("length_grouped", batch_size=batch_size)
    found = scheduler.make_batches(SIZES, rows, np.random.default_rng(0), Limits()).order
    assert found.tolist() == expected
    assert len(lengths) == 1003


def test_length_grouped_begins_with_the_longest():
    length = SIZES.num_tokens + PATCHES
    first = next(iter(make_scheduler("length_grouped").plan(SIZES, epoch=3)))
    assert length[first[0]] == length.max()


def test_batches_of_buckets_stay_in_their_bucket():
    aspect = make_scheduler("aspect_bucket", batch_size=6).plan(SIZES)
    for batch in aspect:
        assert len(set(zip(SIZES.height[batch], SIZES.width[batch], strict=True))) == 1
    assert aspect.report().image_waste == 0
    for batch in make_scheduler("bucket", batch_size=6, text_step=4).plan(SIZES):
        assert len(set(SIZES.num_tokens[batch] // 4)) == 1
        ratios = SIZES.width[batch] / SIZES.height[batch]
        assert ratios.max() / ratios.min() <= 2 ** (1 / 4) * 1.0001


def test_buckets_lose_no_leftovers():
    plan = make_scheduler("aspect_bucket", batch_size=64).plan(SIZES)
    assert plan.report().coverage == 1
    assert plan.columns.counts.min() < 64


@pytest.mark.parametrize("name", ["random", "sorted", "bucket", "length_grouped", "aspect_bucket"])
def test_the_collision_rule_costs_few_batches(name):
    free, strict = (
        make_scheduler(name, batch_size=16, allow_collisions=allowed).plan(SIZES) for allowed in (True, False)
    )
    assert strict.report().collision_ratio == 0
    assert len(strict) < 1.6 * len(free)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("random", {"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ("bucket", {"text_step": 0}, "text_step must be at least 1"),
        ("length_grouped", {"mega_batch": 0}, "mega_batch must be at least 1"),
        ("rndom", {}, "unknown scheduler 'rndom'; did you mean 'random'"),
    ],
)
def test_impossible_options_are_refused(name, options, named):
    with pytest.raises(OptionError, match=named):
        make_scheduler(name, **options)
