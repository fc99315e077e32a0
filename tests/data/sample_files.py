"""Small real images and data files for the readers' tests."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image


def encoded(width: int = 40, height: int = 30, kind: str = "JPEG", **options: Any) -> bytes:
    """An image file's bytes, its colour drawn from its size."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, height % 256, 99)).save(file, kind, **options)
    return file.getvalue()


def turned(width: int, height: int) -> bytes:
    """A JPEG that is displayed with its sides swapped."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(width, height, exif=exif)


class Folder:
    """A data set in the making; the methods return the path that they wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def image(self, name: str, width: int = 40, height: int = 30, kind: str = "JPEG") -> Path:
        return self.raw(name, encoded(width, height, kind))

    def raw(self, name: str, content: bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def text(self, name: str, content: str) -> Path:
        return self.raw(name, content.encode())

    def json(self, name: str, content: object) -> Path:
        return self.text(name, json.dumps(content))

    def jsonl(self, name: str, entries: list[dict[str, Any]]) -> Path:
        return self.text(name, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))

    def csv(self, name: str, rows: list[list[str]], delimiter: str = ",") -> Path:
        file = io.StringIO()
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(rows)
        return self.text(name, file.getvalue())
