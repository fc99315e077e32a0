"""The figures mean what their definitions say, on cases small enough to count by hand."""

import numpy as np
import pytest

from mmlab.schedule.columns import Block
from mmlab.schedule.metrics import collision_ratio, randomness, straggler
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.preview import read_lengths
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect, SampleSizes
from tests.schedule.planning import COCO_LENGTHS


def test_waste_is_the_padded_share():
    sizes = SampleSizes(num_tokens=[5, 10], height=[16, 32], width=[32, 16], group=[0, 1])
    report = BatchPlan.from_batches([[0, 1]], sizes).report(budget=30, num_ranks=1)
    assert report.text_waste == pytest.approx(1 - 15 / 20)
    assert report.image_waste == pytest.approx(1 - 4 / 8)
    assert report.combined_waste == pytest.approx(1 - 19 / 28)
    assert report.peak_cost == report.mean_cost == 28
    assert report.peak_over_budget == pytest.approx(28 / 30)
    assert report.num_over_budget == 0
    assert BatchPlan.from_batches([[0, 1]], sizes).report(budget=27).num_over_budget == 1


def test_the_straggler_is_the_idle_share_of_whole_steps():
    assert straggler(np.array([1.0, 3.0, 2.0, 2.0, 9.0]), 2) == pytest.approx(1 - 8 / 10)
    assert straggler(np.array([1.0]), 8) == 0


def test_collisions_count_samples_not_pairs():
    group = np.array([4, 4, 4, 7, -1, -1])
    batches = Block(np.array([0, 1, 3, 2, 4, 5]), np.array([3, 6]))
    assert collision_ratio(batches, group) == pytest.approx(2 / 6)
    assert collision_ratio(batches, group * 10**17) == pytest.approx(2 / 6)


def test_shuffling_is_random_and_a_frozen_order_is_not():
    rng = np.random.default_rng(0)
    ends = np.arange(10, 4001, 10)
    work = rng.integers(1, 100, 4000)
    first, second = (Block(rng.permutation(4000), ends) for _ in range(2))
    assert randomness(first, second, work, 8) > 0.95
    assert randomness(first, first, work, 8) == 0
    sorted_by_work = Block(np.argsort(work, kind="stable"), ends)
    assert randomness(sorted_by_work, second, work, 8) < 0.3


def test_the_goals_hold_on_real_captions_and_images():
    sizes = read_lengths(COCO_LENGTHS).resized(Aspect(384 * 384))
    dense = make_scheduler("budget", world_size=8).plan(sizes).report()
    assert dense.combined_waste <= 0.005
    assert dense.text_waste <= 0.06
    assert dense.image_waste <= 0.002
    assert dense.straggler <= 0.005
    assert dense.randomness >= 0.90
    packed = make_scheduler("packed", world_size=8).plan(sizes).report()
    assert max(packed.text_waste, packed.image_waste) <= 0.01
    assert packed.straggler <= 0.005
    assert packed.randomness >= 0.95
    for report in (dense, packed):
        assert (report.collision_ratio, report.coverage, report.num_duplicates) == (0, 1, 0)
        assert report.peak_over_budget <= 1
