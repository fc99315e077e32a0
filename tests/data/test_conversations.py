"""Conversations in the forms that people have them, and every way in which a row can be bad."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from mmlab.comparison.preparation import hold_out
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.errors import DataError, OptionError

ASKED = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
]
PARSED = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
    Image.new("L", (8, 9)).save(tmp_path / "b.jpg")
    (tmp_path / "broken.png").write_bytes(b"no image")
    return tmp_path


def check(talks: Conversations) -> None:
    assert talks.messages[0] == PARSED
    assert talks.image_sizes[0] == [(20, 30)]
    image = talks[0]["images"][0]
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (30, 20), (255, 0, 0))


def test_rows_are_chosen_by_number_or_by_a_mask(folder: Path) -> None:
    talks = read_conversations(
        [{"id": name, "image": str(folder / "a.png"), "conversations": ASKED} for name in "abc"]
    )
    assert talks.select([2, 0]).ids == ["c", "a"]
    assert talks.select([True, False, True]).ids == talks.select(np.array([1, 0, 1]) > 0).ids == ["a", "c"]
    assert talks.select([]).ids == []


def test_a_tokenizer_is_no_processor_for_conversations(folder: Path) -> None:
    talks = read_conversations([{"image": str(folder / "a.png"), "conversations": ASKED}])
    with pytest.raises(OptionError, match=r"expected the processor of a vision-language model, .* found str"):
        ConversationDataset(talks, "HuggingFaceTB/SmolVLM-256M-Instruct")


def test_transparency_is_laid_over_white(folder: Path) -> None:
    Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(folder / "clear.png")
    talks = read_conversations([{"image": str(folder / "clear.png"), "conversations": ASKED}])
    assert talks[0]["images"][0].getpixel((0, 0)) == (255, 255, 255)


def test_an_image_object_is_turned_upright_and_may_have_any_colours(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20), "red").save(folder / "turned.jpg", exif=exif)
    with Image.open(folder / "turned.jpg") as turned:
        images = [str(folder / "turned.jpg"), turned, Image.new("CMYK", (20, 30))]
        talks = read_conversations([{"image": image, "conversations": ASKED} for image in images])
    assert talks.image_sizes == [[(30, 20)]] * 3
    assert [talks[row]["images"][0].size for row in range(3)] == [(20, 30)] * 3
    assert talks[2]["images"][0].getpixel((0, 0)) == (255, 255, 255)


def test_an_image_object_that_cannot_be_read_is_a_bad_row(folder: Path) -> None:
    Image.effect_noise((300, 200), 50).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:2000])
    with Image.open(folder / "cut.jpg") as cut:
        for image, why in ((cut, "truncated"), (Image.new("F", (9, 9)), "mode F")):
            with pytest.raises(DataError, match=why):
                read_conversations([{"image": image, "conversations": ASKED}])


def test_an_orientation_after_the_pixels_counts_neither_in_planning_nor_in_decoding(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(folder / "turned.png", exif=exif)
    content = (folder / "turned.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    (folder / "late.png").write_bytes(content[:start] + content[end:-12] + content[start:end] + content[-12:])
    rows = [{"image": str(folder / name), "conversations": ASKED} for name in ("turned.png", "late.png")]
    talks = read_conversations(rows)
    assert talks.image_sizes == [[(30, 20)], [(20, 30)]]
    assert [talk["images"][0].size for talk in talks] == [(20, 30), (30, 20)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_an_image_that_becomes_a_pipe_is_refused_at_once(folder: Path) -> None:
    talks = read_conversations([{"image": "a.png", "conversations": ASKED}], images=folder)
    (folder / "a.png").unlink()
    os.mkfifo(folder / "a.png")
    with pytest.raises(OSError, match=r"not a regular file: .*a\.png"):
        talks[0]


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet", "list"])
def test_llava_in_every_container(form: str, folder: Path) -> None:
    rows = [{"id": "one", "image": "a.png", "conversations": ASKED}, {"id": "two", "conversations": [
        {"from": "user", "value": "Hello?"}, {"from": "assistant", "value": "Hello."}]}]  # fmt: skip
    path = folder / f"talks.{form}"
    if form == "json":
        path.write_text(json.dumps(rows))
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif form == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    talks = read_conversations(rows if form == "list" else path, images=folder if form == "list" else None)
    check(talks)
    assert talks.ids == ["one", "two"]
    assert talks.image_sizes[1] == []
    assert repr(talks).startswith("<2 conversations with 1 images from")


@pytest.mark.parametrize("inside", [True, False])
def test_messages_of_a_datasets_dataset(inside: bool, folder: Path) -> None:
    spoken = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]
    images = List(ImageFeature()) if inside else List(Value("string"))
    features = Features(
        {"messages": [{"role": Value("string"), "content": Value("string")}], "images": images}
    )
    rows = [{"messages": spoken, "images": [str(folder / "a.png")]}, {"messages": spoken, "images": []}]
    talks = read_conversations(Dataset.from_list(rows, features=features))
    check(talks)  # TRL: without placeholders images come before the first question
    assert talks.messages[1][0]["content"] == [{"type": "text", "text": "What?"}]


def test_messages_with_parts_system_and_images_that_parts_name(folder: Path) -> None:
    named = [{"role": "user", "content": [{"type": "image", "path": "a.png"}, "What?"]}, MESSAGES[2]]
    url = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"file://{folder / 'a.png'}"}},
                                        {"type": "text", "text": "What?"}]}, MESSAGES[2]]  # fmt: skip
    encoded = {"bytes": (folder / "a.png").read_bytes(), "path": None}
    picture = Image.open(folder / "a.png")
    question, answer = MESSAGES[1:2], MESSAGES[2:]
    rows: list[dict[str, Any]] = [
        {"messages": named}, {"messages": url}, {"messages": MESSAGES[1:], "images": encoded},
        {"messages": MESSAGES[1:], "image": picture}, {"prompt": question, "completion": answer, "images": ["a.png"]},
        {"messages": json.dumps(MESSAGES[1:]), "images": ["a.png"]},
    ]  # fmt: skip
    talks = read_conversations(rows, images=folder)
    for row in range(len(rows)):
        check(talks[row : row + 1])
    with_system = read_conversations([{"messages": MESSAGES, "images": ["a.png"]}], images=folder)
    assert with_system.messages[0][0] == {
        "role": "system",
        "content": [{"type": "text", "text": "Be short."}],
    }


def test_a_system_column_comes_first_and_what_is_not_to_be_learnt_is_marked(folder: Path) -> None:
    shots = [{"role": "user", "content": "One and one?"}, {"role": "assistant", "content": "Two."}]
    asked = [
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four.", "weight": 0},
    ]
    talks = read_conversations(
        [
            {"system": "Be short.", "conversations": ASKED, "image": str(folder / "a.png")},
            {"prompt": [*shots, asked[0]], "completion": "Four."},
            {"messages": [*asked, *shots]},
        ]
    )
    assert talks.messages[0][0] == {"role": "system", "content": [{"type": "text", "text": "Be short."}]}
    learnt = [
        ["".join(part["text"] for part in turn["content"]) for turn in own if turn.get("weight") != 0]
        for own in talks.messages[1:]
    ]
    assert learnt == [["One and one?", "Two and two?", "Four."], ["Two and two?", "One and one?", "Two."]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a.png", "conversations": [{"from": "human", "value": "What?"}, ASKED[1]]}, "0 <image> in the text and 1 images"),
        ({"conversations": ASKED}, "1 <image> in the text and 0 images"),
        ({"image": ["a.png", "b.jpg"], "conversations": ASKED}, "1 <image> in the text and 2 images"),
        ({"image": "a.png", "conversations": [ASKED[0], {"from": "gpt", "value": " \n"}]}, "turn 2: empty answer"),
        ({"image": "a.png", "conversations": ASKED[:1]}, "no answer"),
        ({"conversations": [{"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Hello."}]}, "no answer"),
        ({"image": "a.png", "conversations": [ASKED[0], {"from": "gpt", "value": "See <image>"}]}, "turn 2: an image in an answer"),
        ({"messages": MESSAGES, "image": "a.png", "tools": [{"name": "add"}]}, "tools are not read"),
        ({"messages": [*MESSAGES[:2], {**MESSAGES[2], "tool_calls": [{}]}], "image": "a.png"}, "turn 3: tool_calls is not read"),
        ({"messages": [*MESSAGES[:2], {**MESSAGES[2], "weight": 0}], "image": "a.png"}, "no answer"),
        ({"messages": [*MESSAGES[:2], {**MESSAGES[2], "weight": 0.5}], "image": "a.png"}, "weight of 0 or 1, found 0.5"),
        ({"image": "a.png", "conversations": [ASKED[0], {"from": "robot", "value": "x"}]}, "turn 2: unknown role 'robot'; known: human"),
        ({"image": "a.png", "conversations": [{"from": ["human"], "value": "x"}]}, "turn 1: unknown role ['human']; known: human"),
        ({"messages": [{"role": "user", "content": [5]}]}, "turn 1: a part of type 'int' cannot be read"),
        ({"prompt": 5, "completion": "x"}, "expected a list of turns, found 5"),
        ({"image": "a.png", "conversations": [ASKED[0], {"from": "gpt", "value": None}]}, "turn 2: no content or value, found None"),
        ({"conversations": [{"from": "human", "value": "\ud800"}, ASKED[1]]}, "turn 1: text is not valid Unicode"),
        ({"messages": [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, "turn 2: text is not valid"),
        ({"image": "a.png", "conversations": ["What?"]}, "turn 1: expected an object, found 'What?'"),
        ({"image": "a.png", "conversations": []}, "expected a list of turns, found []"),
        ({"image": "a.png", "conversations": "What?"}, "turns are not JSON"),
        ({"image": "gone.png", "conversations": ASKED}, "gone.png: file not found"),
        ({"image": "broken.png", "conversations": ASKED}, "not an image that Pillow can read"),
        ({"image": "../a.png", "conversations": ASKED}, "file not found"),
        ({"image": "https://example.org/a.png", "conversations": ASKED}, "is a URL; download it"),
        ({"image": 7, "conversations": ASKED}, "an image must be a path, bytes or a PIL image, found 7"),
        ({"image": [None], "conversations": ASKED}, "an image must be a path"),
        ({"image": "a.png", "text": "A cat."}, "no messages or conversations, found id, image, text"),
        ({"system": 5, "image": "a.png", "conversations": ASKED}, "turn 1: no content or value, found 5"),
        ({"conversations": "[" * 100_000}, "maximum recursion depth exceeded"),
        ({"image": "data:image/png;base64," + "A" * 10_000, "conversations": ASKED}, "AA is a URL; download it"),
        ({"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>"}, ASKED[1]]}, "only images are read"),
        ({"conversations": [{"from": "user", "value": "Picture 1: <img>a.png</img>\nWhat?"}, ASKED[1]]},
         "turn 1: holds <img>a.png</img>; only images are read, each at an <image>"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, MESSAGES[2]]}, "a part of type 'audio' cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, MESSAGES[2]], "images": ["a.png"]},
         "keep one of them"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_reason(row: dict[str, Any], reason: str, folder: Path) -> None:
    rows = [{"image": "a.png", "conversations": ASKED}, {"id": "bad", **row}]
    with pytest.raises(DataError) as caught:
        read_conversations(rows, images=folder)
    assert [bad.row for bad in caught.value.bad_rows] == ["item 1"]
    assert reason in str(caught.value)
    assert "id bad" in str(caught.value)
    with pytest.warns(UserWarning, match="1 of 2 rows cannot be used"):
        talks = read_conversations(rows, images=folder, errors="report")
    check(talks)
    assert len(talks.bad_rows) == 1


def test_an_id_of_0_a_path_object_an_empty_column_and_parts_of_a_system_turn_are_read(folder: Path) -> None:
    system = [{"type": "text", "text": "Be short."}]
    row = {"id": 0, "images": [], "image": folder / "a.png", "system": system, "conversations": ASKED}
    talks = read_conversations([row], images=folder)
    assert talks.ids == ["0"]
    assert talks.messages[0][0] == MESSAGES[0] | {"content": system}
    assert len(talks.images[0]) == 1


def test_rows_with_an_image_in_common_are_one_group(folder: Path) -> None:
    """Whichever place it has in them, and whether it is a file or bytes: none may be held out from the others."""
    for name in "cdef":
        Image.new("RGB", (5, 5 + ord(name))).save(folder / f"{name}.png")
    content = {"bytes": (folder / "e.png").read_bytes()}
    lists = [["a.png", "b.jpg"], ["b.jpg"], ["c.png"], ["d.png", "c.png"], [content], ["f.png", content], []]
    talks = [
        {
            "images": images,
            "conversations": [{"from": "human", "value": "<image>" * len(images) + "?"}, ASKED[1]],
        }
        for images in lists
    ]
    found = read_conversations(talks, images=folder)
    assert found.group.tolist() == [0, 0, 1, 1, 2, 2, 3]
    for seed in range(5):
        kept, held_out = found.hold_out(0.3, seed=seed)
        assert not {image for own in kept.images for image in own} & {
            image for own in held_out.images for image in own
        }


def test_a_stated_split_is_held_out_and_not_trained_on(folder: Path) -> None:
    splits = ["train", "VAL", "train", None, "val", "test", "test"]
    asked = [{"from": "human", "value": "What?"}, ASKED[1]]
    rows = [{"id": str(row), "split": split, "conversations": asked} for row, split in enumerate(splits)]
    talks = read_conversations(rows)
    assert talks.splits == splits
    trained, held_out = hold_out(talks)
    assert (trained.ids, held_out.ids) == (["0", "2", "3"], ["1", "4"])


def test_broken_files_and_options_are_named(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(
        json.dumps({"image": "a.png", "conversations": ASKED}) + "\n{oops\n[1]\n"
    )
    with pytest.raises(DataError, match="line 2: not JSON"):
        read_conversations(folder / "talks.jsonl")
    (folder / "talks.json").write_text("[{]")
    with pytest.raises(DataError, match=r"talks.json: not JSON"):
        read_conversations(folder / "talks.json")
    (folder / "talks.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="neither JSON nor JSON Lines nor Parquet"):
        read_conversations(folder / "talks.csv")
    with pytest.raises(DataError, match="no such file"):
        read_conversations(folder / "none.json")
    with pytest.raises(DataError, match="cannot read conversations from int"):
        read_conversations(7)
    (folder / "blank.jsonl").write_text("\n")
    for empty in ([], folder / "blank.jsonl"):
        with pytest.raises(DataError, match="no rows found"):
            read_conversations(empty)
    for images in (folder / "none", 5):
        with pytest.raises(OptionError, match="not a folder"):
            read_conversations([], images=images)
    with pytest.raises(OptionError, match="errors="):
        read_conversations([], errors="ignore")
