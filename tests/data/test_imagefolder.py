"""Hugging Face image folders: a metadata file beside the images, or one for each split; and folders in general."""

from __future__ import annotations

import os

import pytest

from mmlab.data.readers import read_records
from mmlab.errors import DataError


def test_metadata_beside_the_images(folder):
    folder.image("0001.png", kind="PNG")
    folder.image("deep/0002.png", kind="PNG")
    folder.csv("metadata.csv", [["file_name", "text"], ["0001.png", "one"], ["deep/0002.png", "two"]])
    records = read_records(folder.path)
    assert records.texts == ["one", "two"]
    assert records.splits is None
    assert read_records(folder.path / "metadata.csv").texts == records.texts


def test_each_split_has_its_folder_and_metadata(folder):
    for split, texts in (("train", ["one", "two"]), ("validation", ["three"])):
        for number, _ in enumerate(texts):
            folder.image(f"{split}/{number}.jpg")
        entries = [{"file_name": f"{number}.jpg", "caption": text} for number, text in enumerate(texts)]
        folder.jsonl(f"{split}/metadata.jsonl", entries)
    records = read_records(folder.path)
    assert records.splits == ["train", "train", "validation"]
    assert records.ids == ["train/0.jpg#0", "train/1.jpg#0", "validation/0.jpg#0"]
    assert records.group.tolist() == [0, 1, 2]
    assert read_records(folder.path, split="validation").texts == ["three"]
    assert records.split("validation").texts == ["three"]
    with pytest.raises(DataError, match="no split 'val'; known: train, validation"):
        read_records(folder.path, split="val")


def test_a_split_that_is_not_asked_for_is_not_checked(folder):
    folder.image("val/0.jpg")
    for split in ("train", "val"):
        folder.csv(f"{split}/metadata.csv", [["file_name", "text"], ["0.jpg", split]])
    assert read_records(folder.path, split="val").texts == ["val"]
    with pytest.raises(DataError, match="1 of 2 rows"):
        read_records(folder.path)


def test_a_folder_with_one_data_file_among_others(folder):
    folder.image("images/a.jpg")
    folder.csv("pairs.csv", [["image", "text"], ["a.jpg", "x"]])
    folder.csv("LICENSES.csv", [["file_name", "license"], ["a.jpg", "CC"]])
    folder.text("empty.txt", "")
    folder.json("settings.json", {"size": 3})
    folder.json("list.json", [{"name": "a.jpg"}])
    os.mkfifo(folder.path / "pipe.csv")
    (folder.path / "folder.json").mkdir()
    assert read_records(folder.path).texts == ["x"]


def test_a_data_file_for_each_split(folder):
    folder.image("a.jpg")
    for split in ("train", "test"):
        folder.csv(f"{split}.csv", [["image", "text"], ["a.jpg", split]])
    assert read_records(folder.path).splits == ["test", "train"]


def test_several_data_files_without_a_split_are_not_guessed_between(folder):
    for name in ("a", "b"):
        folder.csv(f"{name}.csv", [["image", "text"], ["a.jpg", "x"]])
    with pytest.raises(DataError, match=r"several data files, pass one: a.csv, b.csv"):
        read_records(folder.path)


def test_captions_beside_the_images(folder):
    for name in ("train/00/a.jpg", "train/00/b.PNG", "val/c.jpeg"):
        folder.image(name)
        folder.text(f"{name.partition('.')[0]}.txt", f"\ufeffa caption of {name}\n")
        folder.json(f"{name.partition('.')[0]}.json", {"caption": "not read"})
    folder.json("00_stats.json", {"count": 3})
    folder.text("val/.ipynb_checkpoints/c-checkpoint.txt", "old")
    records = read_records(folder.path)
    assert records.texts == [
        f"a caption of {name}" for name in ("train/00/a.jpg", "train/00/b.PNG", "val/c.jpeg")
    ]
    assert records.ids == ["train/00/a.jpg#0", "train/00/b.PNG#0", "val/c.jpeg#0"]
    assert records.splits == ["train", "train", "val"]
    folder.csv("pairs.csv", [["image", "text"], ["val/c.jpeg", "from the table"]])
    assert read_records(folder.path).texts == ["from the table"]


def test_what_lacks_its_caption_or_its_image_is_named(folder):
    for name in ("a", "b", "c"):
        folder.image(f"{name}.jpg")
    folder.text("a.txt", "one")
    folder.text("b.txt", " \n")
    folder.raw("d.txt", b"\xff\xfe")
    folder.text("e.txt", "five")
    with pytest.warns(UserWarning, match="4 of 5 rows"):
        records = read_records(folder.path, errors="report")
    assert records.texts == ["one"]
    found = {row.row: row.reason for row in records.bad_rows}
    assert found["b.jpg"] == "empty text"
    assert found["c.jpg"].startswith("no text")
    assert "line 1: not UTF-8" in found["d.txt"]
    assert found["e.txt"].startswith("no image")


def test_of_many_files_that_are_no_data_three_are_explained(folder):
    for number in range(50):
        folder.text(f"{number:02}.txt", "some words")
    with pytest.raises(DataError, match=r"(?s)00\.txt, as.*02\.txt, as.*and 47 more files$") as error:
        read_records(folder.path)
    assert len(str(error.value).splitlines()) == 11


def test_a_folder_without_data_says_what_was_looked_for(folder):
    folder.image("a.jpg")
    folder.csv("notes.csv", [["name", "age"], ["x", "3"]])
    with pytest.raises(
        DataError, match=r"(?s)no image-text data found.*tar shards.*notes.csv, as manifest: .*name, age"
    ):
        read_records(folder.path)
