"""Cost models: one formula by shape, by array and in a planner; errors name what is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.errors import OptionError
from mmlab.schedule.cost import (
    MaxPolynomial,
    PaddedTokens,
    batch_costs,
    costliest_sample,
    for_images_of,
    max_batch_size,
)
from mmlab.types import PATCH, BatchShape, SampleSizes
from tests.schedule.planning import BYTES, PAIRS, make_sizes

shapes = st.builds(BatchShape, *[st.integers(0, 600)] * 4)


@given(shapes, st.sampled_from([1, 14, 16]))
def test_padded_tokens_are_their_polynomial(shape, patch):
    cost = PaddedTokens(patch)
    patches = -(-shape.height // patch) * -(-shape.width // patch)
    assert cost(shape) == shape.batch_size * (shape.num_tokens + patches)
    assert cost.as_polynomial()(shape) == cost(shape)


@given(st.lists(shapes, max_size=5))
def test_many_costs_at_once_are_each_cost(many):
    columns = np.array(many, dtype=np.int64).reshape(-1, 4)
    for cost in (PaddedTokens(), BYTES, PAIRS):
        assert batch_costs(cost, columns).tolist() == pytest.approx([cost(shape) for shape in many])


def test_the_largest_polynomial_rules():
    cost = MaxPolynomial([[10.0, 0.0], [0.0, 1.0]], [(0, 0, 0), (1, 1, 0)], unit="s")
    assert [cost(BatchShape(1, text, 0, 0)) for text in (5, 10, 20)] == [10, 10, 20]


def test_a_loss_over_every_pair_grows_with_the_square_of_the_batch():
    cost = MaxPolynomial([4.0], [(2, 0, 0)], unit="bytes")
    assert [cost(BatchShape(count, 9, 16, 16)) for count in (1, 2, 4)] == [4, 16, 64]
    assert max_batch_size(cost, 9, 16, 16, budget=400) == 10


@pytest.mark.parametrize(
    ("coefficients", "exponents", "named"),
    [
        ([1.0, 2.0], [(1, 1, 0)], r"must have shape \(2, 3\).*found \(1, 3\)"),
        ([1.0], [(3, 1, 0)], "batch size must be at most 2"),
        ([1.0], [(1, -1, 0)], "must not be negative"),
        ([1.0], [(1, 0.5, 0)], "must be whole"),
        ([float("nan")], [(1, 1, 0)], "coefficients must be finite"),
    ],
)
def test_polynomials_that_make_no_sense_are_refused(coefficients, exponents, named):
    with pytest.raises(OptionError, match=named):
        MaxPolynomial(coefficients, exponents)


def test_a_patch_without_size_is_refused():
    with pytest.raises(OptionError, match="patch must be at least 1, found 0"):
        PaddedTokens(0)
    with pytest.raises(OptionError, match="side of a patch a whole number"):
        MaxPolynomial([1.0], [(1, 1, 0)], patch=0)


def test_the_cost_of_mean_patches_is_never_below_that_of_the_samples_one_by_one():
    rng = np.random.default_rng(0)
    cost = MaxPolynomial(rng.random((2, 5)), [(0, 0, 0), (0, 0, 2), (1, 0, 1), (1, 0, 2), (1, 1, 1)])
    for _ in range(20):
        patches = rng.integers(1, 40, 8)
        sizes = SampleSizes(
            num_tokens=[3] * 8, height=PATCH * patches, width=[PATCH] * 8, group=range(8), pads_images=False
        )
        bound = for_images_of(sizes, cost).at(8, 3, patches.mean())
        counts, powers = cost.exponents[:, 0], patches[:, None] ** cost.exponents[:, 2]
        terms = 3.0 ** cost.exponents[:, 1] * np.where(counts > 0, powers.sum(0), powers.max(0))
        assert (cost.coefficients @ terms).max() <= bound <= cost.at(8, 3, patches.max()) + 1e-9
        assert for_images_of(replace(sizes, pads_images=True), cost) is cost


def test_the_costliest_sample_is_found_only_where_it_matters():
    sizes = make_sizes(300)
    for cost in (PaddedTokens(), BYTES, PAIRS):
        columns = np.stack([np.ones(300, int), sizes.num_tokens, sizes.height, sizes.width], axis=1)
        prices = batch_costs(cost, columns)
        row, price = costliest_sample(cost, sizes, enough=0)
        assert price == prices.max() == prices[row]
        assert costliest_sample(cost, sizes, enough=1e9)[0] == -1


@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 100_000))
def test_the_largest_batch_fits_and_one_more_does_not(text, side, budget):
    for cost in (PaddedTokens(), BYTES, PAIRS):
        size = max_batch_size(cost, text, side, side, budget)
        assert size == 0 or cost(BatchShape(size, text, side, side)) <= budget
        assert cost(BatchShape(size + 1, text, side, side)) > budget
