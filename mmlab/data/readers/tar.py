"""WebDataset shards: tar files in which `key.jpg` with `key.txt`, `key.json` or `key.cls` makes one sample.

Shards stay packed: they are indexed by their headers, and an image is read at its offset, in any order. Does not read
compressed shards, which have no offsets to jump to.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from mmlab.data.readers.files import split_in
from mmlab.data.readers.manifest import SYNONYMS, match_columns, rows_of_entry
from mmlab.data.readers.rows import Row, Table
from mmlab.data.readers.sidecar import Stamp
from mmlab.data.readers.tar_index import Member, is_tar, members
from mmlab.errors import DataError

_IMAGE_SUFFIXES = frozenset(["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2"])
_TEXT_SUFFIXES = ("txt", "text", "caption")
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZ": "bunzip2",
    b"\xfd7": "unxz",
    b"\x28\xb5": "unzstd",
}  # first bytes: remedy


class TarStore:
    """Images inside tar files; the key is `SHARD::MEMBER@OFFSET+BYTES`. Opens the shard for each read."""

    def read(self, image_path: str) -> bytes:
        """The image's bytes.

        Raises:
            OSError: the shard is gone or has become shorter.
        """
        shard, offset, num_bytes = _locate(image_path)
        with open(shard, "rb", buffering=0) as file:
            file.seek(offset)
            content = file.read(num_bytes)
        if len(content) < num_bytes:
            raise OSError(f"{shard} ends before byte {offset + num_bytes}")
        return content

    def file_of(self, image_path: str) -> str:
        """The shard that holds an image."""
        return _locate(image_path)[0]


def read_shards(shards: Sequence[Path]) -> Table:
    """One row for each caption of each sample, shards in the order given; file or folder names tell the split.

    Raises:
        DataError: a file that is not a tar archive.
    """
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}: no such file")
        if not is_tar(shard):
            with open(shard, "rb") as file:
                command = _COMPRESSED.get(file.read(2))
            raise DataError(
                f"{shard}: not a tar shard: "
                + (
                    f"compressed files allow no random access: {command} it"
                    if command
                    else "it has no tar header (image files go with their texts: read_records(image_paths, texts))"
                )
            )
    root = Path(os.path.commonpath([os.path.realpath(shard.parent) for shard in shards]))

    @cache
    def stamp_of_shard(shard: str) -> Stamp:
        status = os.stat(shard)
        return status.st_size, status.st_mtime_ns

    return Table(
        rows=[row for shard in shards for row in _rows_of_shard(shard, root)],
        root=root,
        store=TarStore(),
        stamp=lambda key: stamp_of_shard(_locate(key)[0]),
        open_image=_open_image,
    )


def _rows_of_shard(shard: Path, root: Path) -> Iterator[Row]:
    path = os.path.realpath(shard)
    split = split_in(shard.stem) or split_in(shard.parent.name)
    name = os.path.relpath(os.path.join(os.path.realpath(shard.parent), shard.name), root).replace(
        os.sep, "/"
    )
    samples: dict[str, dict[str, Member]] = {}
    damage = ""
    try:
        for member in members(shard):
            folder, slash, base = member.name.removeprefix("./").rpartition("/")
            stem, _, suffix = base.partition(".")
            if stem and not stem.startswith("__"):  # hidden files and webdataset's own notes are no samples
                parts = samples.setdefault(folder + slash + stem, {})
                if suffix.lower() in parts:
                    damage = damage or f"two members are named {member.name}"
                parts[suffix.lower()] = member
    except DataError as error:
        damage = f"the archive {error}"
    with open(shard, "rb") as file:
        for key, parts in samples.items():
            entry = _entry(file, parts)
            if isinstance(entry, dict):
                image = _image_of(parts)
                place = None if image is None else f"{path}::{image.name}@{image.offset}+{image.num_bytes}"
                entry |= {"image": place, "id": f"{name}/{key}", "split": entry.get("split") or split}
            yield from rows_of_entry(f"{name}: {key}", entry, {column: column for column in SYNONYMS})
    if damage:
        yield Row(name, None, None, problem=damage)


def _image_of(parts: Mapping[str, Member]) -> Member | None:
    """The sample's image: `jpg` before a compound suffix such as `small.jpg`."""
    suffixes = [suffix for suffix in parts if suffix.rpartition(".")[2] in _IMAGE_SUFFIXES]
    return parts[min(suffixes, key=lambda suffix: suffix.count("."))] if suffixes else None


def _entry(file: BinaryIO, parts: Mapping[str, Member]) -> dict[str, Any] | str:
    """What a sample's small files say, by column, or why one of them cannot be read."""

    def content(suffix: str) -> str:
        file.seek(parts[suffix].offset)
        return file.read(parts[suffix].num_bytes).decode("utf-8-sig").strip()

    entry: dict[str, Any] = {}
    try:
        if "json" in parts:
            stated = json.loads(content("json"))
            if isinstance(stated, dict):
                entry = {column: stated[name] for column, name in match_columns(stated).items()}
        for suffix in _TEXT_SUFFIXES:
            if suffix in parts:
                entry["text"] = content(suffix)
        if "cls" in parts:
            entry["label"] = content("cls")
    except ValueError as error:  # not UTF-8, not JSON
        return f"metadata cannot be read: {error}"
    return entry


def _locate(key: str) -> tuple[str, int, int]:
    before, _, place = key.rpartition("@")
    offset, num_bytes = place.split("+")
    return before.partition("::")[0], int(offset), int(num_bytes)


def _open_image(key: str) -> BinaryIO:
    return io.BufferedReader(_Window(*_locate(key)))


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own, so that only a header's bytes are read."""

    def __init__(self, path: str, offset: int, num_bytes: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the window)
        self._offset, self._num_bytes, self._position = offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._position)
        left = max(0, self._num_bytes - self._position)
        num_read = self._file.readinto(memoryview(buffer)[:left]) or 0
        self._position += num_read
        return num_read

    def close(self) -> None:
        self._file.close()
        super().close()
