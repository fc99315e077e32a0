"""The one call: lists, options, unknown sources, and what importing it does not load."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from sample_files import encoded

from mmlab.errors import DataError, OptionError
from mmlab.readers import read_records
from mmlab.text import load_tokenizer


@pytest.fixture
def three(folder):
    for number in range(3):
        folder.image(f"{number}.jpg")
    rows = [[f"{number}.jpg", f"picture {number}"] for number in range(3)]
    return folder.csv("data.csv", [["image", "text"], *rows])


def test_two_parallel_lists(folder):
    paths = [folder.image("a.jpg"), folder.image("deep/b c.jpg", 20, 10)]
    records = read_records(paths, ["x", "y"])
    assert records.image_paths == [str(path) for path in paths]
    assert records.width.tolist() == [40, 20]
    assert (
        read_records(["a.jpg", "deep/b c.jpg"], ("x", "y"), images=folder.path).image_paths
        == records.image_paths
    )
    assert read_records(iter(paths), iter(["x", "y"])).ids == records.ids


def test_lists_of_different_length_are_refused(folder):
    with pytest.raises(DataError, match="found 2 and 1"):
        read_records([folder.image("a.jpg")], ["x", "y"])


def test_lists_may_lack_a_modality_when_allowed(folder):
    records = read_records([None, folder.image("a.jpg")], ["x", None], allow_missing_modality=True)
    assert records.num_tokens.tolist() == [3, 0]


def test_limit_takes_the_first_good_records(three):
    assert read_records(three, limit=2).texts == ["picture 0", "picture 1"]
    assert len(read_records(three, limit=10)) == 3
    with pytest.raises(OptionError, match="limit must be at least 1 record, found 0"):
        read_records(three, limit=0)


def test_a_tokenizer_measures_the_texts(three):
    tokenizer = load_tokenizer(records=read_records(three))
    assert read_records(three, tokenizer=tokenizer).num_tokens.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/data.csv", "no such file or folder"),
        (5, "cannot read records from int"),
        ([], "cannot read records from an empty list"),
    ],
)
def test_unknown_sources(source, message):
    with pytest.raises(DataError, match=message):
        read_records(source)


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b"just some words\n", b'{"a": \n', encoded()])
def test_an_unknown_file_names_every_format_tried(folder, content):
    with pytest.raises(
        DataError, match=r"(?s)not a format.*as COCO captions:.*as Flickr token file:.*as manifest:"
    ):
        read_records(folder.raw("data.bin", content))


def test_wrong_options_are_refused(three):
    with pytest.raises(OptionError, match=r"unknown errors= 'ignore'.*raise, report"):
        read_records(three, errors="ignore")
    with pytest.raises(OptionError, match="not a folder"):
        read_records(three, images=three)


def test_reading_twice_gives_the_same(three):
    first, second = read_records(three), read_records(three)
    assert list(first) == list(second)


def test_progress_stays_silent_without_a_terminal(three, capfd):
    read_records(three)
    read_records(three, progress=True)
    assert capfd.readouterr() == ("", "")


def test_importing_loads_neither_torch_nor_datasets():
    heavy = {"torch", "datasets", "transformers", "pandas"}
    code = f"import sys, mmlab.readers, mmlab.text; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_known_data_set_of_many_images_is_read_quickly(folder):
    """Generous for a busy machine; 25,000 images take a third of a second alone."""
    content = encoded(8, 8)
    names = [f"images/{number}.jpg" for number in range(2500)]
    for name in names:
        folder.raw(name, content)
    path = folder.csv("data.csv", [["image", "text"], *([name, "x"] for name in names)])
    read_records(path)
    start = time.perf_counter()
    read_records(path)
    assert time.perf_counter() - start < 1
