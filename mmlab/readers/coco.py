"""COCO captions: one JSON file of `images` and `annotations`, the images in a folder nearby.

Five captions an image become five records with the image's group. Read whole: 1 s for the 118,000 images of train2017.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

from mmlab.errors import DataError
from mmlab.readers.rows import Row


def why_not_coco(path: Path) -> str:
    """Why the file is not COCO captions; empty if it is. Searches the bytes: large files are not parsed twice."""
    with open(path, "rb") as file:
        if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
            return "does not begin with {"
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            missing = [key for key in (b'"images"', b'"annotations"', b'"caption"') if content.find(key) < 0]
    return f"has no {b', '.join(missing).decode()}" if missing else ""


def read_coco(path: Path) -> list[Row]:
    """One row for each annotation, in file order; its number is the record's id. An image without any gives one row.

    Rows have the `split` of their image, where it states one.

    Raises:
        DataError: not JSON, or without the two lists.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    for key in ("images", "annotations"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"{path}: COCO captions have a list {key!r}, found none")
    names = {image.get("id"): image.get("file_name") for image in content["images"]}
    splits = {image.get("id"): image.get("split") for image in content["images"]}
    rows = []
    for number, annotation in enumerate(content["annotations"]):
        image_id, problem = annotation.get("image_id"), ""
        if names.get(image_id) is None:
            problem = f"image_id {image_id!r} is not among the images"
        rows.append(
            Row(
                f"annotation {number}",
                names.get(image_id),
                annotation.get("caption"),
                id=str(annotation["id"]) if "id" in annotation else None,
                split=splits.get(image_id),
                problem=problem,
            )
        )
    captioned = {annotation.get("image_id") for annotation in content["annotations"]}
    rows += [
        Row(f"image {image_id}", name, None, split=splits[image_id])
        for image_id, name in names.items()
        if image_id not in captioned
    ]
    return rows
