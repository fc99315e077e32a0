"""Whose memory a batch is: copied once from the cache, never a part of it, used again only when nobody has it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.data.dataset import MultimodalDataset
from mmlab.loading.batches import BatchRequest, SampleLoader
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.types import Square
from tests.loading.loaders import BACKENDS, Noise, assert_same, make_loader


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
        loader = SampleLoader(dataset=cached, augment=augment)
        found = loader.read(0)
        image = loader.sample(BatchRequest(0, 0, [0]), 0, found).sample["image"]
        assert (image.data_ptr() != found.ctypes.data) == copies


def test_cached_pixels_of_the_planned_size_are_read_right_into_their_batch(cached: MultimodalDataset) -> None:
    loader = SampleLoader(dataset=cached)
    _, firsts = np.unique(cached.sizes.height * 1000 + cached.sizes.width, return_index=True)
    request = BatchRequest(0, 0, [*firsts.tolist(), 7, 8])
    pixels = loader.pixels(request)
    assert pixels is not None
    pixels[:] = 77
    found = [loader.read(row, place) for row, place in zip(request.rows, pixels, strict=True)]
    fits = [image.shape == place.shape for image, place in zip(found, pixels, strict=True)]
    in_place = [np.shares_memory(image, place) for image, place in zip(found, pixels, strict=True)]
    assert in_place == fits
    made = [loader.sample(request, row, arrays) for row, arrays in zip(request.rows, found, strict=True)]
    batch = loader.collate(request, made, pixels).batch
    assert batch is not None
    assert batch.pixel_values.data_ptr() == pixels.ctypes.data
    assert_same([batch], [loader.load(request).batch])
    cached.cache = None
    assert_same([batch], [loader.load(request).batch])


def test_decoded_pixels_are_put_into_their_batch_by_whoever_decodes(dataset: MultimodalDataset) -> None:
    loader = SampleLoader(dataset=dataset)
    _, firsts = np.unique(dataset.sizes.height * 1000 + dataset.sizes.width, return_index=True)
    request = BatchRequest(0, 0, firsts.tolist())
    pixels = loader.pixels(request)
    made = [
        loader.sample(request, row, loader.read(row), place)
        for row, place in zip(request.rows, pixels, strict=True)
    ]
    images = [item.sample["image"] for item in made if item.sample is not None]
    assert any(image.shape != pixels.shape[1:] for image in images)  # some are smaller than their batch
    assert all(np.shares_memory(image.numpy(), pixels) for image in images)
    batch = loader.collate(request, made, pixels).batch
    assert batch is not None
    assert batch.pixel_values.data_ptr() == pixels.ctypes.data
    for place, row in enumerate(request.rows):
        image = dataset[row]["image"]
        assert torch.equal(batch.pixel_values[place][:, : image.shape[1], : image.shape[2]], image)


def test_an_augmentation_may_give_back_a_view_of_what_it_took(cached: MultimodalDataset) -> None:
    def turn(image: torch.Tensor, **key: object) -> torch.Tensor:
        return image.transpose(1, 2) if image.shape[1] == image.shape[2] else image.flip(2)

    vars(cached)["image_policy"] = Square(48)
    plain = copy.copy(cached)
    plain.cache = None
    cached.cache = SampleCache(cached.cache.folder.parent / "square", key=cache_key(cached))
    build_cache(cached, progress=False)
    turned = list(make_loader(cached, augment=turn))
    assert_same(turned, list(make_loader(plain, augment=turn)))


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.filterwarnings("ignore:damaged cache")
def test_what_was_read_into_a_batch_and_is_damaged_is_made_again(
    cached: MultimodalDataset, backend: str
) -> None:
    plain = copy.copy(cached)
    plain.cache = None
    for shard in cached.cache.folder.glob("*.slots"):
        content = np.fromfile(shard, np.uint8)
        content[int(cached.cache._layout.starts[0]) :: 5000] ^= 1
        content.tofile(shard)
    assert_same(list(make_loader(cached, backend)), list(make_loader(plain, backend)))
    assert backend == "torch" or cached.cache.stats().num_damaged > 0


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_batch_is_its_own_when_the_cache_is_overwritten_and_evicted(
    cached: MultimodalDataset, backend: str
) -> None:
    expected = copy.deepcopy(list(make_loader(cached)))
    batches = list(make_loader(cached, backend))
    for shard in cached.cache.folder.glob("*.slots"):
        with shard.open("r+b") as file:  # what a mapped page shows at once
            file.write(bytes(np.full(shard.stat().st_size, 77, np.uint8)))
        shard.unlink()
    cached.cache.close()
    assert_same(batches, expected)
    for batch in batches:
        batch.pixel_values.add_(torch.tensor(1, dtype=torch.uint8))  # not a read-only page
