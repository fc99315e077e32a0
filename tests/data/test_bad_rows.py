"""Every kind of row that cannot be used is reported with its row, its path and the reason, and never vanishes."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from mmlab.data.readers import read_records
from mmlab.data.readers.rows import MAX_LISTED
from mmlab.errors import DataError


@pytest.fixture
def images(folder):
    folder.image("set/good.jpg")
    folder.raw("set/broken.jpg", b"this is no image")
    folder.image("outside.jpg")
    (folder.path / "set/link.jpg").symlink_to(folder.path / "outside.jpg")
    (folder.path / "set/folder.jpg").mkdir()
    (folder.path / "set/away").symlink_to(folder.path)
    return folder


def reasons(folder, rows, header=("image", "text"), **options) -> dict[str, str]:
    """Row -> reason, for a manifest of the rows given."""
    path = folder.csv("set/data.csv", [list(header), *rows])
    with pytest.raises(DataError) as error:
        read_records(path, **options)
    return {row.row: row.reason for row in error.value.bad_rows}


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("gone.jpg", "file not found in"),
        ("broken.jpg", "not an image that Pillow can read"),
        ("folder.jpg", "not a file"),
        ("../outside.jpg", "leads outside"),
        ("away/outside.jpg", "leads outside"),
        ("link.jpg", "leads outside"),
        ("..", "leads outside"),
        ("/etc/hostname", "leads outside"),
        ("x" * 5000 + ".jpg", "cannot be opened"),
        ("https://example.org/a.jpg", "file not found in"),
        ("", "no image"),
    ],
)
def test_image_paths(images, image, reason):
    found = reasons(images, [["good.jpg", "x"], [image, "y"]])
    assert list(found) == ["line 3"]
    assert found["line 3"].startswith(reason)


def test_links_that_stay_inside_are_followed(images):
    (images.path / "set/alias.jpg").symlink_to("good.jpg")
    records = read_records(
        images.csv("set/data.csv", [["image", "text"], ["good.jpg", "x"], ["alias.jpg", "y"]])
    )
    assert records.group.tolist() == [0, 0]


def test_a_name_that_begins_like_the_folder_is_outside_it(folder):
    folder.image("setting/a.jpg")
    assert reasons(folder, [["../setting/a.jpg", "x"]])["line 2"].startswith("leads outside")


@pytest.mark.parametrize(("text", "reason"), [("", "no text"), ("  \t ", "no text"), ("\u3000", "no text")])
def test_texts(images, text, reason):
    assert reasons(images, [["good.jpg", "x"], ["good.jpg", text]])["line 3"].startswith(reason)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"text": "x"}, "no image"),
        ({"image": None, "text": "x"}, "no image"),
        ({"image": 3, "text": "x"}, "image must be a path, found int"),
        ({"image": "a\0b.jpg", "text": "x"}, "cannot be opened"),
        ({"image": "good.jpg"}, "no text"),
        ({"image": "good.jpg", "text": ""}, "empty text"),
        ({"image": "good.jpg", "text": 5}, "text must be a string, found int 5"),
        ({"image": "good.jpg", "text": "\ud800 hi"}, "text is not valid Unicode: surrogates not allowed"),
        ({"image": "good.jpg", "text": []}, "no text"),
        ({"image": "good.jpg", "text": ["fine", " "]}, "empty text"),
        ({"note": "x"}, "neither image nor text"),
        ({"image": "good.jpg", "text": "y", "label": ["cat"]}, "label must be an integer"),
    ],
)
def test_values_of_json_lines(images, entry, reason):
    good = {"image": "good.jpg", "text": "x"} | {key: 1 for key in entry if key == "label"}
    path = images.text("set/data.jsonl", f"{json.dumps(good)}\n{json.dumps(entry)}\n")
    with pytest.raises(DataError) as error:
        read_records(path)
    assert [row.row for row in error.value.bad_rows] == ["line 2"]
    assert error.value.bad_rows[0].reason.startswith(reason)


@pytest.mark.parametrize("row", ["good.jpg,a \0 b", "good\0.jpg,y", "good.jpg,\0"])
def test_a_nul_byte_is_the_fault_of_its_row(images, row):
    path = images.raw("set/data.csv", f"image,text\ngood.jpg,x\n{row}\ngood.jpg,z\n".encode())
    with pytest.warns(UserWarning, match="1 of 3 rows"):
        records = read_records(path, errors="report")
    assert records.texts == ["x", "z"]
    assert [(bad.row, bad.reason) for bad in records.bad_rows] == [("line 3", "holds a NUL byte; remove it")]


def test_a_linked_image_folder_is_named_once_with_what_to_do(folder):
    folder.image("photos/a.jpg")
    for number in range(30):
        folder.image(f"photos/{number}.jpg")
    (folder.path / "set").mkdir()
    (folder.path / "set/images").symlink_to(folder.path / "photos")
    rows = [[f"images/{number}.jpg", "x"] for number in range(30)]
    path = folder.csv("set/data.csv", [["image", "text"], *rows, ["images/gone.jpg", "x"]])
    with pytest.raises(DataError, match="31 of 31 rows") as error:
        read_records(path)
    assert len(error.value.bad_rows) == 31
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    photos = os.path.realpath(folder.path / "photos")
    assert lines[1].startswith("  line 2: images/0.jpg: leads outside")
    assert f"is a symlink to {photos}" in lines[1]
    assert lines[1].endswith("(30 rows)")
    assert "line 32: images/gone.jpg: file not found" in lines[2]


def test_duplicate_and_missing_ids(images):
    rows = [["good.jpg", "x", "1"], ["good.jpg", "y", "2"], ["good.jpg", "z", "1"], ["good.jpg", "w", ""]]
    assert reasons(images, rows, ("image", "text", "id")) == {
        "line 4": "duplicate id '1', first in line 2",
        "line 5": "no id",
    }


@pytest.mark.parametrize("label", ["cat", "1.5", "9" * 30, "nan", "1_0"])
def test_labels(images, label):
    rows = [["good.jpg", "x", "1"], ["good.jpg", "y", label]]
    found = reasons(images, rows, ("image", "text", "label"))
    assert list(found) == ["line 3"]
    assert found["line 3"].startswith("label must be an integer, or in all rows a name, found")


@pytest.mark.parametrize("other", ["1", "dog"])
def test_a_label_that_is_not_there(images, other):
    rows = [["good.jpg", "x", other], ["good.jpg", "y", ""]]
    assert reasons(images, rows, ("image", "text", "label")) == {"line 3": "no label"}


def test_one_image_in_two_groups(images):
    rows = [["good.jpg", "x", "a"], ["good.jpg", "y", "b"]]
    found = reasons(images, rows, ("image", "text", "group"))
    assert found == {"line 3": "group 'b', but another row puts this image in 'a'"}


def test_the_message_lists_the_first_and_the_error_has_all(images):
    rows = [[f"gone{number}.jpg", "x"] for number in range(50)]
    path = images.csv("set/data.csv", [["image", "text"], ["good.jpg", "fine"], *rows])
    with pytest.raises(DataError, match=r"50 of 51 rows cannot be used") as error:
        read_records(path)
    lines = str(error.value).splitlines()
    assert lines[1].startswith("  line 3: gone0.jpg: file not found")
    assert len(lines) == MAX_LISTED + 3
    assert lines[-2] == "  ... and 30 more, all in the error's .bad_rows"
    assert len(error.value.bad_rows) == 50
    assert len(pickle.loads(pickle.dumps(error.value)).bad_rows) == 50


def test_report_leaves_bad_rows_out_and_keeps_account_of_them(images):
    path = images.csv(
        "set/data.csv", [["image", "text"], ["gone.jpg", "x"], ["good.jpg", "y"], ["good.jpg", " "]]
    )
    with pytest.warns(
        UserWarning, match=r"2 of 3 rows cannot be used and are left out.*line 2: gone.jpg"
    ) as caught:
        records = read_records(path, errors="report")
    assert len(caught) == 1
    assert os.path.basename(caught[0].filename) == os.path.basename(__file__)
    assert records.texts == ["y"]
    assert [row.row for row in records.bad_rows] == ["line 2", "line 4"]


def test_ids_do_not_change_when_another_row_is_mended(images):
    path = images.csv("set/data.csv", [["image", "text"], ["good.jpg", " "], ["good.jpg", "y"]])
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        before = read_records(path, errors="report")
    after = read_records(
        images.csv("set/data.csv", [["image", "text"], ["good.jpg", "x"], ["good.jpg", "y"]])
    )
    assert before.ids == after.ids[1:] == ["good.jpg#1"]


@pytest.mark.parametrize("errors", ["raise", "report"])
def test_nothing_left_is_an_error(images, errors):
    with pytest.raises(DataError, match="1 of 1 rows"):
        read_records(images.csv("set/data.csv", [["image", "text"], ["gone.jpg", "x"]]), errors=errors)
    with pytest.raises(DataError, match="no rows found"):
        read_records(images.csv("set/data.csv", [["image", "text"]]), errors=errors)


def test_one_modality_may_be_missing_when_allowed(images):
    rows = [["good.jpg", "x"], ["good.jpg", ""], ["", "y"]]
    records = read_records(
        images.csv("set/data.csv", [["image", "text"], *rows]), allow_missing_modality=True
    )
    assert records.texts == ["x", None, "y"]
    assert [path is None for path in records.image_paths] == [False, False, True]
    assert records.height.tolist() == [30, 30, 0]
    assert records.num_tokens.tolist() == [3, 0, 3]
    assert records.group.tolist() == [0, 0, 1]
    found = reasons(images, [["good.jpg", "x"], ["", ""]], allow_missing_modality=True)
    assert found == {"line 3": "neither image nor text"}


def test_a_whole_column_may_be_missing_when_allowed(images):
    path = images.csv("set/data.csv", [["text"], ["x"], ["y"]])
    assert read_records(path, allow_missing_modality=True).group.tolist() == [0, 1]
    with pytest.raises(DataError, match="no image column among text"):
        read_records(path)


@pytest.mark.parametrize("column", ["text", "id", "label"])
def test_half_a_pair_of_surrogates_is_refused_in_every_column(images, column):
    row = {"image": "good.jpg", "text": "x", "id": "1", "label": "a", column: "\ud800"}
    with pytest.raises(DataError, match=f"{column} .*is not valid Unicode"):
        read_records([row], images=images.path)


def test_a_file_name_that_is_not_utf_8_is_said_to_be_at_fault(images):
    name = images.image(os.fsdecode(b"caf\xe9.jpg"))
    with pytest.raises(DataError, match=r"the image's name\) is not valid Unicode.*in UTF-8"):
        read_records([name], ["A cat."])
