"""Hugging Face datasets: images inside the table are measured without being decoded."""

from __future__ import annotations

import io
import pickle
import tarfile

import datasets
import pytest
from PIL import Image as PillowImage

from mmlab.data.readers import read_records
from mmlab.errors import DataError
from tests.data.sample_files import encoded, turned

datasets.disable_progress_bars()


def inside(*images: bytes | None) -> list[dict | None]:
    return [None if image is None else {"bytes": image, "path": None} for image in images]


@pytest.fixture
def dataset():
    return datasets.Dataset.from_dict(
        {
            "image": inside(encoded(40, 30), turned(60, 20)),
            "caption": [["one", "two"], ["three"]],
            "label": [1, 0],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "caption": datasets.List(datasets.Value("string")),
                "label": datasets.ClassLabel(names=["cat", "dog"]),
            }
        ),
    )


def test_images_inside_the_table(dataset):
    records = read_records(dataset)
    assert records.texts == ["one", "two", "three"]
    assert records.ids == ["0#0", "0#1", "1#0"]
    assert list(zip(records.height, records.width, strict=True)) == [(30, 40), (30, 40), (60, 20)]
    assert records.group.tolist() == [0, 0, 1]
    assert records.labels is not None
    assert records.labels.tolist() == [1, 1, 0]
    assert records.label_names == ("cat", "dog")
    assert records.read_image(0) == encoded(40, 30)


def test_shards_that_datasets_loads(tmp_path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in {"a.jpg": encoded(40, 30), "a.txt": b"one"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    loaded = datasets.load_dataset(
        "webdataset", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    records = read_records(loaded)
    assert (records.ids, records.texts, records.width.tolist()) == (["a"], ["one"], [40])


def test_reading_decodes_no_pixel(dataset, monkeypatch):
    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(PillowImage.Image, "load", refuse)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert len(read_records(dataset)) == 3


def test_selected_and_formatted_datasets(dataset):
    records = read_records(dataset.select([1]).with_format("numpy"))
    assert records.texts == ["three"]
    assert records.read_image(0) == turned(60, 20)


def test_the_store_travels_to_workers(dataset):
    store = pickle.loads(pickle.dumps(read_records(dataset).store))
    assert store.read("/0") == encoded(40, 30)


def test_a_dictionary_of_splits_and_its_saved_folder(dataset, tmp_path):
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([0])})
    splits.save_to_disk(str(tmp_path / "saved"))
    for source in (splits, tmp_path / "saved"):
        records = read_records(source)
        assert records.splits == ["train"] * 3 + ["test"] * 2
        assert len(set(records.ids)) == 5
        assert records.read_image(4) == encoded(40, 30)


@pytest.mark.parametrize("kind", ["path column", "image from path", "binary column"])
def test_other_ways_to_hold_images(folder, kind):
    path = folder.image("a.jpg", 24, 12)
    table = datasets.Dataset.from_dict(
        {"image": [path.read_bytes() if kind == "binary column" else str(path)], "text": ["x"]}
    )
    if kind == "image from path":
        table = table.cast_column("image", datasets.Image())
    records = read_records(table)
    assert (records.height.tolist(), records.width.tolist()) == ([12], [24])
    assert records.read_image(0) == path.read_bytes()


def test_bad_rows_of_a_dataset():
    images = inside(b"no image", None, encoded())
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"image": images, "text": ["x", "y", "  "]}, features=features)
    with pytest.raises(DataError) as error:
        read_records(table)
    assert [(row.row, row.reason.partition(" (")[0]) for row in error.value.bad_rows] == [
        ("row 0", "not an image that Pillow can read"),
        ("row 1", "no image"),
        ("row 2", "empty text"),
    ]


def test_streams_and_other_columns_are_refused(dataset):
    with pytest.raises(DataError, match="IterableDataset: load it without streaming"):
        read_records(dataset.to_iterable_dataset())
    with pytest.raises(DataError, match="no text column among image, label"):
        read_records(dataset.remove_columns("caption"))
    numbers = datasets.Dataset.from_dict({"image": [[1, 2]], "text": ["x"]})
    with pytest.raises(DataError, match=r"column image holds List.*expected images, encoded bytes or paths"):
        read_records(numbers)
