"""The one call: lists, options, unknown sources, and what importing it does not load."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mmlab.comparison.overview import overview
from mmlab.data.conversations import read_conversations
from mmlab.data.readers import read_records
from mmlab.data.readers.manifest import SYNONYMS
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError, OptionError
from mmlab.types import parse_image_policy
from tests.data.sample_files import Folder, encoded


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


def test_lists_of_different_length_or_of_other_things_are_refused(folder):
    with pytest.raises(DataError, match="found 2 and 1"):
        read_records([folder.image("a.jpg")], ["x", "y"])
    with pytest.raises(DataError, match="item 1: expected an image path, found 5"):
        read_records([folder.image("a.jpg"), 5], ["x", "y"])
    for images, texts in ((None, ["x"]), (5, ["x"]), ("a.jpg", ["x"]), (["a.jpg"], "x"), (["a.jpg"], 5)):
        with pytest.raises(DataError, match="expected lists of image paths and texts, found"):
            read_records(images, texts)


def test_lists_may_lack_a_modality_when_allowed(folder):
    records = read_records([None, folder.image("a.jpg")], ["x", None], allow_missing_modality=True)
    assert records.num_tokens.tolist() == [3, 0]
    assert overview(records, parse_image_policy("square:32")).as_dict()["num_images"] == 1


def test_a_data_frame_gives_what_its_file_gives(three):
    frame = pd.read_csv(three)
    records = read_records(frame, images=three.parent)
    assert (records.ids, records.texts) == (read_records(three).ids, read_records(three).texts)
    kept = read_records(records.to_frame()[records.width == 40].iloc[1:])
    assert kept.texts == ["picture 1", "picture 2"]
    frame["text"] = [["a", "b"], np.array(["c"]), None]  # as Parquet gives lists, and a missing value
    with pytest.warns(UserWarning, match="item 2: 2.jpg: no text"):
        assert read_records(frame, images=three.parent, errors="report").texts == ["a", "b", "c"]
    with pytest.raises(DataError, match="no image and no text column among 0"):
        read_records(pd.DataFrame([1]))
    with pytest.raises(DataError, match="an empty list"):
        read_records(frame[:0])


def test_limit_draws_good_records_by_seed(three):
    drawn = {tuple(read_records(three, limit=2, seed=seed).texts) for seed in range(20)}
    assert drawn == {("picture 0", "picture 1"), ("picture 0", "picture 2"), ("picture 1", "picture 2")}
    assert read_records(three, limit=2).ids == read_records(three, limit=2).ids
    assert len(read_records(three, limit=10)) == 3
    with pytest.raises(OptionError, match="limit must be at least 1, found 0"):
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
        ([1, 2], "item 0: expected a dict or a tar shard's path, found 1"),
    ],
)
def test_unknown_sources(source, message):
    with pytest.raises(DataError, match=message):
        read_records(source)


@pytest.mark.parametrize("content", [b"\x00\x01\x02", b"just some words\n", b'{"a": \n', encoded()])
def test_an_unknown_file_names_every_format_tried(folder, content):
    with pytest.raises(
        DataError, match=r"(?s)not a format.*as COCO captions:.*as Flickr token file:.*as manifest:"
    ):
        read_records(folder.raw("data.bin", content))


@pytest.mark.parametrize(
    ("pack", "command"), [(gzip.compress, "gunzip"), (bz2.compress, "bunzip2"), (lzma.compress, "unxz")]
)
def test_a_compressed_file_says_how_to_decompress_it(folder, pack, command):
    path = folder.raw("data.csv.packed", pack(b"image,text\na.jpg,x\n"))
    with pytest.raises(DataError, match=f"compressed files are not read: {command} it"):
        read_records(path)
    with pytest.raises(DataError, match=f"not UTF-8 .*; {command} it"):
        read_conversations(path)


@pytest.mark.parametrize("content", [b"", b" \n", b"[]"])
def test_a_file_without_rows_says_so(folder, content):
    with pytest.raises(DataError, match=r"data\.bin: no rows found"):
        read_records(folder.raw("data.bin", content))


def test_wrong_options_are_refused(three):
    with pytest.raises(OptionError, match=r"unknown errors= 'ignore'.*raise, report"):
        read_records(three, errors="ignore")
    for images in (three, 5):
        with pytest.raises(OptionError, match="not a folder"):
            read_records(three, images=images)
    with pytest.raises(OptionError, match="tokenizer must be a tokenizer or its name, found 5"):
        read_records(three, tokenizer=5)


def test_reading_twice_gives_the_same(three):
    first, second = read_records(three), read_records(three)
    assert list(first) == list(second)


def test_progress_stays_silent_without_a_terminal(three, capfd):
    read_records(three)
    read_records(three, progress=True)
    assert capfd.readouterr() == ("", "")


def test_importing_loads_neither_torch_nor_datasets():
    heavy = {"torch", "datasets", "transformers", "pandas"}
    code = f"import sys, mmlab.data.readers, mmlab.data.decode, mmlab.data.text; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.serial
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


def test_the_document_lists_every_column_name():
    table = (Path(__file__).parents[2] / "docs/internals/data_formats.md").read_text("utf-8")
    for column, names in SYNONYMS.items():
        row = next(line for line in table.splitlines() if line.startswith((f"| {column} |", f"| {column},")))
        assert row.split("|")[2].replace("`", "").split() == names.split()


def whole_files(folder: Folder) -> dict[str, Path]:
    """One valid data file of each kind over the same image."""
    folder.image("a.jpg")
    coco = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [{"id": 5, "image_id": 1, "caption": "x"}, {"id": 6, "image_id": 1, "caption": "y"}],
    }
    pd.DataFrame({"image": ["a.jpg"], "text": ["x"]}).to_parquet(folder.path / "parquet")
    with tarfile.open(folder.path / "tar", "w") as archive:
        for name, content in (("a.jpg", encoded()), ("a.json", b'{"caption": ["x", "y"], "label": 1}')):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5
            archive.addfile(member, io.BytesIO(content))
    return {
        "csv": folder.csv("csv", [["image", "text", "label"], ["a.jpg", "x, y", "1"], ["a.jpg", "z", "2"]]),
        "jsonl": folder.jsonl("jsonl", [{"image": "a.jpg", "text": ["x", "y"], "group": "g"}]),
        "json": folder.json("json", [{"image": "a.jpg", "text": "x"}, {"image": "a.jpg", "text": "y"}]),
        "coco": folder.json("coco", coco),
        "flickr": folder.text("flickr", "a.jpg#0\tx\na.jpg#1\ty\n"),
        "parquet": folder.path / "parquet",
        "tar": folder.path / "tar",
    }


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with a few bytes changed, cut out, or replaced by others that mean something."""
    tokens = [
        b"null",
        b"[",
        b"{}",
        b'"',
        b",",
        b"\t",
        b"\n",
        b"\r",
        b"\xff",
        b"\0",
        b"1e999",
        b"NaN",
        b"5",
        b"../",
        b"-1",
    ]
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        start = chance.randrange(len(changed))
        end = start + chance.choice([0, 1, 3, 8, 50])
        changed[start:end] = chance.choice([*tokens, bytes([chance.randrange(256)])])
    return bytes(changed)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "coco", "flickr", "parquet", "tar"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_records_or_a_data_error(folder, kind):
    """Whatever the damage: no other exception, no endless loop, no empty result."""
    path = whole_files(folder)[kind]
    content, chance = path.read_bytes(), random.Random(7)
    assert len(read_records(path)) >= 1
    for _ in range(150):
        path.write_bytes(damaged(content, chance))
        with suppress(DataError):
            assert len(read_records(path, errors="report")) >= 1


def test_digits_where_a_tar_file_has_its_check_sum_are_no_tar_file(folder):
    folder.image("a.jpg")
    assert len(read_records(folder.csv("data.csv", [["image", "text"], ["a.jpg", "9" * 1000]]))) == 1
