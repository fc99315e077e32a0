"""COCO captions: one JSON file of `images` and `annotations`, the images in a folder nearby.

The five captions of an image become five records of one group. The file is read whole: 1 s for the 118,000
images of train2017.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from mmlab.data.readers.rows import Row
from mmlab.errors import DataError


def why_not_coco(path: Path, allow_missing_modality: bool) -> str:
    """Why the file is not COCO captions; empty if it is. Searches the bytes: large files are not parsed twice."""
    with open(path, "rb") as file:
        if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
            return "does not begin with {"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            missing = [key for key in (b'"images"', b'"annotations"', b'"caption"') if content.find(key) < 0]
    return f"has no {b', '.join(missing).decode()}" if missing else ""


def read_coco(path: Path, allow_missing_modality: bool) -> list[Row]:
    """One row for each annotation, in file order; its number is the record's id. An image without any gives one row.

    Rows have the `split` of their image, where it states one.

    Raises:
        DataError: not JSON, or without the two lists.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    for key in ("images", "annotations"):
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: COCO captions have a list of objects named {key!r}, found none")
    images: dict[str, dict[str, Any]] = {}
    ambiguous: dict[str, str] = {}  # image id -> what is wrong with it
    for image in content["images"]:
        image_id, name = str(image.get("id")), image.get("file_name")
        if (first := images.setdefault(image_id, image).get("file_name")) != name:
            both = f"image id {image_id} stands for {first!r:.80} and {name!r:.80}"
            ambiguous.setdefault(image_id, f"{both}; give each image an id of its own")
    without_caption = dict(images)
    rows = []
    for number, annotation in enumerate(content["annotations"]):
        image_id = annotation.get("image_id")
        image = {} if image_id is None else images.get(str(image_id), {})
        row = _row(f"annotation {number}", image, annotation.get("caption"), ambiguous)
        row.id = str(annotation["id"]) if "id" in annotation else None
        if image:
            without_caption.pop(str(image_id), None)
        else:
            row.problem = f"image_id {image_id} is not among the images"
        rows.append(row)
    alone = without_caption.items()
    return [*rows, *(_row(f"image {image_id}", image, None, ambiguous) for image_id, image in alone)]


def _row(where: str, image: dict[str, Any], caption: object, ambiguous: dict[str, str]) -> Row:
    name = image.get("file_name")
    no_path = "" if isinstance(name, str) else f"file_name must be a path, found {name!r:.40}"
    problem = ambiguous.get(str(image.get("id")), no_path)
    return Row(where, None if no_path else name, caption, split=image.get("split"), problem=problem)
