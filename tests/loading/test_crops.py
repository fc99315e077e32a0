"""A random crop is cut from the stored image and resized once; with a cache, from the cached image."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmlab.data.augment import Augment
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.decode import decode_image
from mmlab.data.records import Records
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect, Region, Square
from tests.loading.loaders import assert_same, make_loader

AUGMENT = Augment(crop_scale=(0.3, 0.8), flip_probability=0.5, brightness=0.4)
POLICIES = {"square": Square(48), "aspect": Aspect(64 * 64, 16)}


@pytest.fixture(params=list(POLICIES))
def dataset(request: pytest.FixtureRequest, records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=POLICIES[request.param])


def with_cache(dataset: MultimodalDataset, folder: Path) -> MultimodalDataset:
    cached = copy.copy(dataset)
    cached.cache = SampleCache(folder, key=cache_key(cached))
    return cached


def test_a_crop_is_decoded_from_the_stored_image_to_the_planned_size(dataset: MultimodalDataset) -> None:
    crop = Augment(crop_scale=(0.3, 0.8))
    (batch,) = PlannedLoader(
        MultimodalDataset(dataset.records[:8], image_policy=dataset.image_policy),
        make_scheduler("random", batch_size=8, seed=5),
        augment=crop,
        num_workers=0,
    )
    for place, record_id in enumerate(batch.record_ids):
        row = dataset.records.ids.index(record_id)
        height, width = int(dataset.sizes.height[row]), int(dataset.sizes.width[row])
        kept = dataset.image_policy.kept(int(dataset.records.height[row]), int(dataset.records.width[row]))
        drawn = crop.draw(seed=5, epoch=0, record_id=record_id)
        inside = drawn.region(height, width, height, width)
        assert inside is not None
        scale = np.array([kept.height / height, kept.width / width])
        start = np.rint(np.array(inside[:2]) * scale).astype(int)
        end = np.rint((np.array(inside[:2]) + inside[2:]) * scale).astype(int)
        region = Region(*(start + kept[:2]).tolist(), *(end - start).tolist())
        expected = decode_image(dataset.records.read_image(row), dataset.image_policy, region)
        pixels = batch.pixel_values[place, :, :height, :width].permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, expected)
        assert int(batch.pixel_mask[place].sum()) == height * width


@pytest.mark.parametrize("backend", ["threads", "torch"])
def test_crops_do_not_depend_on_the_backend_and_change_with_the_epoch(dataset, backend: str) -> None:
    reference, loader = make_loader(dataset, augment=AUGMENT), make_loader(dataset, backend, augment=AUGMENT)
    images = []
    for epoch in (0, 3):
        reference.set_epoch(epoch)
        loader.set_epoch(epoch)
        expected = list(reference)
        assert_same(list(loader), expected)
        images.append({id_: image for batch in expected for id_, image in rows_of(batch, dataset)})
    assert sum(torch.equal(image, images[1][id_]) for id_, image in images[0].items()) == 0


def rows_of(batch, dataset: MultimodalDataset):
    for place, record_id in enumerate(batch.record_ids):
        row = dataset.records.ids.index(record_id)
        yield (
            record_id,
            batch.pixel_values[place, :, : dataset.sizes.height[row], : dataset.sizes.width[row]],
        )


def test_with_a_cache_the_same_part_is_cut_from_the_cached_image(dataset, tmp_path) -> None:
    cached = with_cache(dataset, tmp_path)
    cold, warm = (list(make_loader(cached, "threads", augment=AUGMENT)) for _ in range(2))
    assert_same(warm, cold)
    plain = list(make_loader(dataset, augment=AUGMENT))
    elsewhere = replace(AUGMENT, crop_scale=(0.3, 0.3))
    unlike = list(make_loader(dataset, augment=elsewhere))
    assert [batch.record_ids for batch in plain] == [batch.record_ids for batch in cold]
    assert distance(plain, cold, dataset) < 0.5 * distance(unlike, cold, dataset)


def test_an_image_of_one_pixel_can_be_cropped(tmp_path: Path) -> None:
    for name, size in (("dot", (1, 1)), ("line", (200, 1)), ("pole", (1, 200))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    paths = sorted(map(str, tmp_path.iterdir()))
    for policy in POLICIES.values():
        tiny = MultimodalDataset(paths, [f"text {path}" for path in paths], image_policy=policy)
        for epoch in range(20):
            loader = make_loader(tiny, augment=AUGMENT)
            loader.set_epoch(epoch)
            assert sum(len(batch) for batch in loader) == 3


def distance(batches, others, dataset: MultimodalDataset) -> float:
    """Mean difference of the pixels, in levels."""
    levels = []
    for batch, other in zip(batches, others, strict=True):
        for (_, image), (_, like) in zip(rows_of(batch, dataset), rows_of(other, dataset), strict=True):
            levels.append((image.float() - like.float()).abs().mean().item())
    return float(np.mean(levels))
