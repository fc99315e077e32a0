"""Collation pads to the batch's own size with exact masks; the loader follows the plan, whatever the workers."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from mmlab.data.collate import Sample, collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect


@pytest.fixture(scope="module")
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))


def test_padding_adds_nothing_and_loses_nothing(dataset: MultimodalDataset) -> None:
    samples = [dataset[row] for row in (0, 7, 30, 50)]
    batch = collate(samples, pad_token_id=9)
    for row, sample in enumerate(samples):
        image = sample["image"]
        assert image is not None
        _, height, width = image.shape
        assert torch.equal(batch.pixel_values[row, :, :height, :width], image)
        assert batch.pixel_mask[row].sum() == height * width
        assert batch.pixel_mask[row, :height, :width].all()
        assert batch.pixel_values[row].sum() == image.sum()
        tokens = len(sample["input_ids"])
        assert torch.equal(batch.input_ids[row, :tokens], sample["input_ids"])
        assert (batch.input_ids[row, tokens:] == 9).all()
        assert batch.attention_mask[row].tolist() == [True] * tokens + [False] * (
            batch.shape.num_tokens - tokens
        )
    assert batch.shape.num_tokens == max(len(sample["input_ids"]) for sample in samples)
    assert batch.shape.height == max(
        sample["image"].shape[1] for sample in samples if sample["image"] is not None
    )


def test_a_missing_modality_is_one_masked_cell() -> None:
    text_only = Sample(id="t", image=None, text="hi", input_ids=torch.tensor([1, 2]), label=None, group=0)
    image_only = Sample(
        id="i",
        image=torch.ones(3, 32, 16, dtype=torch.uint8),
        text=None,
        input_ids=torch.tensor([], dtype=torch.int64),
        label=None,
        group=1,
    )
    mixed = collate([text_only, image_only])
    assert mixed.pixel_mask.sum(dim=(1, 2)).tolist() == [0, 32 * 16]
    assert mixed.attention_mask.sum(dim=1).tolist() == [2, 0]
    assert collate([text_only]).shape == (1, 2, 16, 16)
    assert collate([image_only]).shape == (1, 1, 32, 16)
    assert not collate([text_only]).pixel_mask.any()
    assert mixed.labels is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_plan_in_every_epoch(dataset: MultimodalDataset, num_workers: int) -> None:
    loader = PlannedLoader(dataset, make_scheduler("budget", budget=400), num_workers=num_workers)
    for epoch in range(2):
        loader.set_epoch(epoch)
        planned = list(zip(loader.plan, loader.plan.shapes, strict=True))
        batches = list(loader)
        assert len(batches) == len(loader) == len(planned)
        for batch, (rows, shape) in zip(batches, planned, strict=True):
            assert batch.record_ids == [dataset.records.ids[row] for row in rows]
            assert batch.shape == shape


def test_what_is_no_data_set_no_scheduler_and_no_cache_is_refused(dataset: MultimodalDataset) -> None:
    part, planner = torch.utils.data.Subset(dataset, range(10)), make_scheduler("random", batch_size=4)
    with pytest.raises(
        OptionError, match=r"dataset must be a MultimodalDataset.*records.select.*found <torch"
    ):
        PlannedLoader(part, planner)
    with pytest.raises(OptionError, match=r"scheduler must be a scheduler, .*found \[\[0, 1\]\]"):
        PlannedLoader(dataset, [[0, 1]])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"cache must be a SampleCache\(.*found 'folder'"):
        PlannedLoader(dataset, planner, cache="folder")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"this is not a loader's state_dict\(\): found \{\}"):
        PlannedLoader(dataset, planner).load_state_dict({})


def test_iterating_leaves_the_global_generator_alone(dataset: MultimodalDataset) -> None:
    loader = PlannedLoader(dataset, make_scheduler("random", batch_size=8), num_workers=0)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    next(iter(loader))
    assert torch.equal(torch.rand(1), expected)


def test_a_loader_that_is_let_go_of_ends_its_workers_at_once(dataset: MultimodalDataset) -> None:
    loader = PlannedLoader(dataset, make_scheduler("random", batch_size=8), backend="torch", num_workers=1)
    for _ in loader:
        pass
    (worker,) = multiprocessing.active_children()
    del loader
    assert not worker.is_alive()


@pytest.mark.parametrize(
    ("augment", "found"),
    [
        (lambda image, **key: image.float() / 255, "float32"),  # cut to whole numbers it would be black
        (lambda image, **key: image[:, 1:], "uint8, 3"),
        (lambda image, **key: image.numpy(), "uint8"),
    ],
)
def test_an_augmentation_that_returns_another_kind_or_size_is_refused(dataset, augment, found) -> None:
    scheduler = make_scheduler("random", batch_size=4)
    loader = PlannedLoader(dataset, scheduler, augment=augment, num_workers=0)
    with pytest.raises(OptionError, match=f"augment must return uint8 of shape .* not .*{found}"):
        next(iter(loader))
