"""The cache as training sees it: rows in, arrays out.

A hit costs 60 µs for a 224 x 224 image, half of it for the copy into the batch. Several processes may read and write
one folder at once without locks: each writes shards of its own, and looks for those of others when it misses, once a
second at most.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import OptionError
from mmlab.loading.cache.settings import adopt
from mmlab.loading.cache.shards import (
    Damaged,
    Shape,
    Shard,
    ShardWriter,
    list_shards,
    record_bytes,
    remove_shard,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.loading.cache.key import CacheKey

_SHARD_BYTES = 1 << 30
_SHARDS_A_LIMIT = 16  # what is evicted at once is a sixteenth of the limit
_LOOK_EVERY_S = 1.0  # for other processes' shards, and for room
_MAX_RECENT = 10_000  # entries in the dictionary, which takes 180 bytes each; the sorted columns take 16
_GONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What one process did with its cache, and the size of the whole."""

    num_hits: int
    num_misses: int
    num_damaged: int  # records whose checksum did not fit: each was a miss, and was made again
    num_left_out: int  # samples that were not written, for want of room or after the disk failed
    read_bytes: int
    written_bytes: int
    cache_bytes: int  # of all shards on the disk

    @property
    def hit_ratio(self) -> float:
        """Share of reads that the cache answered."""
        return self.num_hits / max(1, self.num_hits + self.num_misses)


class SampleCache:
    """Pixels and token ids of a data set's rows, on disk. Thread-safe, fork-safe; picklable: a copy opens the folder.

    Args:
        folder: made where it does not exist. One folder serves one configuration of images.
        key: from `cache_key(dataset)`. Where the folder was made with another, what no longer holds is removed, with
            a warning that says why.
        limit_bytes: size of all shards. When it is reached, shards that nobody has used since this cache was opened
            make room, least recently used first; without any, nothing more is added. Each further process that
            writes at the same time may pass it by one shard, a sixteenth.

    Raises:
        OptionError: a folder that holds other things, or a limit below 16 bytes.
    """

    _writer: ShardWriter | None
    _written: int  # number of the writer's shard

    def __init__(self, folder: str | Path, *, key: CacheKey, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < _SHARDS_A_LIMIT:
            raise OptionError(f"limit_bytes must be at least {_SHARDS_A_LIMIT}, found {limit_bytes}")
        self.folder = Path(folder)
        self.key = key
        self.limit_bytes = limit_bytes
        self._opened_ns = time.time_ns()
        self._start()
        try:
            adopt(self.folder, key)
        except OSError as error:
            self._fail(error)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "key", "limit_bytes", "_opened_ns")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def get(
        self,
        row: int,
        *,
        token_ids: NDArray[np.int32] | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> tuple[NDArray[np.uint8] | None, NDArray[np.int32] | None] | None:
        """What `put` was given for this row, or None where that is unknown, changed or damaged.

        Args:
            token_ids: of the row, where they are known: what was put is then not read, only looked for.
            out: (3, h, w) contiguous memory, such as a row of a batch, into which pixels of that size are read. Without
                a hit it may hold anything.

        Returns:
            pixels (3, h, w), None without an image; token ids (t,), None where another text of the image was put.
        """
        self._own()
        try:
            digests = self.key.digests(row)
        except OSError:  # no image: whoever makes the sample says so better
            return None
        image = None if digests[0] is None else self._read(digests[0], out)
        text = None if digests[1] is None else self._read_text(digests[1], token_ids)
        if (digests[1] is not None and text is None) or (digests[0] is not None and image is None):
            self._missed[row] = digests  # as before the sample is made: the image may change meanwhile
        hit = image is not None if digests[0] is not None else text is not None
        self._count("num_hits" if hit else "num_misses")
        if not hit:
            return None
        pixels = None if image is None else image[0].reshape(image[1])
        return pixels, np.empty(0, np.int32) if digests[1] is None else text

    def put(self, row: int, pixels: NDArray[np.uint8] | None, token_ids: NDArray[np.int32]) -> None:
        """Keep a row's arrays; call it after `get` found nothing. What is there already is not written again.

        A disk that is full or fails ends all writing of this process, with one warning.
        """
        assert pixels is None or (pixels.dtype == np.uint8 and pixels.ndim == 3)
        assert token_ids.dtype == np.int32
        self._own()
        missed = self._missed.pop(row, None)
        image, text = missed or self.key.digests(row)
        with self._lock:
            try:
                kept = not self._failed
                if kept and image is not None and pixels is not None:
                    kept = self._append(image, pixels)
                if kept and text is not None:
                    kept = self._append(text, token_ids)
            except OSError as error:
                kept = False
                self._fail(error)
        if not kept:
            self._count("num_left_out")

    def stats(self) -> CacheStats:
        """Counts since this process opened the cache."""
        cache_bytes = sum(shard.num_bytes for shard in list_shards(self.folder))
        return CacheStats(**self._counts, cache_bytes=cache_bytes)

    def close(self) -> None:
        """Let go of all files. They are opened again when they are needed."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            for shard in self._shards:
                shard.release()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of all writing, to files and to the columns
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(
            ("num_hits", "num_misses", "num_damaged", "num_left_out", "read_bytes", "written_bytes"), 0
        )
        self._missed: dict[int, tuple[bytes | None, bytes | None]] = {}
        self._prefix = self.key.image_digest.hex()[:16]
        self._shards: list[Shard] = []
        self._sorted = (
            np.empty(0, np.uint64),
            np.empty(0, np.int64),
        )  # keys; their places: shard << 32 | entry
        self._recent: dict[int, int] = {}  # what came after them: key -> place, or _GONE
        self._looked_s = self._crowded_s = -inf
        self._writer = None
        self._failed = False

    def _own(self) -> None:
        """Start anew in a forked process: the parent's writer is not its own, and a lock may have been held."""
        if self._pid != os.getpid():
            self._start()

    def _count(self, name: str, number: int = 1) -> int:
        with self._counting:
            self._counts[name] += number
            return self._counts[name]

    def _fail(self, error: OSError) -> None:
        self._failed = True
        warnings.warn(
            f"cannot write to the cache {self.folder}: {error.strerror}; what it has is still read, nothing more is "
            "cached by this process",
            stacklevel=3,
        )

    def _read(
        self, digest: bytes, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], Shape] | None:
        place = self._look_up(digest)
        if place is None:
            return None
        try:
            record = self._shards[place >> 32].read(place & 0xFFFFFFFF, digest, out)
        except (Damaged, OSError) as error:
            with self._lock:
                self._recent[_key_of(digest)] = _GONE
            if isinstance(error, Damaged) and self._count("num_damaged") == 1:
                warnings.warn(
                    f"damaged cache: {error}; it is made again (mmlab cache verify lists all damage)",
                    stacklevel=3,
                )
            return None
        self._count("read_bytes", record[0].nbytes)
        return record

    def _read_text(self, digest: bytes, known: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        if known is not None:
            return None if self._look_up(digest) is None else known
        record = self._read(digest)
        return None if record is None else record[0].view(np.int32)

    def _look_up(self, digest: bytes) -> int | None:
        """Where a record is, as `_find`, with a look at what others have written."""
        place = self._find(digest)
        if place is None and time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            with self._lock:
                self._look()
            place = self._find(digest)
        return place

    def _find(self, digest: bytes) -> int | None:
        key = _key_of(digest)
        place = self._recent.get(key)
        if place is None:
            keys, places = self._sorted
            at = keys.searchsorted(np.uint64(key))
            place = int(places[at]) if at < len(keys) and keys[at] == key else _GONE
        return None if place == _GONE else place

    def _look(self) -> None:
        """Take in what has been written to the folder since; the newest record of a sample counts."""
        names = {shard.name for shard in list_shards(self.folder) if shard.name.startswith(self._prefix)}
        known = {shard.name for shard in self._shards}
        self._shards += [Shard(self.folder, name) for name in sorted(names - known)]
        for number, shard in enumerate(self._shards):
            if shard.name not in names:
                shard.release()  # evicted: the disk has its room back when nobody reads it any more
                continue
            first = number << 32 | shard.num_known
            keys = shard.new_keys()
            self._recent.update(zip(keys.tolist(), range(first, first + len(keys)), strict=True))
            if len(self._recent) > _MAX_RECENT:
                self._sort()
        self._looked_s = time.monotonic()

    def _sort(self) -> None:
        """Move the recent places into the sorted columns."""
        recent = self._recent
        keys = np.fromiter(recent.keys(), np.uint64, len(recent))
        places = np.fromiter(recent.values(), np.int64, len(recent))
        older = ~np.isin(self._sorted[0], keys)
        keys = np.concatenate((self._sorted[0][older], keys))
        places = np.concatenate((self._sorted[1][older], places))
        order = np.argsort(keys)
        order = order[places[order] != _GONE]
        self._sorted = keys[order], places[order]
        self._recent = {}  # only now: `_find` looks here first, without the lock

    def _append(self, digest: bytes, array: NDArray) -> bool:
        """Write one array, unless it is there; False where there is no room."""
        if self._find(digest) is not None:
            return True
        shard_bytes = _SHARD_BYTES if self.limit_bytes is None else self.limit_bytes // _SHARDS_A_LIMIT
        shard_bytes = max(min(shard_bytes, _SHARD_BYTES), record_bytes(array))
        if self._writer is not None and self._writer.num_bytes + record_bytes(array) > shard_bytes:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            if not self._make_room(shard_bytes):
                return False
            writer = ShardWriter(self.folder, self._prefix)
            self._written = len(self._shards)
            self._shards.append(Shard(self.folder, writer.name))
            self._writer = writer
        try:
            self._writer.append(digest, array)
            shard = self._shards[self._written]
            self._recent[_key_of(digest)] = self._written << 32 | shard.num_known
            shard.num_known += 1
        except (
            BaseException
        ):  # interrupts too: how far it came is unknown, so nothing may follow in these files
            self._writer.close()
            self._writer = None
            raise
        self._count("written_bytes", array.nbytes)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove shards that are out of use until so much fits in; False where it does not."""
        if self.limit_bytes is None:
            return True
        if time.monotonic() - self._crowded_s < _LOOK_EVERY_S:
            return False
        shards = list_shards(self.folder)
        excess_bytes = sum(shard.num_bytes for shard in shards) + num_bytes - self.limit_bytes
        for shard in shards:
            if excess_bytes <= 0 or shard.used_ns >= self._opened_ns:
                break
            remove_shard(self.folder, shard.name)
            excess_bytes -= shard.num_bytes
        if excess_bytes > 0:
            self._crowded_s = time.monotonic()
        return excess_bytes <= 0


def _key_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
