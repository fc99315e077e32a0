"""Conversations about images, for fine-tuning: read and checked, with their images measured.

Three forms are understood, in JSON, JSON Lines, Parquet, a `datasets.Dataset` or a list of dicts: `conversations` of LLaVA
and ShareGPT (`from`, `value`), `messages` of Hugging Face and TRL (`role`, `content`), and TRL's `prompt` with
`completion`. Only image headers are read, no pixel is decoded; memory use is that of the texts.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mmlab.data.decode import as_displayed, opened, orientation_of, to_rgb
from mmlab.data.readers.hub import as_stored, is_dataset
from mmlab.data.readers.manifest import SYNONYMS, decode_text, is_parquet, numbered, parquet_file, read_json
from mmlab.data.readers.rows import FileResolver, image_folder, open_file, report_bad_rows, why_not_unicode
from mmlab.data.readers.sidecar import Size, Stamp, image_sizes
from mmlab.data.records import BadRow, FileStore, Grouped, connected_groups
from mmlab.errors import DataError, check_name

PLACEHOLDER = "<image>"  # in a text: where the next image belongs
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system",
}  # fmt: skip
_TURNS = ("messages", "conversations", "conversation")
_IMAGES = ("images", "image")
_PART_IMAGE = ("image", "path", "url", "image_url")  # where a part of a message may name its image

Message = dict[str, Any]  # {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}


@dataclass(frozen=True, slots=True)
class _Image:
    """One image as its row states it: a path, or encoded bytes."""

    path: str
    content: bytes | None = None

    def read(self) -> bytes:
        return FileStore().read(self.path) if self.content is None else self.content


_Parsed = tuple[list[Message], tuple[_Image, ...]]  # of one row


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversations(Grouped, Sequence[dict[str, Any]]):
    """N checked conversations; `conversations[row]` decodes the row's images, for a DataLoader's workers.

    An item is `{"messages": [...], "images": [...]}`: messages in the form of Hugging Face's chat templates, with one part
    `{"type": "image"}` for each image, and the images as `PIL.Image`, in RGB and upright.
    """

    ids: list[str]
    messages: list[list[Message]]
    images: list[tuple[_Image, ...]]  # of each row, in the order of their placeholders
    image_sizes: list[list[Size]]  # (height, width) in pixels, of each
    splits: list[Any]  # as the rows state them; None where they do not
    bad_rows: tuple[BadRow, ...] = ()  # rows left out under errors="report"
    source: str = ""

    def __repr__(self) -> str:
        return f"<{len(self)} conversations with {sum(map(len, self.images))} images from {self.source}>"

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.select(range(*row.indices(len(self))))
        images = [decode(image.read()) for image in self.images[row]]
        return {"messages": self.messages[row], "images": images}

    @property
    def image_paths(self) -> list[str | None]:
        """The path of each row's first image; None without an image or a path."""
        return [own[0].path or None if own else None for own in self.images]

    @property
    def group(self) -> NDArray[np.int64]:
        """(N,) group numbers: rows linked by shared images, even through other rows, share one."""
        return connected_groups(self.images)

    def _columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("ids", "messages", "images", "image_sizes", "splits")}


def read_conversations(
    source: Any, *, images: str | Path | None = None, errors: str = "raise", progress: bool = True
) -> Conversations:
    """Read conversations about images from a file, a `datasets.Dataset`, or a list of dicts.

    `<image>` in a text is where the next image of the row belongs. Rows of `messages`, or of `prompt` and
    `completion`, may leave it out: their images then come before the first question, as in TRL. A part of a
    message may name its image itself.

    Args:
        source: JSON (a list), JSON Lines, Parquet, a `datasets.Dataset`, or a list of dicts.
        images: the folder that image paths are relative to; None takes the file's own, or the working folder
            where there is no file.
        errors: `"raise"` lists every bad row; `"report"` leaves them out, warns, and keeps them in `.bad_rows`.
        progress: show a bar while image headers are read, on stderr.

    Raises:
        DataError: an unknown format, or bad rows (all of them in the error's `.bad_rows`).
        OptionError: `images` is no folder, or another word for `errors`.
    """
    check_name("errors=", errors, ("raise", "report"))
    entries, root, name = _entries(source, None if images is None else image_folder(images))
    reasons: dict[int, str] = {}
    parsed: dict[int, _Parsed] = {}
    for number, (_, entry) in enumerate(entries):
        try:
            parsed[number] = _parse(entry)
        except (OSError, ValueError, RecursionError) as error:  # OSError: a PIL image that is cut off
            reasons[number] = str(error)
    sizes = _measure(parsed, reasons, root, progress)
    ids = [_first(entry, ("id", "question_id")) for _, entry in entries]
    shown = ["" if name is None else str(name) for name in ids]
    bad_rows = tuple(
        BadRow(entries[row][0], shown[row] and f"id {shown[row]}", reasons[row]) for row in sorted(reasons)
    )
    report_bad_rows(bad_rows, len(entries), name, errors, "read_conversations")
    good = [row for row in parsed if row not in reasons]
    return Conversations(
        ids=[shown[row] or entries[row][0] for row in good],
        messages=[parsed[row][0] for row in good],
        images=[sizes[row][0] for row in good],
        image_sizes=[sizes[row][1] for row in good],
        splits=[_first(entries[row][1], SYNONYMS["split"].split()) for row in good],
        bad_rows=bad_rows,
        source=name,
    )


def _entries(source: Any, folder: Path | None) -> tuple[list[tuple[str, Any]], Path | None, str]:
    """The rows, each with its location; the folder of their images; a name for error messages."""
    if is_dataset(source):
        return list(numbered(_undecoded(source), "row")), folder, "dataset"
    if isinstance(source, list | tuple):
        return list(numbered(source)), folder, "a list"
    if not isinstance(source, str | os.PathLike):
        raise DataError(
            f"cannot read conversations from {type(source).__name__}: pass a file, a datasets.Dataset or a list of dicts"
        )
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file; conversations are read from JSON, JSON Lines or Parquet")
    root = path.parent if folder is None else folder
    if is_parquet(path):
        with parquet_file(path) as table:
            return list(numbered(table.read().to_pylist(), "row")), root, str(path)
    text = decode_text(path)
    if text.lstrip()[:1] not in ("[", "{", ""):
        raise DataError(f"{path}: neither JSON nor JSON Lines nor Parquet")
    return list(read_json(text, path)), root, str(path)


def _undecoded(dataset: Any) -> Any:
    """The same `datasets.Dataset` with images as they are stored."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise DataError(f"cannot plan a {type(dataset).__name__}: choose a split, load it without streaming")
    dataset = dataset.with_format(None)
    for name in dataset.features:
        dataset = as_stored(dataset, name)
    return dataset


def _parse(entry: Any) -> _Parsed:
    """Messages and images of a row.

    Raises:
        ValueError: what is wrong with it.
    """
    if isinstance(entry, str):
        raise ValueError(entry)
    turns = _turns_of(entry)
    if entry.get("tools"):
        raise ValueError("tools are not read")
    if entry.get("system"):
        turns = [{"role": "system", "content": entry["system"]}, *turns]
    images = next(filter(None, (_listed_images(entry.get(name)) for name in _IMAGES)), [])
    messages, own = [], []
    for number, turn in enumerate(turns, 1):
        message, named = _message(turn, f"turn {number}")
        messages.append(message)
        own += named
    num_places = count_images(messages)
    if own and images:
        raise ValueError("images are named in the messages and in a column of their own; keep one of them")
    images = images or own
    # of these forms, only LLaVA's must say where images belong
    is_llava = "messages" not in entry and _first(entry, _TURNS) is not None
    if not num_places and images and not is_llava:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is not None:
            first["content"][:0] = [{"type": "image"} for _ in images]
            num_places = len(images)
    if num_places != len(images):
        found = f"{num_places} {PLACEHOLDER} in the text and {len(images)} images"
        raise ValueError(f"{found}; every image needs its place, and every place its image")
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages[1:]):
        raise ValueError("no answer (a turn of gpt or assistant after another one), so nothing to learn")
    return messages, tuple(images)


def _turns_of(entry: dict[str, Any]) -> list[Any]:
    """The turns of a row, also of `prompt` and `completion`, of which the prompt is not learnt."""
    turns = _first(entry, _TURNS)
    if turns is None and "prompt" in entry and "completion" in entry:
        asked = _turns(entry["prompt"], "user")
        asked = [{**turn, "weight": 0} if isinstance(turn, dict) else turn for turn in asked]
        turns = [*asked, *_turns(entry["completion"], "assistant")]
    if turns is None:
        found = ", ".join(map(str, entry)) or "nothing"
        raise ValueError(f"no {' or '.join(_TURNS[:2])}, found {found}")
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError as error:
            raise ValueError(f"turns are not JSON: {error}") from error
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a list of turns, found {turns!r:.40}")
    return turns


def _message(turn: Any, where: str) -> tuple[Message, list[_Image]]:
    """A turn in the form of chat templates, and the images that it names itself."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: expected an object, found {turn!r:.40}")
    role, content = _first(turn, ("role", "from")), _first(turn, ("content", "value"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r:.40}; known: {', '.join(ROLES)}")
    if keys := [key for key in ("tool_calls", "reasoning_content") if turn.get(key)]:
        raise ValueError(f"{where}: {keys[0]} is not read; write it into the text as the template does")
    if not isinstance(content, str | list):
        raise ValueError(f"{where}: no content or value, found {content!r:.40}")
    parts: list[dict[str, str]] = []
    images: list[_Image] = []
    for part in [content] if isinstance(content, str) else content:
        part = {"text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            parts += _split(part["text"])
        elif kind in ("image", "image_url"):
            parts.append({"type": "image"})
            if (item := _first(part, _PART_IMAGE)) is not None:
                images += _listed_images(item["url"] if isinstance(item, dict) and "url" in item else item)
        else:
            raise ValueError(f"{where}: a part of type {kind!r:.40} cannot be read; text and image can")
    if problem := why_not_unicode("".join(part.get("text", "") for part in parts)):
        raise ValueError(f"{where}: {problem}")
    if unread := re.search("<video>|<audio>|<img>[^<>]+</img>", str(content)):
        raise ValueError(f"{where}: holds {unread[0]:.80}; only images are read, each at an {PLACEHOLDER}")
    is_answer = ROLES[role] == "assistant"
    if is_answer and not any(part.get("text", "").strip() for part in parts):
        raise ValueError(f"{where}: empty answer")
    if is_answer and {"type": "image"} in parts:
        raise ValueError(f"{where}: an image in an answer; answers are texts")
    if turn.get("weight") not in (None, 0, 1):
        raise ValueError(f"{where}: expected a weight of 0 or 1, found {turn['weight']!r:.40}")
    weight = {"weight": 0} if is_answer and turn.get("weight") == 0 else {}
    return {"role": ROLES[role], "content": parts, **weight}, images


def _split(text: str) -> list[dict[str, str]]:
    """The parts of a text with placeholders; line breaks beside a placeholder are left to the template."""
    parts: list[dict[str, str]] = []
    pieces = text.split(PLACEHOLDER)
    for number, piece in enumerate(pieces):
        if number:
            parts.append({"type": "image"})
        if len(pieces) > 1:
            piece = piece.strip("\n")
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _listed_images(value: Any) -> list[_Image]:
    """One image or a list of them, as paths, bytes, `{"bytes", "path"}`, or `PIL.Image`."""
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, list | tuple):
        return [image for item in value for image in _listed_images(item if item is not None else 0)]
    if isinstance(value, dict) and value.keys() & {"path", "bytes"}:
        if content := value.get("bytes"):
            return [_Image(str(value.get("path") or ""), content)]
        return _listed_images(value.get("path") or 0)
    if isinstance(value, bytes):
        return [_Image("", value)]
    if isinstance(value, str | os.PathLike):
        value = os.fspath(value)
        if value.startswith("data:") or ("://" in value and not value.startswith("file://")):
            raise ValueError(f"image {value:.80} is a URL; download it, and name the file")
        return [_Image(value.removeprefix("file://"))]
    if hasattr(value, "save") and hasattr(value, "size"):  # a PIL.Image
        encoded, upright = io.BytesIO(), ImageOps.exif_transpose(value)  # PNG loses EXIF
        (upright if upright.mode == "F" else to_rgb(upright)).save(encoded, "PNG")
        return [_Image("", encoded.getvalue())]
    raise ValueError(f"an image must be a path, bytes or a PIL image, found {value!r:.40}")


def _measure(
    parsed: dict[int, _Parsed], reasons: dict[int, str], root: Path | None, progress: bool
) -> dict[int, tuple[tuple[_Image, ...], list[Size]]]:
    """Each row's images, with the paths of their files, and their sizes; failures go into `reasons`."""
    find, stamps = FileResolver(root), dict[str, Stamp | None]()
    keyed: dict[int, list[tuple[str, _Image]]] = {}
    inside: dict[str, bytes] = {}
    for row, (_, images) in parsed.items():
        keyed[row] = []
        for place, image in enumerate(images):
            if image.content is not None:
                key = f"{row}#{place}"
                inside[key], stamps[key] = image.content, None
            elif isinstance(found := find(image.path), str):
                reasons[row] = f"{image.path}: {found}"
                break
            else:
                key, stamps[key] = found
                image = _Image(key)
            keyed[row].append((key, image))

    def open_image(key: str) -> Any:
        return io.BytesIO(inside[key]) if key in inside else open_file(key)

    measured: dict[str, Any] = image_sizes(stamps, open_image, root=root, progress=progress)
    rows = {}
    for row, own in keyed.items():
        if wrong := [f"{key}: {measured[key]}" for key, _ in own if isinstance(measured[key], str)]:
            reasons.setdefault(row, wrong[0])
        if row not in reasons:
            rows[row] = tuple(image for _, image in own), [measured[key] for key, _ in own]
    return rows


def count_images(messages: Sequence[Message]) -> int:
    """Number of images in these messages."""
    return sum(part["type"] == "image" for message in messages for part in message["content"])


def decode(image: bytes) -> Any:
    """An encoded image as `PIL.Image`, in RGB and upright; transparency is laid over white, as in images of pairs."""
    with opened(io.BytesIO(image)) as found:
        orientation = orientation_of(found)  # before decoding, which would find EXIF after the pixels too
        pixels = np.asarray(to_rgb(found))
    return Image.fromarray(as_displayed(pixels, orientation))


def _first(entry: Any, names: Sequence[str]) -> Any:
    """The first of these values that is not None."""
    values = (entry.get(name) for name in names) if isinstance(entry, dict) else ()
    return next((value for value in values if value is not None), None)


def _turns(value: Any, role: str) -> list[Any]:
    if not isinstance(value, str | list | tuple | None):
        raise ValueError(f"expected a list of turns, found {value!r:.40}")
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value or [])
