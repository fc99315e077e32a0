"""How fast this machine reads, decodes, tokenises and pads: short measurements, each over in seconds.

Reading is timed by the clock, work by the processor time of this process, so that other programs disturb it little.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import timeit
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

from mmlab.errors import DataError

MIB = 2**20
_READ_BYTES = 256 * MIB
_SCRATCH_BYTES = 64 * MIB
_PIECE_BYTES = 2**17  # about a photograph
_READ_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """The same files read twice, in pieces as large as a photograph, at random places, as training reads them."""

    what: str
    num_files: int
    num_bytes: int
    cold_s: float | None  # with the system's cache dropped; None where that cannot be asked for
    warm_s: float  # from the cache

    @property
    def really_cold(self) -> bool:
        """Whether the first read was slower: the cache was dropped, and the disk is not itself in memory."""
        return self.cold_s is not None and self.cold_s > 1.25 * self.warm_s


def read_rates(where: Path | Sequence[Path] | None) -> ReadRates:
    """Read a file, a folder's first files, these files or, for None, a scratch file in the working folder.

    Reads at most 256 MiB twice and drops what it reads from the system's cache. Instead of a small file, its
    folder is read. Takes four seconds at most.

    Raises:
        DataError: no readable file with anything in it.
    """
    if where is None:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".mmlab-doctor-") as scratch:
            scratch.write(os.urandom(_SCRATCH_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            return _read_twice([Path(scratch.name)], "a scratch file in the working folder")
    if not isinstance(where, Path):
        return _read_twice(where, f"{where[0]} and others" if len(where) > 1 else str(where[0]))
    source = where if where.is_dir() or where.stat().st_size >= _SCRATCH_BYTES else where.resolve().parent
    files = [source] if source.is_file() else _some_files(source)
    if not files:
        raise DataError(f"{where}: no readable file with anything in it; give a folder that holds data")
    return _read_twice(files, str(source))


def work_rate(work: Callable[[], object], num_items: int) -> float:
    """Items a second that one core's worth of processor time gets through, when a call of `work` does `num_items`."""
    work()
    num_calls, elapsed_s = timeit.Timer(work, timer=time.process_time).autorange()
    return num_items * num_calls / elapsed_s


def _read_twice(files: Sequence[Path], what: str) -> ReadRates:
    # pieces in random order, each at most once, as many as may be read
    starts = list(accumulate((-(-path.stat().st_size // _PIECE_BYTES) for path in files), initial=0))
    numbers = random.Random(0).sample(range(starts[-1]), min(starts[-1], _READ_BYTES // _PIECE_BYTES))
    places = [(number, bisect_right(starts, number) - 1) for number in numbers]
    pieces = [(files[place], (number - starts[place]) * _PIECE_BYTES) for number, place in places]
    can_drop = hasattr(os, "posix_fadvise")
    for path in files if can_drop else ():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    num_pieces, _, first_s = _read(pieces)
    num_pieces, num_bytes, warm_s = _read(pieces[:num_pieces])
    num_files = len({path for path, _ in pieces[:num_pieces]})
    cold_s = first_s if can_drop else None
    return ReadRates(what=what, num_files=num_files, num_bytes=num_bytes, cold_s=cold_s, warm_s=warm_s)


def _read(pieces: Sequence[tuple[Path, int]]) -> tuple[int, int, float]:
    """Read pieces, each from an offset in a file, for two seconds at most; gives how many, their bytes, and the seconds."""
    num_pieces, num_bytes, started = 0, 0, time.perf_counter()
    for path, start in pieces:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            num_bytes += len(file.read(_PIECE_BYTES))
        num_pieces += 1
        if time.perf_counter() - started > _READ_S:
            break
    return num_pieces, num_bytes, time.perf_counter() - started


def _some_files(folder: Path) -> list[Path]:
    """The first thousand readable files below a folder that are not empty, in the order of the system's listing."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    readable = (path for path in paths if path.is_file() and path.stat().st_size and os.access(path, os.R_OK))
    return list(islice(readable, 1000))
