"""Whose memory a batch is: copied once from the cache, never a part of it, used again only when nobody has it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import ENGINES, Noise, assert_same, make_loader

from mmlab.cache import SampleCache, build_cache, cache_key
from mmlab.dataset import MultimodalDataset
from mmlab.pipeline.work import Job, Recipe


@pytest.fixture
def cached(dataset: MultimodalDataset, tmp_path: Path) -> MultimodalDataset:
    """The data set with a complete cache."""
    cached = copy.copy(dataset)
    cached.cache = SampleCache(tmp_path / "cache", key=cache_key(cached))
    build_cache(cached, progress=False)
    return cached


def test_cached_pixels_are_copied_once_into_the_batch_or_before_they_change(
    cached: MultimodalDataset,
) -> None:
    for augment, copies in ((None, False), (Noise(), True)):
        recipe = Recipe(dataset=cached, augment=augment)
        found = recipe.read(0)
        image = recipe.sample(Job(0, 0, [0]), 0, found).sample["image"]
        assert (image.data_ptr() != found[0].ctypes.data) == copies


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_batch_is_its_own_when_the_cache_is_overwritten_and_evicted(
    cached: MultimodalDataset, engine: str
) -> None:
    expected = copy.deepcopy(list(make_loader(cached)))
    batches = list(make_loader(cached, engine))
    for shard in cached.cache.folder.glob("*.data"):
        with shard.open("r+b") as file:  # what a mapped page shows at once
            file.write(bytes(np.full(shard.stat().st_size, 77, np.uint8)))
        shard.unlink()
    cached.cache.close()
    assert_same(batches, expected)
    for batch in batches:
        batch.pixel_values.add_(torch.tensor(1, dtype=torch.uint8))  # not a read-only page
