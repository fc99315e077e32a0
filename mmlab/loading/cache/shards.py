"""Shards: pairs of append-only files, `NAME.data` with the bytes of arrays and `NAME.index` with 64 bytes on each.

Every shard has one writer, which never changes what it has written, and any number of readers, which need no lock. The
data are written before their index entry: whatever a killed writer leaves behind without one is never read. An entry's
checksum covers the entry and its data, so that damage to either shows when it is read. Nothing is synced to the disk: a
power cut may cost records, which the checksum then reveals.
"""

from __future__ import annotations

import os
import re
import struct
import time
import uuid
import weakref
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<32sQQIII")  # digest, offset, bytes, shape
_CHECKSUM = struct.Struct("<I")
ENTRY_BYTES = (
    _HEAD.size + _CHECKSUM.size
)  # 64: no entry crosses a page, so a killed writer leaves none half written
ENTRIES = np.dtype(
    [("digest", "<u8", 4), ("offset", "<u8"), ("num_bytes", "<u8"), ("shape", "<u4", 3), ("checksum", "<u4")]
)
_ALIGNMENT_BYTES = 64
_TOUCH_EVERY_S = 10.0

Shape = tuple[int, int, int]


class ShardFiles(NamedTuple):
    """One shard in its folder, from outside."""

    used_ns: int  # when it was last read or written, since the epoch
    name: str
    num_bytes: int


class Damaged(Exception):
    """A record is not what was written; the message says where and how."""


class Shard:
    """A shard as its readers see it. Thread-safe."""

    def __init__(self, folder: Path, name: str, *, touch: bool = True) -> None:
        self.name = name
        self.num_known = 0  # entries that `new_keys` has given
        self._data = _File(folder / f"{name}.data")
        self._index = _File(folder / f"{name}.index")
        self._touched_s = -inf if touch else inf

    def new_keys(self) -> NDArray[np.uint64]:
        """First eight bytes of the digests of entries added since the last call."""
        entries = read_index(self._index.path, self.num_known)
        self.num_known += len(entries)
        return entries["digest"][:, 0]

    def read(
        self, number: int, digest: bytes | None = None, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], Shape]:
        """The bytes of one entry, checked where they came to lie, and its shape.

        Args:
            digest: of the sample that the entry must be of.
            out: contiguous memory for the bytes, taken where it has the entry's shape; new memory otherwise.

        Raises:
            Damaged: they are not what was written, or not of this digest; `out` may have been written to.
            OSError: the shard has been removed, or the disk fails.
        """
        entry = self._index.read(number * ENTRY_BYTES, ENTRY_BYTES)
        stored, offset, num_bytes, *sides = _HEAD.unpack_from(entry)
        if digest is not None and stored != digest:
            raise Damaged(f"{self._index.path}: entry {number} is of another sample")
        shape = (sides[0], sides[1], sides[2])
        if out is not None and (out.shape, out.nbytes) == (shape, num_bytes):
            data = out.reshape(num_bytes)
        else:
            self._data.check_end(offset + num_bytes)  # a damaged entry may ask for any amount of memory
            data = np.empty(num_bytes, np.uint8)
        self._data.read_into(data, offset)
        if _checksum(entry[: _HEAD.size], data) != _CHECKSUM.unpack_from(entry, _HEAD.size)[0]:
            raise Damaged(f"{self._data.path}: the checksum of entry {number} does not fit")
        self._touch()
        return data, shape

    def release(self) -> None:
        """Let go of the files; who is reading them may go on."""
        self._data.release()
        self._index.release()

    def _touch(self) -> None:
        """Note the use, for eviction, in the data file's modification time."""
        now_s = time.monotonic()
        if now_s - self._touched_s >= _TOUCH_EVERY_S:
            self._touched_s = now_s
            if os.access(self._data.path, os.W_OK):
                os.utime(self._data.path)


class ShardWriter:
    """The one writer of a new shard. Not thread-safe."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.name = f"{prefix}-{time.time_ns():016x}-{uuid.uuid4().hex[:8]}"  # in the order of their making
        self.num_bytes = 0  # of both files
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._data = os.open(folder / f"{self.name}.data", flags, 0o666)
        self._index = os.open(folder / f"{self.name}.index", flags, 0o666)

    def append(self, digest: bytes, array: NDArray) -> None:
        """Write one array of at most three dimensions.

        Raises:
            OSError: the disk is full, or the like; nothing may be appended any more.
        """
        payload = array.tobytes()
        shape = (1, 1, 1, *array.shape)[-3:]
        head = _HEAD.pack(digest, self._offset, len(payload), *shape)
        padded = payload.ljust(record_bytes(array) - ENTRY_BYTES, b"\0")
        _write(self._data, padded)
        _write(self._index, head + _CHECKSUM.pack(_checksum(head, payload)))
        self._offset += len(padded)
        self.num_bytes += record_bytes(array)

    def close(self) -> None:
        """Close both files."""
        os.close(self._data)
        os.close(self._index)


def record_bytes(array: NDArray) -> int:
    """What an array takes on the disk, with its entry."""
    return ENTRY_BYTES + array.nbytes + -array.nbytes % _ALIGNMENT_BYTES


def is_shard(path: Path) -> bool:
    """Whether the file's name is that of a part of a shard."""
    return re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}-[0-9a-f]{8}\.(data|index)", path.name) is not None


def list_shards(folder: Path) -> list[ShardFiles]:
    """Every shard of a folder, the least recently used first."""
    shards = []
    for path in folder.glob("*.data"):
        if not is_shard(path):
            continue
        try:
            data = path.stat()
        except FileNotFoundError:  # removed by another process just now
            continue
        num_bytes = data.st_size + index_bytes(path.with_suffix(".index"))
        shards.append(ShardFiles(data.st_mtime_ns, path.stem, num_bytes))
    return sorted(shards)


def remove_shard(folder: Path, name: str) -> None:
    """Remove a shard; who is reading it may go on."""
    for suffix in ("index", "data"):  # in this order: what is left by a kill between them is still listed
        (folder / f"{name}.{suffix}").unlink(missing_ok=True)


def read_index(path: Path, start: int = 0) -> NDArray[np.void]:
    """The entries of an index file from number `start` on, unchecked; empty where it is gone."""
    try:
        return np.fromfile(path, ENTRIES, offset=start * ENTRY_BYTES)
    except FileNotFoundError:
        return np.empty(0, ENTRIES)


def index_bytes(path: Path) -> int:
    """Size of an index file; a shard whose writer was killed at once, or that is being removed, has none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class _File:
    """A growing file, read at any place by any thread; opened when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: _Descriptor | None = None

    def read(self, start: int, num_bytes: int) -> bytes:
        content = os.pread(self._descriptor().number, num_bytes, start)
        if len(content) < num_bytes:
            raise self._ends_before(start + num_bytes)
        return content

    def read_into(self, memory: NDArray[np.uint8], start: int) -> None:
        """Fill contiguous memory. A mapped file costs as much, and kills the process where it was cut short."""
        if os.preadv(self._descriptor().number, [memory], start) < memory.nbytes:
            raise self._ends_before(start + memory.nbytes)

    def check_end(self, end: int) -> None:
        if os.fstat(self._descriptor().number).st_size < end:
            raise self._ends_before(end)

    def release(self) -> None:
        self._open = None

    def _ends_before(self, end: int) -> Damaged:
        return Damaged(f"{self.path} ends before byte {end}")

    def _descriptor(self) -> _Descriptor:
        descriptor = self._open
        if descriptor is None:
            self._open = descriptor = _Descriptor(self.path)
        return descriptor


class _Descriptor:
    """Of a file that is open for reading as long as anybody has this object."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


def _checksum(head: bytes, data: bytes | NDArray[np.uint8]) -> int:
    """The lower half of XXH3's 64 bits: 10 GB/s, where CRC-32 has 4."""
    state = xxhash.xxh3_64(head)
    state.update(data)
    return state.intdigest() & 0xFFFFFFFF


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
