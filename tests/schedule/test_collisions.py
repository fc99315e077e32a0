"""Samples are grouped by image, numbered in the order in which the images appear."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmlab.schedule.collisions import images_of
from mmlab.types import SampleSizes


@given(st.lists(st.integers(-2, 4) | st.just(10**15), max_size=40))
def test_samples_of_one_image_are_found_and_unknown_images_are_never_shared(group):
    ones = np.ones(len(group), np.int32)
    rows = np.arange(len(group))[::-1]
    images = images_of(SampleSizes(num_tokens=ones, height=ones, width=ones, group=group), rows)
    seen: list[list[int]] = []
    for place, row in enumerate(rows):
        same = next((one for one in seen if group[row] >= 0 and group[rows[one[0]]] == group[row]), None)
        if same is None:
            seen.append(same := [])
        assert images.number[place] == seen.index(same)
        assert images.occurrence[place] == len(same)
        same.append(place)
    spans = zip(images.starts[:-1], images.starts[1:], strict=True)
    assert [images.members[start:end].tolist() for start, end in spans] == seen
