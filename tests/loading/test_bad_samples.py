"""A sample that breaks in mid-run is named, and what comes in its place does not depend on who reads it."""

from __future__ import annotations

import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmlab.data.augment import Augment
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.errors import DataError, OptionError, RunError
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.model.presets import build_model
from mmlab.runs.events import RunEvent, RunLog, read_events
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.types import Aspect
from tests.loading.loaders import BACKENDS, make_loader


@pytest.fixture
def broken(scenes: Path, tmp_path: Path) -> MultimodalDataset:
    """Three images (nine records) broke after the records were read: cut off, replaced by text, gone."""
    folder = tmp_path / "scenes"
    shutil.copytree(scenes.parent, folder)
    records = read_records(folder / scenes.name, progress=False)
    dataset = MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))
    cut, text, gone = (Path(path) for path in sorted(set(dataset.records.image_paths))[4:7])
    cut.write_bytes(cut.read_bytes()[:300])
    text.write_bytes(b"no image any more")
    gone.unlink()
    return dataset


def bad_ids(dataset: MultimodalDataset) -> set[str]:
    paths = sorted(set(dataset.records.image_paths))[4:7]
    pairs = zip(dataset.records.ids, dataset.records.image_paths, strict=True)
    return {record_id for record_id, path in pairs if path in paths}


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_raise_stops_at_the_batch_that_holds_it(broken: MultimodalDataset, backend: str) -> None:
    events: list[RunEvent] = []
    loader = make_loader(broken, backend, emit=events.append)
    batches = []
    with pytest.raises(DataError, match=r"record '.*': cannot read image .*repair or remove the file"):
        batches += loader  # in place: what came before the error stays
    rows = next(rows for rows in loader.plan if {broken.records.ids[row] for row in rows} & bad_ids(broken))
    assert loader.state_dict()["num_batches"] == list(loader.plan).index(rows)
    (event,) = [event for event in events if event.kind == "bad_sample"]
    assert event.values["record_id"] in bad_ids(broken)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_skip_leaves_out_those_and_no_others(broken: MultimodalDataset, tmp_path: Path, backend: str) -> None:
    with RunLog(tmp_path / "run") as log:
        loader = make_loader(broken, backend, on_bad_sample="skip", emit=log.emit)
        seen = [record_id for batch in loader for record_id in batch.record_ids]
    assert sorted(seen) == sorted(set(broken.records.ids) - bad_ids(broken))
    events = [event.values for event in read_events(log.path)[0] if event.kind == "bad_sample"]
    assert {event["record_id"] for event in events} == bad_ids(broken)
    for event in events:
        path = dict(zip(broken.records.ids, broken.records.image_paths, strict=True))[event["record_id"]]
        assert event["image_path"] == path
        assert path in event["message"]


def test_without_a_listener_bad_samples_are_warnings(broken: MultimodalDataset) -> None:
    with pytest.warns(RuntimeWarning, match=r"cannot read image .* \(left out\)"):
        list(make_loader(broken, "threads", on_bad_sample="skip"))


@pytest.mark.parametrize("options", [{}, {"augment": Augment()}])
def test_an_image_that_was_replaced_by_one_of_another_shape_is_left_out(
    tmp_path: Path, options: dict
) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path in paths:
        Image.new("RGB", (128, 96)).save(path)
    dataset = MultimodalDataset(paths, ["x", "y", "z"], image_policy=Aspect(64 * 64, 16))
    sizes = dataset.sizes
    Image.new("RGB", (60, 100)).save(paths[1])
    Image.new("RGB", (256, 192)).save(paths[2])  # has the planned size too
    message = "cannot read image .*1.png: it was replaced: found 100 x 60 pixels, 96 x 128 when"
    scheduler = make_scheduler("random", batch_size=3)
    for backend in ("here", "threads"):
        loader = make_loader(dataset, backend, scheduler=scheduler, on_bad_sample="skip", **options)
        with pytest.warns(RuntimeWarning, match=message):
            (batch,) = loader
        assert batch.pixel_values.shape == (2, 3, *(column[0] for column in (sizes.height, sizes.width)))
    dataset.cache = SampleCache(tmp_path / "cache", key=cache_key(dataset))
    (bad,) = build_cache(dataset, progress=False).bad_samples
    assert re.search(message, bad)


def test_too_many_end_the_run_also_across_a_resume(broken: MultimodalDataset) -> None:
    def loader():
        return make_loader(
            broken, "threads", on_bad_sample="skip", max_bad_samples=5, emit=lambda event: None
        )

    first = loader()
    with pytest.raises(RunError, match="6 samples of epoch 0 could not be read, and max_bad_samples is 5"):
        list(first)
    counts = np.cumsum(
        [len({broken.records.ids[row] for row in rows} & bad_ids(broken)) for rows in first.plan]
    )
    num_batches = int(np.searchsorted(counts, 3)) + 1
    second = loader()
    list(islice(second, num_batches))
    third = loader()
    third.load_state_dict(second.state_dict())
    with pytest.raises(RunError, match="could not be read, and max_bad_samples is 5"):
        list(third)
    assert len(third.bad_samples) <= 3


def test_a_batch_of_nothing_but_bad_samples_is_left_out(broken: MultimodalDataset) -> None:
    scheduler = make_scheduler("sorted", batch_size=1)
    loader = make_loader(
        broken, "threads", scheduler=scheduler, on_bad_sample="skip", emit=lambda event: None
    )
    assert len(list(loader)) == len(broken) - 9
    assert loader.state_dict()["num_batches"] == len(broken)


def test_steps_after_a_batch_that_was_left_out_have_the_predictions_of_their_own_batches(
    broken: MultimodalDataset,
) -> None:
    dataset = MultimodalDataset(broken.records.select(range(24)), image_policy=broken.image_policy)
    scheduler = make_scheduler("sorted", batch_size=1)
    loader = make_loader(dataset, "here", scheduler=scheduler, on_bad_sample="skip", emit=lambda event: None)
    small = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32}
    model = build_model("tiny", vocab_size=len(dataset.tokenizer), **small)
    steps = FusionTrainer(model, device="cpu", objectives=["matching"]).fit(loader)
    assert 0 < len(steps) < 24
    for step in steps:
        assert step["predicted_cost"] == step["padded_tokens"] + step["padded_patches"]


def test_an_unknown_policy_is_named(dataset: MultimodalDataset) -> None:
    with pytest.raises(OptionError, match="unknown policy on bad samples 'ignore'"):
        make_loader(dataset, on_bad_sample="ignore")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str, dataset: MultimodalDataset) -> None:
    with pytest.raises(OptionError, match=f"device '{device}' cannot be used here .*; cpu always can"):
        make_loader(dataset, device=device)


@pytest.mark.parametrize("limit", [-1, 2.5, "many"])
def test_an_impossible_limit_on_bad_samples_is_refused(limit: int, dataset: MultimodalDataset) -> None:
    with pytest.raises(OptionError, match="max_bad_samples must be"):
        make_loader(dataset, max_bad_samples=limit)


def failing(image: object, **_: object) -> object:
    raise ZeroDivisionError("of the user's own")


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_an_augmentation_that_fails_keeps_its_error_and_names_the_record(
    dataset: MultimodalDataset, backend: str
) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user's own") as caught:
        list(make_loader(dataset, backend, augment=failing))
    (note,) = caught.value.__notes__
    assert note.split("'")[1] in dataset.records.ids


def test_a_batch_that_one_of_several_ranks_cannot_read_ends_the_run(broken: MultimodalDataset) -> None:
    scheduler = make_scheduler("random", batch_size=1, world_size=2)
    loader = make_loader(
        broken, "threads", scheduler=scheduler, on_bad_sample="skip", emit=lambda event: None
    )
    with pytest.raises(
        RunError, match=r"no sample of a batch could be read \(.*\), and .* a step behind the others"
    ):
        list(loader)
