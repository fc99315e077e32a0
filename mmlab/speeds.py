"""How fast this machine reads files and decodes images: short measurements, each over in two seconds or so."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mmlab.errors import DataError
from mmlab.images import decode, parse_image_policy

MIB = 2**20
_READ_BYTES = 256 * MIB
_SCRATCH_BYTES = 64 * MIB
_BLOCK_BYTES = MIB
_READ_S = 2.0
_DECODE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """The same files read twice in order."""

    what: str
    num_files: int
    num_bytes: int
    cold_s: float | None  # with the system's cache dropped; None where that cannot be asked for
    warm_s: float  # from the cache

    @property
    def really_cold(self) -> bool:
        """The first reading was slower: the cache could be dropped, and the disk is not itself in memory."""
        return self.cold_s is not None and self.cold_s > 1.25 * self.warm_s


def read_rates(where: Path | None) -> ReadRates:
    """Read a file, or a folder's first files, or a scratch file in the working folder where none is given.

    Reads at most 256 MiB and drops what it reads from the system's cache. A small file stands for its folder.

    Raises:
        DataError: no readable file with anything in it.
    """
    if where is None:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".mmlab-doctor-") as scratch:
            for _ in range(_SCRATCH_BYTES // _BLOCK_BYTES):
                scratch.write(os.urandom(_BLOCK_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            return _read_twice([Path(scratch.name)], "a scratch file in the working folder")
    whole = where.is_dir() or where.stat().st_size >= _SCRATCH_BYTES
    source = where if whole else where.resolve().parent
    files = [source] if source.is_file() else _some_files(source)
    if not files:
        raise DataError(f"{where}: no readable file with anything in it; give a folder that holds data")
    return _read_twice(files, str(source))


def decode_rate() -> tuple[float, int]:
    """Images a second that one core decodes and resizes as the loader does: JPEG 640 x 480 to 224 x 224.

    Returns:
        Images/s, and the size of the JPEG in bytes.
    """
    import numpy as np
    from PIL import Image

    grain = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    photo = Image.fromarray(grain).resize((640, 480), Image.Resampling.BICUBIC)
    encoded = io.BytesIO()
    photo.save(encoded, "JPEG", quality=90)
    policy = parse_image_policy("square:224")
    num_images, started = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started) < _DECODE_S:
        decode(encoded.getvalue(), policy)
        num_images += 1
    return num_images / elapsed_s, len(encoded.getvalue())


def _read_twice(files: Sequence[Path], what: str) -> ReadRates:
    cold_s = None
    if hasattr(os, "posix_fadvise"):
        for path in files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        num_files, num_bytes, cold_s = _read(files)
        files = files[:num_files]
    else:
        _read(files)
    num_files, num_bytes, warm_s = _read(files)
    return ReadRates(what=what, num_files=num_files, num_bytes=num_bytes, cold_s=cold_s, warm_s=warm_s)


def _read(files: Sequence[Path]) -> tuple[int, int, float]:
    """Read files in order until there are none, or enough was read; returns files, bytes and seconds."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    num_files = num_bytes = 0
    started = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while num_bytes < _READ_BYTES and (size := file.readinto(buffer)):
                num_bytes += size
        num_files += 1
        if num_bytes >= _READ_BYTES or time.perf_counter() - started > _READ_S:
            break
    return num_files, num_bytes, time.perf_counter() - started


def _some_files(folder: Path) -> list[Path]:
    """The first thousand readable files below a folder that are not empty, in the order of the system's listing."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    readable = (path for path in paths if path.is_file() and path.stat().st_size and os.access(path, os.R_OK))
    return list(islice(readable, 1000))
