"""Manifests in every notation give the same records; wrong ones say which line and which column."""

from __future__ import annotations

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmlab.data.readers import read_records
from mmlab.data.readers.manifest import SYNONYMS
from mmlab.errors import DataError

HEADER = ["image", "text", "id", "label", "split", "group"]
ROWS = [
    ["a b.JPG", "a dog, running", "one", "0", "train", "x"],
    ["übung.png", "zwei Hunde", "two", "1", "val", "y"],
    ["sub/c.webp", 'the "third" one', "three", "1", "train", "x"],
]


@pytest.fixture
def images(folder):
    folder.image("a b.JPG", 40, 30)
    folder.image("übung.png", 20, 50, "PNG")
    folder.image("sub/c.webp", 64, 16, "WEBP")
    return folder


def write(folder, notation):
    entries = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    if notation in ("csv", "tsv", "pipe"):
        return folder.csv(
            f"data.{notation}", [HEADER, *ROWS], {"csv": ",", "tsv": "\t", "pipe": "|"}[notation]
        )
    if notation == "crlf with mark":
        folder.csv("data.csv", [HEADER, *ROWS])
        content = (folder.path / "data.csv").read_bytes().replace(b"\n", b"\r\n")
        return folder.raw("data.csv", b"\xef\xbb\xbf" + content)
    if notation == "spaced":
        lines = (
            '"' + '", "'.join(value.replace('"', '""') for value in row) + '"' for row in [HEADER, *ROWS]
        )
        return folder.text("data.csv", "\n".join(lines))
    if notation == "jsonl":
        return folder.jsonl("data.jsonl", entries)
    if notation == "json list":
        return folder.json("data.json", entries)
    path = folder.path / "data.parquet"
    pd.DataFrame(entries).to_parquet(path)
    return path


NOTATIONS = ("csv", "tsv", "pipe", "crlf with mark", "spaced", "jsonl", "json list", "parquet")


@pytest.mark.parametrize("notation", NOTATIONS)
def test_every_notation_gives_the_same_records(images, notation):
    records = read_records(write(images, notation))
    assert records.ids == ["one", "two", "three"]
    assert records.texts == [row[1] for row in ROWS]
    assert list(zip(records.height, records.width, strict=True)) == [(30, 40), (50, 20), (16, 64)]
    assert records.labels is not None
    assert records.labels.tolist() == [0, 1, 1]
    assert records.splits == ["train", "val", "train"]
    assert records.group.tolist() == [0, 1, 0]
    assert records.num_tokens.tolist() == [6, 4, 7]
    assert [len(records.read_image(row)) > 0 for row in range(3)] == [True] * 3


@pytest.mark.parametrize("notation", NOTATIONS)
def test_the_extension_does_not_matter(images, notation):
    path = write(images, notation)
    assert len(read_records(path.rename(path.with_suffix(".data")))) == 3


@pytest.mark.parametrize(
    "names", [("file_name", "caption"), ("Filepath", "Captions"), ("IMAGE NAME", "alt-text")]
)
def test_common_column_names_are_understood(folder, names):
    folder.image("a.jpg")
    assert read_records(folder.csv("data.csv", [list(names), ["a.jpg", "a dog"]])).texts == ["a dog"]


def test_every_synonym_is_recognised_alone(folder):
    folder.image("a.jpg")
    for name in SYNONYMS["text"].split():
        assert read_records(folder.csv("data.csv", [["image", name], ["a.jpg", "a dog"]])).texts == ["a dog"]
    for name in SYNONYMS["image"].split():
        assert read_records(folder.csv("data.csv", [[name, "text"], ["a.jpg", "a dog"]])).texts == ["a dog"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_unknown_column_is_named_with_those_found(folder, kind):
    if kind == "csv":
        path = folder.csv("data.csv", [["picture", "caption"], ["a.jpg", "x"]])
    else:
        path = folder.jsonl("data.jsonl", [{"picture": "a.jpg", "caption": "x"}])
    with pytest.raises(DataError, match=r"no image column among picture, caption.*Rename one"):
        read_records(path)


def test_several_captions_of_an_image_become_records_of_one_group(folder):
    folder.image("a.jpg")
    folder.image("b.jpg")
    entries = [{"image": "a.jpg", "captions": ["one", "two"]}, {"image": "b.jpg", "captions": ["three"]}]
    for path in (folder.jsonl("data.jsonl", entries), folder.json("data.json", entries)):
        records = read_records(path)
        assert records.texts == ["one", "two", "three"]
        assert records.group.tolist() == [0, 0, 1]
        assert records.ids == ["a.jpg#0", "a.jpg#1", "b.jpg#0"]


def test_rows_that_name_one_image_share_its_group_however_they_spell_it(folder):
    folder.image("a.jpg")
    records = read_records(folder.csv("data.csv", [["image", "text"], ["a.jpg", "x"], ["./a.jpg", "y"]]))
    assert records.group.tolist() == [0, 0]
    assert records.ids == ["a.jpg#0", "a.jpg#1"]


def test_line_numbers_count_lines_of_the_file(folder):
    folder.image("a.jpg")
    text = 'image,text\na.jpg,"two\nlines"\n\na.jpg,fine\ngone.jpg,"x"\na.jpg\n'
    for blank in ("", "\n \n"):  # lines before the header
        with pytest.raises(DataError) as error:
            read_records(folder.text("data.csv", blank + text))
        first = 6 + blank.count("\n")
        assert [row.row for row in error.value.bad_rows] == [f"line {first}", f"line {first + 1}"]
    assert "expected 2 fields as in the header, found 1" in str(error.value)


def test_unclosed_quotes_are_not_swallowed(folder):
    folder.image("a.jpg")
    with pytest.raises(DataError, match=r"line 3: .*double the quotes"):
        read_records(folder.text("data.csv", 'image,text\na.jpg,"open\na.jpg,next\n'))
    with pytest.raises(DataError, match=r"1 of 2 rows .*\n.*line 2: .*double the quotes"):
        read_records(folder.text("data.tsv", 'image\ttext\na.jpg\t"open\na.jpg\ta board of 5"\na.jpg\tx\n'))


def test_broken_json_lines_are_bad_rows(folder):
    folder.image("a.jpg")
    path = folder.text("data.jsonl", '{"image": "a.jpg", "text": "x"}\n\n{"image": \n[1]\n')
    with pytest.raises(DataError) as error:
        read_records(path)
    assert [row.row for row in error.value.bad_rows] == ["line 3", "line 4"]
    assert "not JSON" in error.value.bad_rows[0].reason
    assert "expected an object" in error.value.bad_rows[1].reason


def test_json_of_too_many_levels_is_a_bad_row(folder):
    folder.image("a.jpg")
    path = folder.jsonl("data.jsonl", [{"image": "a.jpg", "text": "x"}])
    path.write_text(path.read_text() + "[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(DataError) as error:
        read_records(path)
    assert [str(row).split(":")[0] for row in error.value.bad_rows] == ["line 2"]
    for start in ("[", '[{"image": "a.jpg", "text": '):
        with pytest.raises(DataError, match=r"data.json: not a format that mmlab reads"):
            read_records(folder.text("data.json", start + "[" * 100_000 + "]" * 100_000))


def test_a_date_in_parquet_that_python_has_not_is_refused(folder):
    table = pa.table({"image": ["a.jpg"], "text": ["x"], "group": pa.array([10**7], pa.date32())})
    pq.write_table(table, path := folder.path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet: .* date value out of range"):
        read_records(path)


def test_unicode_line_separators_do_not_break_json_lines(folder):
    folder.image("a.jpg")
    text = "before\u2028after\x85end"
    path = folder.text("data.jsonl", json.dumps({"image": "a.jpg", "text": text}, ensure_ascii=False) + "\n")
    assert read_records(path).texts == [text]


@pytest.mark.parametrize("notation", ["jsonl", "json"])
def test_the_first_row_may_be_long(folder, notation):
    folder.image("a.jpg")
    rows = [{"image": "a.jpg", "text": "é" * 500_000}, {"image": "a.jpg", "text": "x"}]
    assert len(read_records(getattr(folder, notation)("data.json", rows))) == 2


def test_text_that_is_not_utf8_is_refused_with_its_line(folder):
    with pytest.raises(DataError, match=r"line 2: not UTF-8"):
        read_records(folder.raw("data.csv", b"image,text\na.jpg,caf\xe9\n"))


def test_words_that_look_like_missing_values_are_texts(folder):
    folder.image("a.jpg")
    rows = [["a.jpg", word] for word in ("NA", "null", "nan", "None", "007")]
    assert read_records(folder.csv("data.csv", [["image", "text"], *rows])).texts == [
        "NA",
        "null",
        "nan",
        "None",
        "007",
    ]


def test_class_names_become_numbers_in_alphabetical_order(folder):
    folder.image("a.jpg")
    records = read_records(
        folder.csv("data.csv", [["image", "text", "label"], ["a.jpg", "x", "dog"], ["a.jpg", "y", "cat"]])
    )
    assert records.labels is not None
    assert records.labels.tolist() == [1, 0]
    assert records.label_names == ("cat", "dog")
    assert records[:1].label_names == ("cat", "dog")


def test_a_label_is_a_whole_number_as_it_is_written(folder):
    folder.image("a.jpg")
    rows = [["a.jpg", "x", "2.0"], ["a.jpg", "y", " -3"]]
    records = read_records(folder.csv("data.csv", [["image", "text", "label"], *rows]))
    assert records.labels is not None
    assert records.labels.tolist() == [2, -3]
    assert read_records(
        folder.csv("data.csv", [["image", "text", "label"], ["a.jpg", "x", "1_0"]])
    ).label_names == ("1_0",)


@pytest.mark.parametrize("missing", [float("nan"), pd.NA, pd.NaT])
def test_what_pandas_writes_for_a_missing_value_is_missing(folder, missing):
    good = {
        "image": folder.image("a.jpg"),
        "text": "x",
        "id": "1",
        "label": 4,
        "split": "train",
        "group": "g",
    }
    records = read_records([good | {"split": missing, "group": missing}])
    assert (records.splits, records.group.tolist()) == (None, [0])
    for column, reason in {
        "image": "no image",
        "text": "no text",
        "id": "no id",
        "label": "no label",
    }.items():
        with pytest.raises(DataError, match=f"1 of 2 rows(.|\n)*item 1: .*{reason}"):
            read_records([good, good | {"id": "2", column: missing}])


def test_class_numbers_do_not_depend_on_the_split(folder):
    folder.image("a.jpg")
    rows = [["a.jpg", "x", "ant", "train"], ["a.jpg", "y", "bee", "val"]]
    records = read_records(folder.csv("data.csv", [["image", "text", "label", "split"], *rows]), split="val")
    assert records.labels is not None
    assert records.labels.tolist() == [1]
    assert records.label_names == ("ant", "bee")


def test_a_column_named_twice_is_refused(folder):
    with pytest.raises(DataError, match="several columns are named 'text'"):
        read_records(folder.csv("data.csv", [["image", "text", "text"], ["a.jpg", "x", "y"]]))
    with pytest.raises(DataError, match="several columns are named '';"):
        read_records(folder.csv("data.csv", [["", "", "image", "text"], ["0", "0", "a.jpg", "x"]]))
    with pytest.raises(DataError, match="several columns are named 'Image', 'image';"):
        read_records(folder.csv("data.csv", [["image", "Image", "text"], ["a.jpg", "b.jpg", "x"]]))


def test_columns_that_a_spreadsheet_left_empty_at_the_end_are_none(folder):
    rows = [["image", "text", "", " "], ["a.jpg", "x", "", ""], ["a.jpg", "y"], ["a.jpg", "z", "", "lost?"]]
    folder.image("a.jpg")
    path = folder.csv("data.csv", rows)
    with pytest.raises(DataError, match="line 4: expected 2 fields as in the header, found 4"):
        read_records(path)
    assert [record.text for record in read_records(folder.csv("data.csv", rows[:-1]))] == ["x", "y"]


def test_text_that_is_not_in_utf_8_is_told_so(folder):
    path = folder.path / "data.csv"
    path.write_bytes("image,text\na.jpg,x\n".encode("utf-16"))
    with pytest.raises(DataError, match="is not text in UTF-8"):
        read_records(path)


def test_parquet_with_encoded_images_points_to_datasets(folder):
    path = folder.path / "data.parquet"
    pd.DataFrame({"image": [b"..."], "text": ["x"]}).to_parquet(path)
    with pytest.raises(
        DataError, match=r"column image holds binary, expected paths.*load_dataset.*save_to_disk"
    ):
        read_records(path)


def test_images_are_found_beside_in_the_usual_folders_or_where_told(folder, tmp_path):
    path = folder.csv("set/data.csv", [["image", "text"], ["a.jpg", "x"]])
    folder.image("elsewhere/a.jpg", 10, 10)
    assert read_records(path, images=tmp_path / "elsewhere").height.tolist() == [10]
    folder.image("set/images/a.jpg", 20, 20)
    assert read_records(path).height.tolist() == [20]
    folder.image("set/a.jpg", 30, 30)
    assert read_records(path).height.tolist() == [30]


def test_absolute_paths_inside_the_folder_are_allowed(folder):
    image = folder.image("images/a.jpg")
    (folder.path / "train").mkdir()
    records = read_records(folder.csv("train.csv", [["image", "text"], [str(image), "x"]]))
    assert records.image_paths == [str(image)]
