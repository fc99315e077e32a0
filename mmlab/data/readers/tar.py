"""WebDataset shards: tar files in which `key.jpg` with `key.txt`, `key.json` or `key.cls` makes one sample.

Shards stay packed: `tarfile` finds where each member lies (about 20 us per member), and images are read at
their offsets, in any order. Does not read compressed shards, which have no offsets to jump to.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any, BinaryIO, NamedTuple

from mmlab.data.readers.files import IMAGE_SUFFIXES, split_in
from mmlab.data.readers.manifest import SYNONYMS, decompressor, match_columns, rows_of_entry
from mmlab.data.readers.rows import Row, Table
from mmlab.data.readers.sidecar import stamp_of
from mmlab.data.records import read_bytes
from mmlab.errors import DataError

_TEXT_SUFFIXES = ("txt", "text", "caption")


class Member(NamedTuple):
    """A regular file in an archive: `num_bytes` bytes from `offset`."""

    name: str
    offset: int
    num_bytes: int


class TarStore:
    """Images inside tar files; the key is `SHARD::MEMBER@OFFSET+BYTES`. Opens the shard for each read."""

    def read(self, image_path: str) -> bytes:
        """The image's bytes.

        Raises:
            OSError: the shard is gone or has become shorter.
        """
        shard, offset, num_bytes = self.part_of(image_path)
        content = read_bytes(shard, offset, num_bytes)
        if len(content) < num_bytes:
            raise OSError(f"{shard} ends before byte {offset + num_bytes}")
        return content

    @staticmethod
    def part_of(image_path: str) -> tuple[str, int, int]:
        """The shard that holds an image, its offset there, and its number of bytes."""
        before, _, place = image_path.rpartition("@")
        offset, num_bytes = place.split("+")
        return before.rpartition("::")[0], int(offset), int(num_bytes)  # a folder's name may have ::


def named_shards(pattern: str) -> list[str]:
    """The shards that a range of numbers in braces names, as webdataset writes it; without one, the pattern itself.

    >>> named_shards("https://host/{08..10}.tar")
    ['https://host/08.tar', 'https://host/09.tar', 'https://host/10.tar']
    """
    if (found := re.search(r"\{(\d+)\.\.(\d+)\}", pattern)) is None:
        return [pattern]
    first, last = found.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in named_shards(pattern.replace(found[0], number, 1))]


def is_tar(path: Path) -> bool:
    """Whether the file begins with a tar header, its check sum included."""
    try:
        with tarfile.open(path, "r:") as archive:
            return archive.next() is not None
    except (tarfile.TarError, ValueError):
        return False


def members(path: Path) -> Iterator[Member]:
    """The regular files of an archive, in order, and the links to those before them.

    Raises:
        DataError: the archive is damaged, ends early, or has sparse files or other links; those before the fault are
            given first.
    """
    num_bytes, known = path.stat().st_size, dict[str, Member]()
    with tarfile.open(path, "r:") as archive:
        while (info := _next(archive)) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
            if info.issparse():
                raise DataError(f"has a sparse file at byte {info.offset}; pack it again without --sparse")
            if info.size < 0 or info.offset_data + (info.size if info.isreg() else 0) > num_bytes:
                raise DataError(f"is cut off or damaged: a file of {info.size} bytes at byte {info.offset}")
            member = Member(info.name, info.offset_data, info.size) if info.isreg() else None
            if info.islnk() or info.issym():
                member = known.get(normpath(join(dirname(info.name) if info.issym() else "", info.linkname)))
                if member is None:
                    raise DataError(
                        f"has a link at byte {info.offset} to {info.linkname}, which is not an earlier file of the archive; pack it again "
                        "with tar --dereference"
                    )
            if member is not None:
                known[normpath(info.name)] = member = member._replace(name=info.name)
                yield member
        archive.fileobj.seek(archive.offset)
        if any(archive.fileobj.read(tarfile.BLOCKSIZE)):  # a whole archive ends in zeros
            raise DataError(f"is damaged at byte {archive.offset}: no tar header there")


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return archive.next()
    except Exception as error:  # tarfile and its decoding of numbers raise many things on damaged headers
        raise DataError(f"is damaged at byte {archive.offset}: {error}") from error


def read_shards(shards: Sequence[Path]) -> Table:
    """One row for each caption of each sample, in the order given; file or folder names give the split.

    Raises:
        DataError: a file that is not a tar archive.
    """
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}: no such file")
        if is_tar(shard):
            continue
        reason = "it has no tar header (image files go with their texts: read_records(image_paths, texts))"
        if command := decompressor(shard):
            reason = f"compressed files allow no random access: {command} it"
        raise DataError(f"{shard}: not a tar shard: {reason}")
    root = Path(os.path.commonpath([os.path.realpath(shard.parent) for shard in shards]))
    stamp_of_shard = cache(stamp_of)
    return Table(
        rows=[row for shard in shards for row in _rows_of_shard(shard, root)],
        root=root,
        store=TarStore(),
        find=lambda key: (key, stamp_of_shard(TarStore.part_of(key)[0])),
        open_image=_open_image,
    )


def _rows_of_shard(shard: Path, root: Path) -> Iterator[Row]:
    path = os.path.realpath(shard)
    split = split_in(shard.stem) or split_in(shard.parent.name)
    name = os.path.relpath(Path(os.path.realpath(shard.parent), shard.name), root).replace(os.sep, "/")
    samples: dict[str, dict[str, Member]] = {}
    damage, repeated = "", dict[str, str]()  # of a key: what is wrong
    try:
        for member in members(shard):
            folder, slash, base = member.name.removeprefix("./").rpartition("/")
            stem, _, suffix = base.partition(".")
            if stem and not stem.startswith("__"):  # hidden files and webdataset's own notes are no samples
                parts = samples.setdefault(key := folder + slash + stem, {})
                if suffix.lower() in parts:
                    repeated.setdefault(key, f"two members are named {member.name}")
                parts[suffix.lower()] = member
    except DataError as error:
        damage = f"the archive {error}"
    with open(shard, "rb") as file:
        for key, parts in samples.items():
            entry = repeated.get(key) or _entry(file, parts)
            if isinstance(entry, dict):
                suffixes = [suffix for suffix in parts if suffix.rpartition(".")[2] in IMAGE_SUFFIXES]
                # `jpg` before a compound suffix such as `small.jpg`
                image = parts[min(suffixes, key=lambda suffix: suffix.count("."))] if suffixes else None
                place = image and f"{path}::{image.name.replace('::', ':')}@{image.offset}+{image.num_bytes}"
                entry |= {"image": place, "id": f"{name}/{key}", "split": entry.get("split") or split}
            yield from rows_of_entry(f"{name}: {key}", entry, {column: column for column in SYNONYMS})
    if damage:
        yield Row(name, None, None, problem=damage)


def _entry(file: BinaryIO, parts: Mapping[str, Member]) -> dict[str, Any] | str:
    """The values of a sample's small files, by column, or why one of them cannot be read."""

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
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        return f"metadata cannot be read: {error}"
    return entry


@contextmanager
def _open_image(key: str) -> Iterator[BinaryIO]:
    """An image as a file of its own, so that only the bytes of its header are read."""
    shard, offset, num_bytes = TarStore.part_of(key)
    with tarfile.open(shard, "r:") as archive:
        info = tarfile.TarInfo()
        info.offset_data, info.size = offset, num_bytes
        yield archive.extractfile(info)  # type: ignore[misc]  # a regular file has one
