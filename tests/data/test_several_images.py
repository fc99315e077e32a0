"""A sample with several images is a record for each, in one group."""

from __future__ import annotations

import datasets
import pandas as pd
import pytest

from mmlab.data.readers import read_records
from mmlab.data.readers.rows import Row, _number_groups
from mmlab.errors import DataError
from tests.data.sample_files import encoded

datasets.disable_progress_bars()

ENTRIES = [
    {"id": "p", "images": ["a.png", "b.png"], "caption": "both"},
    {"id": "q", "images": ["c.png"], "caption": "one"},
    {"id": "r", "images": ["d.png", "e.png", "f.png"], "caption": "three"},
]
IDS = ["p#0", "p#1", "q#0", "r#0", "r#1", "r#2"]


@pytest.fixture
def images(folder):
    for number, name in enumerate("abcdef"):
        folder.image(f"{name}.png", 20 + number, 10, "PNG")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_with_a_list_of_images(images, kind):
    if kind == "parquet":
        path = images.path / "pairs.parquet"
        pd.DataFrame(ENTRIES).to_parquet(path)
    else:
        path = getattr(images, kind)(f"pairs.{kind}", ENTRIES)
    records = read_records(path)
    assert records.ids == IDS
    assert records.texts == ["both", "both", "one", "three", "three", "three"]
    assert records.width.tolist() == [20, 21, 22, 23, 24, 25]
    assert records.group.tolist() == [0, 0, 1, 2, 2, 2]


def test_several_images_with_several_texts_are_all_pairs(images):
    path = images.jsonl("pairs.jsonl", [{"id": "p", "image": ["a.png", "b.png"], "text": ["x", "y"]}])
    records = read_records(path)
    assert records.ids == ["p#0#0", "p#0#1", "p#1#0", "p#1#1"]
    assert records.texts == ["x", "y", "x", "y"]
    assert set(records.group) == {0}


def test_a_long_chain_of_samples_is_one_group():
    """Frames of a film, each with the next: 40,000 records, which took minutes when each looked through the chain."""
    rows = [
        (Row("", f"{frame}.png", "x", id=f"{first}#{frame}", sample=first), f"{frame}.png")
        for first in range(20_000)
        for frame in (first, first + 1)
    ]
    assert set(_number_groups(rows)) == {0}


def test_samples_that_share_an_image_are_one_group(images):
    """None of them may be a negative of another."""
    lists = [["a.png", "b.png"], ["c.png", "d.png"], ["e.png"], ["d.png", "b.png"]]
    path = images.jsonl("pairs.jsonl", [{"image": names, "text": "x"} for names in lists])
    records = read_records(path)
    assert records.group.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert records.ids == ["a.png#0", "b.png#0", "c.png#0", "d.png#0", "e.png#0", "d.png#1", "b.png#1"]
    entries = [{"image": lists[0], "text": "x", "group": 7}, {"image": "e.png", "text": "y"}]
    stated = images.jsonl("stated.jsonl", entries)
    assert read_records(stated).group.tolist() == [0, 0, 1]


def test_what_is_wrong_with_one_image_is_told_of_that_one(images):
    entries = [
        {"id": "p", "image": ["a.png", "gone.png", 3, None], "text": "x"},
        {"id": "q", "image": [], "text": "y"},
    ]
    with pytest.raises(DataError) as error:
        read_records(images.jsonl("pairs.jsonl", entries))
    reasons = [(row.path, row.reason.partition(" in ")[0].partition(" (")[0]) for row in error.value.bad_rows]
    assert reasons == [
        ("gone.png", "file not found"),
        ("", "image must be a path, found int"),
        ("", "no image"),
        ("", "no image"),
    ]


@pytest.mark.parametrize("kind", ["images", "bytes", "paths"])
def test_datasets_with_lists_of_images(folder, kind):
    contents = [[encoded(40, 30), encoded(50, 30)], [], [encoded(60, 30)], None]
    if kind == "paths":
        column = [
            names and [str(folder.raw(f"{row}-{place}.jpg", content)) for place, content in enumerate(names)]
            for row, names in enumerate(contents)
        ]
        feature = datasets.List(datasets.Value("string"))
    elif kind == "bytes":
        column, feature = contents, datasets.List(datasets.Value("binary"))
    else:
        column = [names and [{"bytes": content, "path": None} for content in names] for names in contents]
        feature = datasets.List(datasets.Image())
    table = datasets.Dataset.from_dict(
        {"image": column, "text": ["both", "none", "one", "none"]},
        features=datasets.Features({"image": feature, "text": datasets.Value("string")}),
    )
    with pytest.warns(UserWarning, match=r"2 of 5 rows .* no image"):
        records = read_records(table, errors="report")
    assert records.texts == ["both", "both", "one"]
    assert records.width.tolist() == [40, 50, 60]
    assert records.group.tolist() == [0, 0, 1]
    if kind != "paths":
        assert records.ids == ["0#0", "0#1", "2#0"]
    assert [records.read_image(row) for row in range(3)] == [encoded(width, 30) for width in (40, 50, 60)]
    texts = read_records(table, allow_missing_modality=True)
    assert (len(texts), texts.image_paths.count(None)) == (5, 2)


def test_a_dataset_with_lists_of_a_fixed_length():
    column = [
        [{"bytes": encoded(width, 30), "path": None} for width in widths] for widths in ([40, 50], [60, 70])
    ]
    features = {"image": datasets.List(datasets.Image(), length=2), "text": datasets.Value("string")}
    table = datasets.Dataset.from_dict(
        {"image": column, "text": ["a", "b"]}, features=datasets.Features(features)
    )
    records = read_records(table)
    assert records.width.tolist() == [40, 50, 60, 70]
    assert records.ids == ["0#0", "0#1", "1#0", "1#1"]
