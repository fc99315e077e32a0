"""The cache as training sees it: rows in, pixels out. Several processes may read and write one folder at once."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError, check_numbers
from mmlab.loading.cache.key import CacheKey
from mmlab.loading.cache.slots import SUFFIX, Damaged, Layout, SlotFile, disk_bytes, is_slot_file, slot_files


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What one process did with its cache, and the size of the whole."""

    num_hits: int = 0
    num_misses: int = 0
    num_damaged: int = 0  # images whose checksum did not fit: each was a miss, and was made again
    num_left_out: int = 0  # images that were not written, for lack of space or after the disk failed
    cache_bytes: int = 0  # of all files, on the disk


class SampleCache:
    """Decoded images of a data set, on disk. Thread-safe, fork-safe; picklable: a copy opens the folder.

    Args:
        folder: created if it does not exist; where it cannot be written, a warning says so and nothing is
            cached. One folder serves one configuration of images; every list of images has its own file there.
        key: from `cache_key(dataset)`, of the data set whose `cache` this becomes. Files that were made with other
            settings are removed, with a warning that says what has changed.
        limit_bytes: limit on the folder's size. Files of other lists of images are removed first, the least
            recently used first; if these images still do not fit, the first by path are kept, the same in
            every epoch.

    Raises:
        OptionError: a folder that holds other things, or a limit below one byte.
    """

    _opened: SlotFile | None
    _layout: Layout | None

    def __init__(self, folder: str | Path, *, key: CacheKey, limit_bytes: int | None = None) -> None:
        check_numbers({"limit_bytes": limit_bytes})
        self.folder, self.key, self.limit_bytes = Path(folder), key, limit_bytes
        self._start()
        try:
            self._adopt()
        except OSError as error:
            self._fail(error)
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "key", "limit_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def get(self, row: int, *, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8] | None:
        """The pixels (3, h, w) that `put` was given for this row's image; None where it is unknown or has changed.

        Args:
            out: contiguous memory, such as a row of a batch, into which pixels of its shape are read. Without
                a hit, its content is undefined.
        """
        file, slot = self._open(), int(self.key.slots[row])
        if slot < 0:
            return None
        pixels = source = None
        try:
            source = self.key.source(row)
            pixels = None if file is None or slot >= file.num_kept else file.read(slot, source, out)
        except Damaged as error:
            if self._count("num_damaged") == 1:
                message = f"damaged cache: {error}; the image is decoded again (mmlab cache verify lists all damage)"
                warnings.warn(message, stacklevel=2)
        except OSError:
            pass  # no image, or no disk: decoding the sample raises a better error
        if pixels is None and source is not None:
            # read before decoding, by each thread for itself: the file may change meanwhile
            self._missed[row, threading.get_ident()] = source
        self._count("num_misses" if pixels is None else "num_hits")
        return pixels

    def announce(self, row: int) -> bool:
        """Tell the operating system that a row's pixels will be read; False if there are none."""
        file, slot = self._open(), int(self.key.slots[row])
        return file is not None and 0 <= slot < file.num_kept and file.announce(slot)

    def put(self, row: int, pixels: NDArray[np.uint8]) -> None:
        """Keep a row's pixels (3, h, w); call it after `get` found nothing. Valid pixels that are already
        there stay.

        A disk that is full or fails ends all writing of this process, with one warning.
        """
        file, slot = self._open(), int(self.key.slots[row])
        source = self._missed.pop((row, threading.get_ident()), None) or self.key.source(row)
        shape = (3, *self.key.shapes[slot].tolist())
        if file is None or self.problem or slot >= file.num_kept or pixels.shape != shape:
            self._count("num_left_out")
            return
        try:
            with suppress(Damaged):
                if file.read(slot, source) is not None:  # by another caption of the image, or another process
                    return
            file.write(slot, source, pixels)
        except OSError as error:
            self._fail(error)
            self._count("num_left_out")

    def stats(self) -> CacheStats:
        """Counts since this process opened the cache."""
        with self._lock:
            counts = dict(self._counts)
        return CacheStats(**counts, cache_bytes=sum(disk_bytes(stat) for _, stat in slot_files(self.folder)))

    def close(self) -> None:
        """Release the file. It is opened again when needed."""
        self._opened = None

    @property
    def path(self) -> Path:
        """The file of these images with these settings."""
        return self.folder / f"{self.key.settings_digest}-{self.key.images}{SUFFIX}"

    def _start(self) -> None:
        self._pid, self._lock, self._counts = os.getpid(), threading.Lock(), Counter[str]()
        # of a row and the thread that decodes its image: the image's source
        self._missed: dict[tuple[int, int], bytes] = {}
        self._opened = self._layout = None
        self.problem = ""  # why this process writes nothing more

    def _count(self, name: str) -> int:
        if self._pid != os.getpid():  # forked: a thread of the parent may have held the lock
            self._pid, self._lock, self._counts = os.getpid(), threading.Lock(), Counter()
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    def _fail(self, error: OSError) -> None:
        if not self.problem:
            self.problem = f"cannot write to the cache {self.folder}: {error.strerror}"
            warnings.warn(f"{self.problem}; what it has is still read, nothing more is cached", stacklevel=3)

    def _adopt(self) -> None:
        """Take over the folder for this key: remove files made with other settings, and warn what changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        strange = [path.name for path in self.folder.iterdir() if not is_slot_file(path)]
        if strange:
            raise OptionError(
                f"{self.folder} is no cache: it has {strange[0]}; name an empty folder, or one that does not exist"
            )
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(self.key.settings_digest):
                continue
            try:
                changes = _changes(Layout.of(path).settings, self.key.settings)
            except (Damaged, FileNotFoundError):
                changes = "what it was made with cannot be read"
            path.unlink(missing_ok=True)
            warnings.warn(f"images of the cache {self.folder} will be decoded again: {changes}", stacklevel=3)

    def _open(self) -> SlotFile | None:
        """The slot file; None where there is none and none can be made."""
        file = self._opened
        if file is not None:
            return file
        if self._layout is None:
            self._layout = Layout(self.key.settings, self.key.shapes)
        if not self.problem:
            try:
                room_bytes = self._make_room(int(self._layout.starts[-1]))
                file = SlotFile(self.path, self._layout, room_bytes=room_bytes)
                os.utime(self.path)  # when it was last used
            except OSError as error:
                self._fail(error)
        if file is None and os.access(self.path, os.R_OK):
            file = SlotFile(self.path, self._layout, writable=False)
        self._opened = file
        return file

    def _make_room(self, num_bytes: int) -> int | None:
        """Remove files of other images until `num_bytes` fit under the limit; returns the bytes available."""
        if self.limit_bytes is None:
            return None
        others = [(path, stat.st_size) for path, stat in slot_files(self.folder) if path != self.path]
        while others and sum(size for _, size in others) + num_bytes > self.limit_bytes:
            others.pop(0)[0].unlink(missing_ok=True)
        return self.limit_bytes - sum(size for _, size in others)


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}" for name in names)
