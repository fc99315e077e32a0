"""The keyed permutation is a bijection that can be read anywhere, and looks random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.schedule.order import derive_key, permute


@given(num_samples=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_every_sample_has_one_place(num_samples, key):
    order = permute(np.arange(num_samples), num_samples, key)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@given(st.data())
def test_a_place_does_not_depend_on_what_else_is_asked(data):
    num_samples = data.draw(st.integers(1, 10**9))
    places = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20))
    together = permute(np.array(places, dtype=np.int64), num_samples, 7)
    alone = [int(permute(np.array([place]), num_samples, 7)[0]) for place in places]
    assert together.tolist() == alone


def test_orders_of_two_keys_and_neighbouring_places_are_unrelated():
    first, second = (permute(np.arange(50_000), 50_000, derive_key(0, epoch)) for epoch in (0, 1))
    for left, right in ((first, second), (first[:-1], first[1:]), (first, np.arange(50_000))):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(50_000)


def test_every_sample_is_as_likely_in_every_place():
    counts = np.zeros((10, 10))
    for key in range(2000):
        counts[np.arange(10), permute(np.arange(10), 10, derive_key(key))] += 1
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)


@pytest.mark.parametrize("numbers", [(0,), (0, 0), (1, 0), (0, 1), (-1, 0), (2**63, 0)])
def test_keys_of_different_numbers_differ(numbers):
    others = [(5,), (0, 5), (5, 0)]
    assert derive_key(*numbers) not in {derive_key(*other) for other in others}
