"""Flickr30k and Flickr8k token files: `name.jpg#0<TAB>caption`, one caption per line."""

from __future__ import annotations

import re
from pathlib import Path

from mmlab.data.readers.manifest import decode_text
from mmlab.data.readers.rows import Row

_LINE = re.compile(r"([^\t]+)#(\d+)\t(.*)")


def why_not_flickr(path: Path, allow_missing_modality: bool) -> str:
    """Why the file is not a token file; empty if it is. Looks at its first line only."""
    with open(path, "rb") as file:
        first = file.readline(4096).decode("utf-8-sig", errors="replace")
    return "" if _LINE.match(first) else "its first line is not name.jpg#0<TAB>caption"


def read_flickr(path: Path, allow_missing_modality: bool) -> list[Row]:
    """One row per line; `name.jpg#0` is the record's id."""
    rows = []
    for number, line in enumerate(decode_text(path).split("\n"), start=1):
        if match := _LINE.fullmatch(line.rstrip("\r")):
            name, caption_number, caption = match.groups()
            rows.append(Row(f"line {number}", name, caption, id=f"{name}#{caption_number}"))
        elif line.strip():
            problem = f"expected name.jpg#0<TAB>caption, found {line.strip():.40}"
            rows.append(Row(f"line {number}", None, None, problem=problem))
    return rows
