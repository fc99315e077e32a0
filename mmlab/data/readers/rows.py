"""Turns the rows of any format into checked `Records`.

Every format yields one `Table` of `Row`s; all checks are here, once: paths, image headers, texts, labels,
ids, groups. A row that fails becomes a `BadRow`; none vanishes. Costs one `lstat` per image, and reading its
header the first time (`sidecar`). Does not decode: a file that is damaged after its header is found only in
training.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmlab.data.readers.sidecar import OpenImage, Stamp, image_sizes
from mmlab.data.records import BadRow, FileStore, ImageStore, Records, connected_groups
from mmlab.data.text import estimate_num_tokens
from mmlab.errors import DataError, OptionError

MAX_LISTED = 20  # bad rows that a message spells out; `error.bad_rows` has all


# maps an image as a row names it to the store's key and its stamp, or to why it cannot be used
Find = Callable[[str], tuple[str, Stamp | None] | str]


def open_file(path: str) -> BinaryIO:
    """Open an image that is a file."""
    return open(path, "rb")


@dataclass(slots=True)
class Row:
    """One image-text pair as the data set states it, unchecked; `None` is a missing value."""

    where: str  # how the user finds it: "line 17"
    image: str | None
    text: object
    id: str | None = None
    label: object = None
    split: str | None = None
    group: object = None
    problem: str = ""  # what the format's reader found wrong
    sample: object = None  # a value that the rows of a sample with several images share


@dataclass(slots=True, kw_only=True)
class Table:
    """All rows of a data set, and where its images are kept.

    For image files, `root` is the folder that they must be inside, None if the caller named each file. Any
    other store puts its own keys into `Row.image`, and sets `find` and `open_image` to measure them.
    """

    rows: list[Row]
    root: Path | None = None
    store: ImageStore = field(default_factory=FileStore)
    find: Find | None = None
    open_image: OpenImage = open_file
    label_names: tuple[str, ...] = ()  # of labels that are integers already


def to_records(
    table: Table,
    *,
    source: str,
    split: str | None = None,
    errors: str = "raise",
    progress: bool = True,
    allow_missing_modality: bool = False,
) -> Records:
    """Check every row and measure every image.

    Raises:
        DataError: bad rows under errors="raise"; no usable row at all; no such split.
    """
    _fill_ids(table.rows)
    rows = [row for row in table.rows if split in (None, row.split)]
    if split is not None and not rows:
        known = ", ".join(sorted({row.split for row in table.rows if row.split})) or "none"
        raise DataError(f"{source}: no split {split!r}; known: {known}")
    problems = (row.problem or _what_is_missing(row, allow_missing_modality) for row in rows)
    reasons = {index: problem for index, problem in enumerate(problems) if problem}
    images, stamps = _find_images(table, rows, reasons)
    measured = image_sizes(stamps, table.open_image, root=table.root, progress=progress)
    for index, image in images.items():
        if isinstance(outcome := measured[image], str):
            reasons.setdefault(index, outcome)
    labels, label_names = _read_labels(table.rows, rows, reasons)
    _check_repeats(rows, images, reasons)

    bad_rows = tuple(BadRow(rows[n].where, rows[n].image or "", reasons[n]) for n in sorted(reasons))
    report_bad_rows(bad_rows, len(rows), source, errors, "read_records")
    good = [index for index in range(len(rows)) if index not in reasons]
    texts = [None if rows[index].text is None else str(rows[index].text) for index in good]
    sizes = np.array([measured[images[index]] if index in images else (0, 0) for index in good], np.int32)
    return Records(
        ids=[str(rows[index].id) for index in good],
        image_paths=[images.get(index) for index in good],
        texts=texts,
        height=np.ascontiguousarray(sizes[:, 0]),
        width=np.ascontiguousarray(sizes[:, 1]),
        num_tokens=np.array([estimate_num_tokens(text) for text in texts], dtype=np.int32),
        group=_number_groups([(rows[index], images.get(index)) for index in good]),
        labels=None if labels is None else np.array([labels[index] for index in good], dtype=np.int64),
        label_names=label_names or table.label_names,
        splits=[rows[index].split for index in good] if any(row.split for row in rows) else None,
        store=table.store,
        bad_rows=bad_rows,
        source=source,
    )


def _fill_ids(rows: list[Row]) -> None:
    """Give rows without an id one made of their image and their number among its rows: `cats/1.jpg#0`."""
    seen: Counter[str] = Counter()
    for row in rows:
        if row.id is None:
            image = os.path.normpath(row.image).replace(os.sep, "/") if row.image else ""
            row.id = f"{image}#{seen[image]}"
            seen[image] += 1


def _what_is_missing(row: Row, allow_missing_modality: bool) -> str:
    """What is missing or wrong in a row's values; empty if nothing is."""
    if row.text is None and row.image is None:
        return "neither image nor text"
    if row.text is None and not allow_missing_modality:
        return "no text (allow_missing_modality=True keeps image-only rows)"
    if row.image is None and not allow_missing_modality:
        return "no image (allow_missing_modality=True keeps text-only rows)"
    if row.text is not None and not isinstance(row.text, str):
        return f"text must be a string, found {type(row.text).__name__} {row.text!r:.40}"
    if row.text is not None and not row.text.strip():
        return "empty text"
    if not isinstance(row.split, str | None):
        return f"split must be a string, found {row.split!r:.40}"
    of_id = "id (by default the image's name)"
    stated = {"text": row.text, of_id: row.id, "label": row.label, "split": row.split}
    return next(filter(None, (why_not_unicode(str(value), name) for name, value in stated.items())), "")


def why_not_unicode(text: str, name: str = "text") -> str:
    """Why a text cannot be stored: it has an unpaired surrogate. Empty if it can."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not valid Unicode: {error.reason}, found {text[error.start]!a}; write the whole character, in UTF-8"
    return ""


def _find_images(
    table: Table, rows: list[Row], reasons: dict[int, str]
) -> tuple[dict[int, str], dict[str, Stamp | None]]:
    """The store's key of every usable row's image, and each distinct key's stamp."""
    find = table.find or FileResolver(table.root)
    images: dict[int, str] = {}
    stamps: dict[str, Stamp | None] = {}
    for index, row in enumerate(rows):
        if index in reasons or row.image is None:
            continue
        if isinstance(found := find(row.image), str):
            reasons[index] = found
        else:
            images[index], stamps[found[0]] = found
    return images, stamps


def _read_labels(
    all_rows: list[Row], rows: list[Row], reasons: dict[int, str]
) -> tuple[list[int] | None, tuple[str, ...]]:
    """Labels as integers. A column without a single integer holds class names, numbered in alphabetical order.

    Rows of all splits are considered, so that a class has the same number in each.
    """
    stated = [row.label for row in all_rows if row.label is not None]
    if not stated:
        return None, ()
    names: dict[object, int] = {}
    if all(isinstance(label, str) and _as_integer(label) is None for label in stated):
        names = {name: number for number, name in enumerate(sorted(set(map(str, stated))))}
    labels = [names.get(row.label) if names else _as_integer(row.label) for row in rows]
    for index, label in enumerate(labels):
        if label is None:
            found = rows[index].label
            wrong = f"label must be an integer, or in all rows a name, found {found!r:.40}"
            reasons.setdefault(index, "no label" if found is None else wrong)
    return [label or 0 for label in labels], tuple(map(str, names))


def _as_integer(value: object) -> int | None:
    """The whole number that a label stands for, also written as 2.0, if it fits 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.integer) or "_" in str(value):
        return None
    try:
        number = int(value.strip().removesuffix(".0") if isinstance(value, str) else value)
    except (ValueError, OverflowError):  # words, not a number, infinity
        return None
    return number if (isinstance(value, str) or number == value) and -(2**63) <= number < 2**63 else None


def _check_repeats(rows: list[Row], images: dict[int, str], reasons: dict[int, str]) -> None:
    first_row: dict[str | None, Row] = {}
    group_of_image: dict[str, object] = {}
    for index, row in enumerate(rows):
        if index in reasons:
            continue
        if (first := first_row.setdefault(row.id, row)) is not row:
            reasons[index] = f"duplicate id {row.id!r}, first in {first.where}"
        elif index in images and group_of_image.setdefault(images[index], row.group) != row.group:
            other = group_of_image[images[index]]
            reasons[index] = f"group {row.group!r}, but another row puts this image in {other!r}"


def _number_groups(owners: list[tuple[Row, str | None]]) -> np.ndarray:
    """Group numbers: by stated group, else by shared image or sample; other rows get their own."""

    def keys(row: Row, image: str | None) -> list[tuple[str, object]]:
        if row.group is not None:
            return [("stated", row.group)]
        return [key for key in (("image", image), ("sample", row.sample)) if key[1] is not None]

    return connected_groups([keys(row, image) for row, image in owners])


def _listed(bad_rows: tuple[BadRow, ...]) -> list[str]:
    """A line for each of the first rows; the rows behind one symlink share a line."""
    causes: dict[object, list[BadRow]] = {}
    for number, row in enumerate(bad_rows):
        causes.setdefault(row.reason if "symlink" in row.reason else number, []).append(row)
    shown = list(causes.values())[:MAX_LISTED]
    lines = [f"  {rows[0]}" + (f" ({len(rows)} rows)" if len(rows) > 1 else "") for rows in shown]
    if rest := len(bad_rows) - sum(map(len, shown)):
        lines.append(f"  ... and {rest} more, all in the error's .bad_rows")
    return lines


def report_bad_rows(
    bad_rows: tuple[BadRow, ...], num_rows: int, source: str, errors: str, reader: str
) -> None:
    """Raise a DataError that lists bad rows, or warn of them under errors="report"; it names `reader`."""
    if not num_rows:
        raise DataError(f"{source}: no rows found")
    if not bad_rows:
        return
    listed = _listed(bad_rows)
    summary = f"{source}: {len(bad_rows)} of {num_rows} rows cannot be used"
    if errors == "raise" or len(bad_rows) == num_rows:
        skip = f"Fix them, or skip them: by {reader}(..., errors='report'), in a run or on the command line by the option skip_bad_rows."
        remedy = skip if errors == "raise" else "Nothing is left to read."
        raise DataError("\n".join([f"{summary}:", *listed, remedy]), bad_rows=bad_rows)
    warnings.warn(f"{summary} and are left out; they are in .bad_rows, first {bad_rows[0]}", stacklevel=4)


def image_folder(images: str | Path) -> Path:
    """The folder that `images=` names.

    Raises:
        OptionError: there is none.
    """
    if isinstance(images, str | os.PathLike) and (folder := Path(images).expanduser()).is_dir():
        return folder
    raise OptionError(f"images={images}: not a folder")


class FileResolver:
    """Turns a path as written into the real path of a file inside `root`, in about one `lstat`.

    In the Hugging Face hub's cache, where a snapshot's files are links into the repository's `blobs/`, those count as
    inside.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else os.path.realpath(root)
        allowed = [""] if self.root is None else [self.root, *_blobs_of(self.root)]
        self._inside = tuple(folder and os.path.join(folder, "") for folder in allowed)
        self._folders: dict[str, str] = {}  # as written -> real

    def __call__(self, name: str) -> tuple[str, Stamp] | str:
        """The real path and its stamp, or why the file cannot be used."""
        folder, base = os.path.split(os.path.join(self.root or "", name))
        try:
            if folder not in self._folders:
                self._folders[folder] = os.path.realpath(folder)
            path = os.path.join(self._folders[folder], base)
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):  # a symbolic link, "..", a folder
                path = os.path.realpath(path)
                status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            if not isinstance(error, FileNotFoundError):
                return f"cannot be opened: {error}"
            where = f" in {self.root} (the option images says where the images are)" if self.root else ""
            return f"file not found{where}"
        if not path.startswith(self._inside):
            return f"leads outside {self.root} {self._way_out(name)}"
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        return path, (status.st_size, status.st_mtime_ns)

    def _way_out(self, name: str) -> str:
        """The symlink by which a path leaves the root, and what to do about it."""
        assert self.root is not None
        place = Path(self.root, name)
        for link in reversed([place, *place.parents]):
            if link.is_symlink() and link.is_relative_to(self.root):
                return (
                    f"({link} is a symlink to {os.path.realpath(link)}: put the images themselves there, or name them "
                    "relative to their real folder and give it by the option images)"
                )
        return "(the option images names another folder)"


def _blobs_of(root: str) -> list[str]:
    """`REPO/blobs` of a folder in `REPO/snapshots/REVISION`; none of any other folder."""
    snapshots = (folder for folder in Path(root).parents if folder.name == "snapshots")
    return [str(blobs) for folder in snapshots if (blobs := folder.parent / "blobs").is_dir()]
