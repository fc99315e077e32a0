"""Tar shards are shared out by rank and by worker: every key once an epoch, however many processes read."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from torch import distributed

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.readers.tar import TarStore
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.base import Scheduler
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Square
from tests.ranks import run_ranks

NUM_SHARDS, NUM_KEYS = 3, 7  # of each shard; 21 samples, which neither ranks nor batches divide


@dataclass(frozen=True)
class NotedReads(TarStore):
    """Notes which process reads which key."""

    notes: Path

    def read(self, image_path: str) -> bytes:
        with open(self.notes, "a") as file:  # one write, at the end: lines of several processes stay whole
            file.write(f"{os.getpid()} {image_path}\n")
        return super().read(image_path)


@dataclass(frozen=True, kw_only=True)
class Share(Scheduler):
    """One rank's share of a plan."""

    whole: Scheduler
    rank: int

    def plan(self, samples: object, *, epoch: int = 0) -> BatchPlan:
        return self.whole.plan(samples, epoch=epoch).shard(self.rank, self.world_size)


def read_an_epoch(folder: str, epoch: int) -> list[str]:
    """The record ids that one rank gets from its two worker processes."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    records = read_records(folder, progress=False)
    records = replace(records, store=NotedReads(Path(folder) / f"reads-{rank}.txt"))
    dataset = MultimodalDataset(records, image_policy=Square(32))
    whole = make_scheduler("random", batch_size=2, world_size=world_size)
    share = Share(whole=whole, rank=rank, world_size=world_size)
    with PlannedLoader(dataset, share, backend="torch", num_workers=2) as loader:
        loader.set_epoch(epoch)
        found = [record_id for batch in loader for record_id in batch.record_ids]
    return found


def test_two_ranks_of_two_workers_read_every_key_once(tmp_path: Path) -> None:
    keys = set()
    for shard in range(NUM_SHARDS):
        with tarfile.open(tmp_path / f"{shard:03}.tar", "w") as archive:
            for key in range(NUM_KEYS):
                keys.add(f"{shard:03}.tar/{key}")
                picture = io.BytesIO()
                Image.new("RGB", (40, 30), (shard, key, 0)).save(picture, "PNG")
                for name, content in ((f"{key}.png", picture.getvalue()), (f"{key}.txt", b"a field")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    found = run_ranks(read_an_epoch, 2, str(tmp_path), 1)
    assert Counter(found[0] + found[1]) == Counter(keys)
    reads = [(tmp_path / f"reads-{rank}.txt").read_text().split("\n")[:-1] for rank in range(2)]
    readers = [{line.split()[0] for line in rank} for rank in reads]
    assert all(readers), "a rank has read nothing"
    assert not readers[0] & readers[1], "each rank has workers of its own, one or both of which have read"
    images = Counter(line.split(maxsplit=1)[1] for rank in reads for line in rank)
    assert len(images) == len(keys)
    assert set(images.values()) == {1}  # and none of them what another has
