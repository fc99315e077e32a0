"""Which format a file has, what a folder holds, and where the images of a data file are."""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from mmlab.data.readers.coco import read_coco, why_not_coco
from mmlab.data.readers.flickr import read_flickr, why_not_flickr
from mmlab.data.readers.manifest import decode_text, decompressor, read_manifest, why_not_manifest
from mmlab.data.readers.rows import Row, Table
from mmlab.errors import DataError

_DATA_SUFFIXES = (".csv", ".tsv", ".txt", ".token", ".json", ".jsonl", ".ndjson", ".parquet")
IMAGE_SUFFIXES = frozenset(["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2"])
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # of a Hugging Face imagefolder
_SPLIT_NAME = re.compile(r"(?:^|[^a-z])(train|validation|valid|val|dev|eval|test)(?![a-z])")
_MAX_BLANKS = 1 << 16  # bytes of the largest file that is searched for anything else
_SHOWN = 3  # files of which an error says why they are no data files
_NUM_TRIED = 50  # images that are looked for in each folder
_IMAGE_FOLDERS = [
    *("", "images", "Images"),
    *map("".join, product(["", "images/"], ["train", "val", "test"], ["", "2017", "2014"])),
    *("flickr30k-images", "flickr30k_images", "Flicker8k_Dataset", "Flickr8k_Dataset"),
]


Reader = Callable[[Path, bool], list[Row]]  # the flag is `allow_missing_modality`
# for each format: why a file does not have it (empty if it does), and its reader
FILE_FORMATS: dict[str, tuple[Callable[[Path, bool], str], Reader]] = {
    "COCO captions": (why_not_coco, read_coco),
    "Flickr token file": (why_not_flickr, read_flickr),
    "manifest": (why_not_manifest, read_manifest),
}


def recognise(path: Path, allow_missing_modality: bool) -> tuple[Reader | None, str]:
    """The reader of a data file or, in words, why each format does not fit."""
    reasons = []
    for name, (why_not, read) in FILE_FORMATS.items():
        reason = "it has no rows" if _is_empty(path) else why_not(path, allow_missing_modality)
        if not reason:
            return read, ""
        reasons.append(f"\n  {path.name}, as {name}: {reason}")
    return None, "".join(reasons)


def _is_empty(path: Path) -> bool:
    """Whether a file holds nothing but blanks, or an empty JSON list."""
    is_short = path.stat().st_size <= _MAX_BLANKS
    return is_short and b"".join(path.read_bytes().removeprefix(BOM_UTF8).split()) in (b"", b"[]")


def read_data_file(path: Path, images: Path | None, allow_missing_modality: bool) -> Table:
    """The rows of one data file, and the folder of its images."""
    read, tried = recognise(path, allow_missing_modality)
    if read is None:
        if _is_empty(path):
            raise DataError(f"{path}: no rows found")
        if command := decompressor(path):
            raise DataError(f"{path}: compressed files are not read: {command} it")
        raise DataError(
            f"{path}: not a format that mmlab reads (docs/internals/data_formats.md lists them). Tried:{tried}"
        )
    rows = read(path, allow_missing_modality)
    return Table(rows=rows, root=images or find_images(path, rows))


def find_images(path: Path, rows: Sequence[Row]) -> Path:
    """The folder of a data file's images: of the usual folders, the one with most of the first images;
    among equals, one with the same split in its name. Searched for in the file's folder and, if that is
    `annotations/`, beside it.
    """
    relative = (row.image for row in rows if row.image and not os.path.isabs(row.image))
    names = list(dict.fromkeys(relative))[:_NUM_TRIED]
    if not names:
        return path.parent
    above = [path.parent, path.parent.parent] if path.parent.name == "annotations" else [path.parent]
    places = [found for folder in above for name in _IMAGE_FOLDERS if (found := folder / name).is_dir()]
    split = split_in(path.stem)

    def likeness(place: Path) -> tuple[int, bool]:
        return sum(os.path.exists(place / name) for name in names), split_in(place.name) == split

    return max(places, key=likeness)


def split_in(name: str) -> str | None:
    """The split that a file or folder name contains.

    >>> split_in("captions_val2017"), split_in("validate_me")
    ('val', None)
    """
    match = _SPLIT_NAME.search(name.lower())
    return match[1] if match else None


def data_files(folder: Path, allow_missing_modality: bool) -> tuple[dict[Path, str | None], list[str]]:
    """The data files of a folder, each with its split; and why other files are none.

    A Hugging Face imagefolder has a metadata file in the folder, or one in each split's sub-folder; any other
    folder has one data file at its top or in `annotations/`, or one for each split, with the split in its
    name.

    Raises:
        DataError: several without a way to choose.
    """
    found: dict[Path, str | None] = {}
    for place in [folder, *sorted(sub for sub in folder.iterdir() if sub.is_dir())]:
        name = next((name for name in _METADATA if (place / name).is_file()), None)
        if name is not None:
            found[place / name] = None if place == folder else split_in(place.name)
    if found:
        return found, []
    tried: list[str] = []
    for place in (folder, folder / "annotations"):
        paths = sorted(place.glob("*"))
        images = {path.stem for path in paths if _is_image(path)}
        for path in paths:
            is_data = path.suffix.lower() in _DATA_SUFFIXES and not path.name.startswith(".")
            is_of_image = path.suffix.lower() in (".txt", ".json") and path.stem in images
            if is_data and not is_of_image and path.is_file():
                read, reasons = recognise(path, allow_missing_modality)
                tried.append(reasons)
                if read is not None:
                    found[path] = split_in(path.stem)
    if len(found) > 1 and len(set(found.values()) - {None}) < len(found):
        raise DataError(f"{folder}: several data files, pass one: {', '.join(path.name for path in found)}")
    return found if len(found) > 1 else dict.fromkeys(found), tried


def read_folder(folder: Path, images: Path | None, allow_missing_modality: bool) -> Table:
    """The rows of a folder's data files, or else of its images with captions beside them; image names become relative to
    the folder (to `images` if given).

    Raises:
        DataError: it has neither.
    """
    files, tried = data_files(folder, allow_missing_modality)
    rows = [] if files else read_captions(folder)
    if not files and not rows:
        more = f"\n  and {len(tried) - _SHOWN} more files" if len(tried) > _SHOWN else ""
        raise DataError(
            f"{folder}: no image-text data found. Looked for tar shards, a saved datasets.Dataset, "
            f"{', '.join(_METADATA)} here and in sub-folders, a data file ({' '.join(_DATA_SUFFIXES)}) here and in "
            f"annotations/, and images with captions beside them (a.jpg and a.txt).{''.join(tried[:_SHOWN])}{more}"
        )
    for path, split in files.items():
        part = read_data_file(path, images, allow_missing_modality)
        above = os.path.relpath(part.root or folder, folder) if images is None else "."
        for row in part.rows:
            row.split = row.split or split
            if row.image is not None and above != ".":
                row.image = os.path.join(above, row.image)
        rows += part.rows
    return Table(rows=rows, root=images or folder)


def read_captions(folder: Path) -> list[Row]:
    """A row for each image and the text file beside it, `a.jpg` and `a.txt`, here and below; none if no image has one.

    An image or a text without the other has a row, too; hidden files and folders have none. The folders' names may have
    the split.
    """
    images: list[Path] = []
    texts: dict[Path, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if name.suffix.lower() == ".txt":
            texts[name.with_suffix("")] = name
        elif _is_image(name):
            images.append(name)
    with_image = {name.with_suffix("") for name in images}
    if with_image.isdisjoint(texts):
        return []
    rows = [_captioned(folder, name, texts.get(name.with_suffix(""))) for name in images]
    return rows + [_captioned(folder, None, texts[stem]) for stem in texts if stem not in with_image]


def _captioned(folder: Path, image: Path | None, text: Path | None) -> Row:
    name = image or text
    assert name is not None
    split = next(filter(None, map(split_in, name.parts[:-1])), None)
    row = Row(str(name), None if image is None else str(image), None, split=split)
    try:
        row.text = None if text is None else decode_text(folder / text).strip()
    except DataError as error:
        row.problem = str(error)
    return row


def _is_image(path: Path) -> bool:
    return path.suffix[1:].lower() in IMAGE_SUFFIXES
