"""The slot file: a place for every image, fixed before the first is decoded.

    front    magic, lengths and a checksum; the settings as JSON; (S, 2) heights and widths
    table    S entries of 32 bytes: what the image was decoded from, a checksum of that and the pixels, a done flag
    slots    the pixels, (3, h, w) uint8 each

Front and offsets follow from the key alone: any process that opens the file writes the front if it is
missing, so that processes need no lock. A writer clears the old entry, writes the pixels, and then the new
entry: a process that is killed at any moment leaves a slot without an entry, which nobody reads. Two writers
of one slot write the same bytes, or the checksum shows that they did not. The file is sparse: it has its full
length at once and takes disk space as slots are written. Nothing is synced to the disk: a power cut may cost
images, which the checksum reveals.
"""

from __future__ import annotations

import json
import os
import re
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

SUFFIX = ".slots"
_MAGIC = b"mmlab slot file\n"
_HEAD = struct.Struct("<16sQQQ")  # magic, bytes of the settings, number of slots, checksum of both
_ENTRY = struct.Struct("<16sQQ")  # source, checksum, done: 32 bytes never cross a page
_VERIFIED_EVERY = 64
_PAGE, _LINE = 4096, 64  # the table begins with a page, each slot with a line of the processor's cache


class Damaged(Exception):
    """A part of the file is not what was written; the message says where and how."""


class Layout:
    """Where everything lies in a slot file: a pure function of the settings and the images' shapes."""

    def __init__(self, settings: dict[str, str], shapes: NDArray[np.int64]) -> None:
        self.settings, self.shapes = settings, shapes
        text = json.dumps(settings, sort_keys=True).encode()
        content = text + shapes.astype("<u4").tobytes()
        self.front = _HEAD.pack(_MAGIC, len(text), len(shapes), xxhash.xxh3_64_intdigest(content)) + content
        self._table = _rounded(len(self.front), _PAGE)
        num_bytes = _rounded(3 * shapes.prod(axis=1), _LINE)
        first = _rounded(self._table + _ENTRY.size * len(shapes), _PAGE)
        self.starts = first + np.concatenate(([0], np.cumsum(num_bytes)))  # (S + 1,) of slots, and the end

    def entry(self, slot: int) -> int:
        """Where a slot's entry begins."""
        return self._table + _ENTRY.size * slot

    @staticmethod
    def of(path: Path) -> Layout:
        """The layout that a file's front states.

        Raises:
            Damaged: the front is not what was written.
        """
        with path.open("rb") as file:
            head = file.read(_HEAD.size).ljust(_HEAD.size, b"\0")
            magic, num_text, num_slots, checksum = _HEAD.unpack(head)
            num_bytes = num_text + 8 * num_slots
            content = file.read(num_bytes) if num_bytes <= path.stat().st_size else b""
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(content) != checksum:
            raise Damaged(f"{path}: its front is damaged; opening the cache with its data set repairs it")
        shapes = np.frombuffer(content, "<u4", offset=num_text).reshape(-1, 2)
        return Layout(json.loads(content[:num_text]), shapes.astype(np.int64))


class SlotFile:
    """An open slot file. Thread-safe; processes share it without a lock.

    Args:
        room_bytes: slots that end within so many bytes of the file are kept, later ones are given up; None
            keeps all.

    Raises:
        OSError: it cannot be opened, or made.
    """

    def __init__(
        self, path: Path, layout: Layout, *, writable: bool = True, room_bytes: int | None = None
    ) -> None:
        self.path, self.layout, self.num_kept = path, layout, len(layout.shapes)
        # of each slot, since its checksum was last compared
        self._num_reads = np.zeros(len(layout.shapes), np.uint8)
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._number = os.open(path, flags | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._number)  # once nothing uses this object any more
        if writable:
            self._prepare(room_bytes)

    def _prepare(self, room_bytes: int | None) -> None:
        if os.pread(self._number, len(self.layout.front), 0) != self.layout.front:
            self._write(self.layout.front, 0)
        if room_bytes is not None:
            self.num_kept = max(0, int(np.searchsorted(self.layout.starts, room_bytes, side="right")) - 1)
        end = int(self.layout.starts[self.num_kept])
        size = os.fstat(self._number).st_size
        if size > end:
            first = self.layout.entry(self.num_kept)
            self._write(bytes(self.layout.entry(len(self.layout.shapes)) - first), first)
        if size != end:
            os.ftruncate(self._number, end)

    def read(
        self, slot: int, source: bytes | None = None, out: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8] | None:
        """The pixels of a slot; None if it holds none of this source, or they are being written.

        Their checksum is compared at the first read of a slot and at every 64th.

        Args:
            source: what they must have been decoded from; None takes whatever is there.
            out: contiguous memory for the pixels, used if it has their shape; if nothing is returned, its
                content is undefined.

        Raises:
            Damaged: they are not what was written.
            OSError: the disk fails.
        """
        entry = self._entry(slot)
        found, checksum, done = _ENTRY.unpack(entry)
        if done != 1 or source not in (None, found):
            if done > 1:
                raise Damaged(f"{self.path}: the entry of slot {slot} is damaged")
            return None
        shape = (3, *self.layout.shapes[slot].tolist())
        pixels = np.empty(shape, np.uint8) if out is None or out.shape != shape else out
        num_read = os.preadv(self._number, [pixels.reshape(-1)], int(self.layout.starts[slot]))
        verify = self._num_reads[slot] == 0
        is_sound = num_read == pixels.nbytes and (not verify or _checksum(slot, found, pixels) == checksum)
        if self._entry(slot) != entry:  # it is being written again
            return None
        if is_sound:
            self._num_reads[slot] = (self._num_reads[slot] + 1) % _VERIFIED_EVERY
            return pixels
        self._num_reads[:] = 0  # in a file that was cut short and grows again, other slots are zeros
        raise Damaged(f"{self.path}: the checksum of slot {slot} does not fit")

    def announce(self, slot: int) -> bool:
        """Tell the operating system that a slot will be read; False if it is empty."""
        start, end = self.layout.starts[slot : slot + 2].tolist()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._number, start, end - start, os.POSIX_FADV_WILLNEED)
        return any(self._entry(slot))

    def write(self, slot: int, source: bytes, pixels: NDArray[np.uint8]) -> None:
        """Put pixels (3, h, w) into their slot.

        Raises:
            OSError: the disk is full, or the like; the slot is then empty.
        """
        self._num_reads[slot] = 0
        place = self.layout.entry(slot)
        if any(self._entry(slot)):
            self._write(bytes(_ENTRY.size), place)
        content = pixels.tobytes()
        self._write(content, int(self.layout.starts[slot]))
        self._write(_ENTRY.pack(source, _checksum(slot, source, content), 1), place)

    def filled(self) -> NDArray[np.int64]:
        """The slots whose entry is not empty."""
        start = self.layout.entry(0)
        table = os.pread(self._number, self.layout.entry(self.num_kept) - start, start)
        entries = np.frombuffer(table[: len(table) // _ENTRY.size * _ENTRY.size], np.uint64)
        return np.flatnonzero(entries.reshape(-1, 4).any(axis=1))

    def _entry(self, slot: int) -> bytes:
        return os.pread(self._number, _ENTRY.size, self.layout.entry(slot)).ljust(_ENTRY.size, b"\0")

    def _write(self, content: bytes, place: int) -> None:
        rest = memoryview(content)
        while rest:
            num_written = os.pwrite(self._number, rest, place)
            rest, place = rest[num_written:], place + num_written


def is_slot_file(path: Path) -> bool:
    """Whether the file's name is that of a slot file."""
    return re.fullmatch(rf"[0-9a-f]{{16}}-[0-9a-f]{{16}}\{SUFFIX}", path.name) is not None


def slot_files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The slot files of a folder, the least recently used first."""
    found = []
    for path in filter(is_slot_file, folder.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):  # removed by another process just now
            found.append((path, path.stat()))
    return sorted(found, key=lambda item: item[1].st_mtime_ns)


def disk_bytes(stat: os.stat_result) -> int:
    """What a sparse file takes on the disk."""
    return min(stat.st_size, 512 * stat.st_blocks)


def _rounded(number: Any, unit: int) -> Any:
    return -(-number // unit) * unit


def _checksum(slot: int, source: bytes, pixels: bytes | NDArray[np.uint8]) -> int:
    """XXH3: 10 GB/s, where CRC-32 has 4."""
    state = xxhash.xxh3_64(source, seed=slot)
    state.update(pixels)
    return state.intdigest()
