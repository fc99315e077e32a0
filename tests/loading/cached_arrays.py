"""Rows with known arrays, and a builder as a process of its own: python cached_arrays.py FILES CACHE ROWS PAUSE_S."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmlab.data.records import Records
from mmlab.loading.cache.key import CacheKey
from mmlab.loading.cache.store import SampleCache

SIDE = 32


def make_key(files: Path, num_rows: int, **changes: object) -> CacheKey:
    """A key over small files, made where they are not yet; every fifth row has no image, every sixth no text."""
    files.mkdir(exist_ok=True)
    paths: list[str | None] = []
    for row in range(num_rows):
        path = files / f"{row}.bin"
        if not path.exists():
            path.write_bytes(row.to_bytes(4, "little"))
        paths.append(None if row % 5 == 4 else str(path))
    texts = [None if row % 6 == 5 and row % 5 != 4 else f"text {row}" for row in range(num_rows)]
    settings = {"image_settings": {"image policy": "32"}, "text_settings": {"tokenizer": "words"}} | changes
    zeros = np.zeros(num_rows, np.int32)
    records = Records(
        ids=[str(row) for row in range(num_rows)],
        image_paths=paths,
        texts=texts,
        height=zeros,
        width=zeros,
        num_tokens=zeros,
        group=np.arange(num_rows),
    )
    return CacheKey(records=records, **settings)  # type: ignore[arg-type]


def arrays(key: CacheKey, row: int) -> tuple[NDArray[np.uint8] | None, NDArray[np.int32]]:
    """What a row's pixels and token ids are."""
    random = np.random.default_rng(row)
    pixels = random.integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8)
    token_ids = random.integers(0, 1000, row % 7 + 1, dtype=np.int32)
    has_image, has_text = key.records.image_paths[row] is not None, key.records.texts[row] is not None
    return pixels if has_image else None, token_ids if has_text else np.empty(0, np.int32)


def is_right(key: CacheKey, row: int, found: tuple | None) -> bool:
    """Whether what a cache gave is exactly that."""
    pixels, token_ids = arrays(key, row)
    return (
        found is not None
        and (found[0] is None) == (pixels is None)
        and (pixels is None or np.array_equal(found[0], pixels))
        and found[1] is not None
        and np.array_equal(found[1], token_ids)
    )


def take(cache: SampleCache, row: int) -> bool:
    """Do as a data set does: take a row from the cache or make it. True for a hit, which must be right."""
    found = cache.get(row)
    if found is not None and found[1] is not None:
        assert is_right(cache.key, row, found), f"row {row} is wrong"
        return True
    cache.put(row, *arrays(cache.key, row))
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
