"""What a cache has, and one that loses a builder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.slots import Layout, SlotFile, slot_files
from mmlab.loading.cache.store import SampleCache
from mmlab.types import Square


def contents(folder: Path) -> dict[int, bytes]:
    """The pixels in every slot that is filled; of a folder with one file."""
    ((path, _),) = slot_files(folder)
    file = SlotFile(path, Layout.of(path), writable=False)
    return {slot: file.read(slot).tobytes() for slot in file.filled().tolist()}  # type: ignore[union-attr]


def open_cached(data: str | Path, folder: str | Path) -> MultimodalDataset:
    """The same data set in every process."""
    dataset = MultimodalDataset(read_records(data, progress=False), image_policy=Square(32))
    dataset.cache = SampleCache(folder, key=cache_key(dataset))
    return dataset


def main(data: str, folder: str, num_decoded: int) -> None:
    """Build on every rank; rank 1 is killed when it has decoded so many images."""
    dataset = open_cached(data, folder)
    decode, decoded = dataset.decode, []

    def counted(row: int, found: object) -> object:
        sample = decode(row, found)  # type: ignore[arg-type]
        decoded.append(row)
        if os.environ["RANK"] == "1" and len(decoded) == num_decoded:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    dataset.decode = counted  # type: ignore[method-assign, assignment]
    build_cache(dataset, num_threads=1, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
