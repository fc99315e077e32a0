"""Rows with known pixels, and a builder as a process of its own: python cached_arrays.py FILES CACHE ROWS PAUSE_S."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmlab.data.records import Records
from mmlab.loading.cache.key import CacheKey, cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.types import ImagePolicy, SampleSizes, Square

SIDE = 32


@dataclass
class Prepared:
    """What a key is made from."""

    records: Records
    image_policy: ImagePolicy

    @property
    def sizes(self) -> SampleSizes:
        return self.records.sizes(self.image_policy)


def make_key(files: Path, num_rows: int, *, side: int = SIDE) -> CacheKey:
    """A key over small files, one a row, made where they are not yet."""
    files.mkdir(exist_ok=True)
    paths: list[str | None] = []
    for row in range(num_rows):
        path = files / f"{row:05}.bin"
        if not path.exists():
            path.write_bytes(row.to_bytes(4, "little"))
        paths.append(str(path))
    sides, zeros = np.full(num_rows, SIDE, np.int32), np.zeros(num_rows, np.int32)
    names = [str(row) for row in range(num_rows)]
    groups = np.arange(num_rows)
    records = Records(
        ids=names,
        image_paths=paths,
        texts=[*names],
        height=sides,
        width=sides,
        num_tokens=zeros,
        group=groups,
    )
    return cache_key(Prepared(records, Square(side)))


def pixels_of(row: int, side: int = SIDE) -> NDArray[np.uint8]:
    """What a row's pixels are."""
    return np.random.default_rng(row).integers(0, 256, (3, side, side), dtype=np.uint8)


def is_right(row: int, found: NDArray[np.uint8] | None) -> bool:
    """Whether what a cache gave is exactly that."""
    return found is not None and np.array_equal(found, pixels_of(row))


def take(cache: SampleCache, row: int) -> bool:
    """Do as a data set does: take a row from the cache or make it. True for a hit, which must be right."""
    found = cache.get(row)
    if found is not None:
        assert is_right(row, found), f"row {row} is wrong"
        return True
    cache.put(row, pixels_of(row))
    return False


if __name__ == "__main__":
    files, folder, num_rows, pause_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = SampleCache(folder, key=make_key(files, num_rows))
        print("ready", flush=True)
        num_hits = 0
        for _ in range(2):
            for row in range(num_rows):
                num_hits += take(cache, row)
                time.sleep(pause_s)
    stats = cache.stats()
    print(
        json.dumps(
            {
                "num_hits": num_hits,
                "num_left_out": stats.num_left_out,
                "cache_bytes": stats.cache_bytes,
                "warnings": [str(warning.message) for warning in caught],
            }
        )
    )
