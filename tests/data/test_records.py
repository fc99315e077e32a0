"""Records: a sequence in columns; selecting, splitting and holding out keep rows whole."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.data.records import BadRow, Records, read_bytes
from mmlab.errors import DataError, OptionError
from mmlab.types import Record, Square


def make(num_images: int = 4, per_image: int = 2) -> Records:
    """`per_image` texts for each image, all columns filled, every value telling its row."""
    rows = range(num_images * per_image)
    image_of = [row // per_image for row in rows]
    return Records(
        ids=[f"id{row}" for row in rows],
        image_paths=[f"{image}.jpg" for image in image_of],
        texts=[f"text {row}" for row in rows],
        height=np.array([10 + image for image in image_of], np.int32),
        width=np.array([20 + image for image in image_of], np.int32),
        num_tokens=np.array([3 + row for row in rows], np.int32),
        group=np.array(image_of, np.int64),
        labels=np.array([row % 3 for row in rows], np.int64),
        splits=["train" if image % 2 == 0 else "val" for image in image_of],
        source="here",
    )


def test_a_row_is_a_record():
    records = make()
    expected = Record("id3", "1.jpg", "text 3", 11, 21, 6, 0, group=1, split="val")
    assert records[3] == records[-5] == list(records)[3] == expected
    assert type(records[3].height) is int
    with pytest.raises(IndexError):
        records[8]


def test_slices_and_selections_are_records():
    records = make()
    assert list(records[2:6:2]) == [records[2], records[4]]
    assert list(records[::-1]) == list(records)[::-1]
    assert list(records.select([5, 0, 5])) == [records[5], records[0], records[5]]
    assert list(records.select(records.group == 1)) == [records[2], records[3]]
    assert list(records.select([])) == []
    assert records[:2].source == "here"


def test_a_sample_has_whole_images_of_every_split_in_their_order():
    records = make(num_images=40, per_image=2)
    records = replace(
        records, splits=["val" if row >= 72 else "train" for row in range(80)]
    )  # 36 and 4 images
    for seed in range(9):
        few, half = records.sample(8, seed=seed), records.sample(40, seed=seed)
        assert few.splits.count("val") == 4  # two images, though val is a tenth
        assert half.splits.count("val") == pytest.approx(4, abs=2)
        for sample in (few, half):
            assert set(np.bincount(sample.group)) == {0, 2}
            assert sample.ids == sorted(set(sample.ids), key=records.ids.index)
    assert records.sample(8, seed=1).ids == records.sample(8, seed=1).ids != records.sample(8, seed=2).ids
    assert records.sample(None) is records.sample(80) is records
    assert len(records.sample(0)) == 0
    for num in (-1, 2.5, "8"):
        with pytest.raises(OptionError, match="num must be"):
            records.sample(num)


def test_columns_must_agree():
    with pytest.raises(ValueError, match=r"columns must have one length, found ids 8, .*num_tokens 3"):
        replace(make(), num_tokens=np.zeros(3, np.int32))


def test_its_text_is_short():
    assert repr(make(1000)) == "<2000 records of 1000 images from here>"


def test_splits_by_name():
    records = make()
    assert records.split("val").ids == ["id2", "id3", "id6", "id7"]
    with pytest.raises(DataError, match="no split 'test' in here; known: train, val"):
        records.split("test")
    with pytest.raises(DataError, match="known: none"):
        replace(records, splits=None).split("train")


@given(
    num_images=st.integers(2, 30),
    per_image=st.integers(1, 3),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 5),
)
def test_holding_out_divides_the_images(num_images, per_image, fraction, seed):
    records = make(num_images, per_image)
    kept, held_out = records.hold_out(fraction, seed=seed)
    assert sorted(kept.ids + held_out.ids) == sorted(records.ids)
    assert not set(kept.group) & set(held_out.group)
    assert len(kept) > 0
    assert len(held_out) > 0
    assert records.hold_out(fraction, seed=seed)[1].ids == held_out.ids


def test_holding_out_refuses_what_cannot_be():
    with pytest.raises(OptionError, match=r"fraction must be below 1, found 1.5"):
        make().hold_out(1.5)
    with pytest.raises(OptionError, match=r"fraction must be a number, found 'a'"):
        make().hold_out("a")
    with pytest.raises(DataError, match=r"all 2 records are of one group .* at least 2 groups are needed"):
        make(1).hold_out()


def test_sizes_are_the_planners_columns():
    records = make()
    assert records.sizes().height.tolist() == records.height.tolist()
    planned = records.sizes(Square(8))
    assert planned.height.tolist() == planned.width.tolist() == [8] * 8
    assert planned.num_tokens.tolist() == records.num_tokens.tolist()
    assert planned.group.tolist() == records.group.tolist()


def test_new_lengths_leave_the_old_records_alone():
    records = make()
    assert records.with_num_tokens([5] * 8).num_tokens.tolist() == [5] * 8
    assert records.num_tokens[0] == 3


def test_images_are_read_from_their_files(tmp_path):
    (tmp_path / "a b.jpg").write_bytes(b"bytes")
    records = replace(make(1, 2), image_paths=[str(tmp_path / "a b.jpg"), None])
    assert pickle.loads(pickle.dumps(records)).read_image(0) == b"bytes"
    with pytest.raises(DataError, match="record 'id1' has no image"):
        records.read_image(1)


def test_a_frame_has_a_column_for_what_there_is():
    records = make()
    assert records.to_frame().loc[3].to_dict() == {
        "id": "id3", "image_path": "1.jpg", "text": "text 3", "height": 11, "width": 21, "num_tokens": 6, "group": 1,
        "label": 0, "split": "val",
    }  # fmt: skip
    assert {"label", "split"}.isdisjoint(replace(records, labels=None, splits=None).to_frame().columns)


def test_a_bad_row_reads_as_one_line():
    assert str(BadRow("line 3", "a.jpg", "empty text")) == "line 3: a.jpg: empty text"
    assert str(BadRow("line 3", "", "not JSON")) == "line 3: not JSON"


def test_a_part_of_a_file_is_read_and_what_is_no_file_is_refused(tmp_path, monkeypatch):
    path = str(tmp_path / "content")
    (tmp_path / "content").write_bytes(bytes(range(100)))
    assert read_bytes(path) == bytes(range(100))
    assert read_bytes(path, 90, 5) == bytes(range(90, 95))
    assert read_bytes(path, 95, 20) == bytes(range(95, 100))
    read = os.read
    # as a network file system may
    monkeypatch.setattr(os, "read", lambda number, size: read(number, min(size, 7)))
    assert read_bytes(path, 3) == bytes(range(3, 100))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(str(tmp_path / "pipe"))
