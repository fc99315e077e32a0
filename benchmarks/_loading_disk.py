"""Epochs whose images are on the disk only, as with data that are larger than memory.

Before each epoch the system is asked to drop the files from its cache (`posix_fadvise`); what a hypervisor below keeps
cannot be dropped. Images come from files, from tar shards and from mmlab's cache, in random order. What can be reached
is the lesser of two rates: that of the same epoch from memory, and as many images as the disk's own rate gives, which is
that of reading one large file from its beginning.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _loading_arms import BATCH_SIZE, write_shards
from _loading_corpus import Corpus, Whole

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler

_LARGE_BYTES, _PIECE_BYTES = 2**28, 2**23


def from_the_disk(corpus: Corpus, num_turns: int) -> list[dict[str, Any]]:
    """One row for each place that images come from: images/s from memory and from the disk, in turns."""
    sources = {name: _dataset(name, corpus) for name in ("files", "tar shards", "cache")}
    rows = {
        name: {"kind": "disk", "source": name, "image_bytes": sum(map(os.path.getsize, files)) / len(dataset)}
        | {"disk_bytes_per_s": [], "memory_images_per_s": [], "images_per_s": []}
        for name, (dataset, files) in sources.items()
    }
    for turn in range(1 + num_turns):  # the first one warms up
        for name, (dataset, files) in sources.items():
            found = {
                "disk_bytes_per_s": _disk_bytes_per_s(corpus.folder),
                "memory_images_per_s": _epoch(dataset, []),
                "images_per_s": _epoch(dataset, files),
            }
            for key, value in found.items():
                rows[name][key] += [value] if turn else []
    for row in rows.values():
        shown = (f"{key} {np.median(row[key]):,.0f}" for key in found)
        print(f"disk    {row['source']:45} {', '.join(shown)}", flush=True)
    return list(rows.values())


def _dataset(name: str, corpus: Corpus) -> tuple[MultimodalDataset, list[Path]]:
    """The corpus from one place, and the files that it is read from."""
    if name == "tar shards":
        files = write_shards(corpus)
        records = read_records(files, progress=False)
    else:
        files = [Path(path) for path in dict.fromkeys(corpus.paths)]
        records = read_records(corpus.paths, corpus.texts, progress=False)
    dataset = MultimodalDataset(records, tokenizer=corpus.tokenizer, image_policy=Whole())
    if name == "cache":
        cache = dataset.cache = SampleCache(corpus.folder / "from the disk", key=cache_key(dataset))
        build_cache(dataset, progress=False)
        files = [cache.path]
    return dataset, files


def _epoch(dataset: MultimodalDataset, dropped: Iterable[Path]) -> float:
    """Images/s of an epoch, after these files were dropped from the system's cache."""
    _drop(dropped)
    with PlannedLoader(dataset, make_scheduler("random", batch_size=BATCH_SIZE), num_workers=2) as loader:
        started = time.perf_counter()
        num_images = sum(len(batch) for batch in loader)
        return num_images / (time.perf_counter() - started)


def _disk_bytes_per_s(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(_LARGE_BYTES))
        file.flush()
        _drop([Path(file.name)])
        started = time.perf_counter()
        for start in range(0, _LARGE_BYTES, _PIECE_BYTES):
            os.pread(file.fileno(), _PIECE_BYTES, start)
        return _LARGE_BYTES / (time.perf_counter() - started)


def _drop(files: Iterable[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
