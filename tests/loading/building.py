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
from mmlab.loading.cache.shards import Shard, list_shards, read_index
from mmlab.loading.cache.store import SampleCache
from mmlab.parallel.shared_work import SharedWork
from mmlab.types import Square


def contents(folder: Path) -> dict[bytes, list[tuple[tuple[int, int, int], bytes]]]:
    """Shape and bytes of every record that a cache's files hold, by digest; one that is there twice has two."""
    found: dict[bytes, list[tuple[tuple[int, int, int], bytes]]] = {}
    for files in list_shards(folder):
        shard = Shard(folder, files.name, touch=False)
        for number, entry in enumerate(read_index(folder / f"{files.name}.index")):
            data, shape = shard.read(number)
            found.setdefault(entry["digest"].tobytes(), []).append((shape, bytes(data)))
    return found


def open_cached(data: str | Path, folder: str | Path) -> MultimodalDataset:
    """The same data set in every process."""
    dataset = MultimodalDataset(read_records(data, progress=False), image_policy=Square(32))
    dataset.cache = SampleCache(folder, key=cache_key(dataset))
    return dataset


def main(data: str, folder: str, num_decoded: int) -> None:
    """Build on every rank; rank 1 is killed when it has decoded so many samples."""
    dataset, work = open_cached(data, folder), SharedWork.of_this_job()
    assert work is not None
    decode, decoded = dataset.decode, []

    def counted(row: int, found: object) -> object:
        sample = decode(row, found)
        decoded.append(row)
        if work.rank == 1 and len(decoded) == num_decoded:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    dataset.decode = counted  # type: ignore[method-assign, assignment]
    build_cache(dataset, num_threads=1, work=work, progress=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
