"""Whatever the data come from, every backend makes the same batches of them, and a model takes a step on these."""

from __future__ import annotations

import io
import math
import os
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import fsspec
import pytest
import torch

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.data.text import load_tokenizer
from mmlab.errors import OptionError
from mmlab.loading import batches
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.model.presets import build_model
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.names import parse_objectives
from mmlab.types import Aspect
from tests.loading.loaders import assert_same, make_loader

datasets.disable_progress_bars()
NUM_SAMPLES = 12


def shard(records: Records, path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for row in range(NUM_SAMPLES):
            parts = {"png": records.read_image(3 * row), "txt": str(records.texts[3 * row]).encode()}
            for suffix, content in parts.items():
                member = tarfile.TarInfo(f"{row:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def table(records: Records, images: list, feature) -> datasets.Dataset:
    features = datasets.Features({"image": feature, "text": datasets.Value("string")})
    texts = [records.texts[3 * row] for row in range(NUM_SAMPLES)]
    return datasets.Dataset.from_dict({"image": images, "text": texts}, features=features)


def encoded(records: Records, row: int) -> dict:
    return {"bytes": records.read_image(3 * row % len(records)), "path": None}


def saved_dataset(records: Records, folder: Path) -> Path:
    images = [encoded(records, row) for row in range(NUM_SAMPLES)]
    table(records, images, datasets.Image()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def several_images(records: Records, folder: Path) -> datasets.Dataset:
    images = [[encoded(records, row), encoded(records, row + NUM_SAMPLES)] for row in range(NUM_SAMPLES)]
    return table(records, images, datasets.List(datasets.Image()))


def local_shard(records: Records, folder: Path) -> Path:
    return shard(records, folder / "0.tar")


def remote_shard(records: Records, folder: Path) -> str:
    fsspec.filesystem("memory").pipe("/sources/0.tar", shard(records, folder / "0.tar").read_bytes())
    return "memory://sources/0.tar"


def texts_only(records: Records, folder: Path) -> Path:
    path = folder / "texts.csv"
    path.write_text("text\n" + "\n".join(f'"{records.texts[3 * row]}"' for row in range(NUM_SAMPLES)))
    return path


def images_only(records: Records, folder: Path) -> Path:
    path = folder / "images.csv"
    names = [Path(str(records.image_paths[3 * row])) for row in range(NUM_SAMPLES)]
    path.write_text("image\n" + "\n".join(name.name for name in names))
    (folder / "images").symlink_to(names[0].parent)
    return path


SOURCES: list[Callable] = [
    saved_dataset, several_images, local_shard, remote_shard, texts_only, images_only
]  # fmt: skip


@pytest.mark.parametrize("make_source", SOURCES)
def test_every_backend_loads_every_source(make_source, records, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_source(records, tmp_path)
    found = read_records(source, allow_missing_modality=True, progress=False)
    dataset = MultimodalDataset(
        found, tokenizer=load_tokenizer("builtin", records=records), image_policy=Aspect(32 * 32, 16)
    )
    scheduler = make_scheduler("random", batch_size=5, seed=1)
    expected = list(make_loader(dataset, scheduler=scheduler))
    assert sorted(id_ for batch in expected for id_ in batch.record_ids) == sorted(found.ids)
    for backend in ("threads", "torch"):
        assert_same(list(make_loader(dataset, backend, scheduler=scheduler)), expected)

    torch.manual_seed(0)
    small = dict.fromkeys(("image_dim", "text_dim", "hidden_dim", "embed_dim"), 32)
    depth = {"image_depth": 1, "text_depth": 1, "head_dim": 8}
    model = build_model("tiny", vocab_size=len(dataset.tokenizer), **small, **depth)
    name = "masked_language" if make_source is texts_only else "contrastive"
    objectives = parse_objectives(model, [name], tokenizer=dataset.tokenizer)
    trainer = FusionTrainer(model, objectives=objectives, device="cpu")
    loader = make_loader(dataset, "threads", scheduler=scheduler)
    if make_source is images_only:
        with pytest.raises(OptionError, match="no batch had anything to learn from"):
            trainer.fit(loader)
        return
    steps = trainer.fit(loader)
    assert sum(step["num_samples"] for step in steps) == len(found)
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("backend", ["here", "threads"])
def test_the_disk_is_told_what_is_read_next_where_reading_is_slow(
    records, tmp_path, monkeypatch, backend, cached
) -> None:
    dataset = MultimodalDataset(read_records(local_shard(records, tmp_path), progress=False))
    if cached:
        dataset.cache = SampleCache(tmp_path / "cache", key=cache_key(dataset))
    told: list[int] = []
    parts: list[tuple[int, int]] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (parts.append(args[1:3]), advise(*args)))
    monkeypatch.setattr(
        dataset, "announce", lambda row: (told.append(row), type(dataset).announce(dataset, row))
    )
    loader = make_loader(
        dataset,
        backend,
        num_workers=0 if backend == "here" else 1,
        scheduler=make_scheduler("random", batch_size=4),
    )
    quick = list(loader)
    monkeypatch.setattr(batches, "_SLOW_READ_S", 0.0)
    for _ in range(3):  # a page of a library that is read from the disk meanwhile counts as well
        told.clear()
        assert_same(list(loader), quick)
        if not told:
            break
    assert not told  # slow as it may be, it came from memory
    monkeypatch.setattr(batches, "_REMOTE_READ_S", 0.0)
    assert_same(list(loader), quick)
    assert NUM_SAMPLES // 2 < len(set(told)) < NUM_SAMPLES  # not the first to be read
    assert len(told) == len(set(told))
    starts = {dataset.records.store.part_of(path)[1] for path in dataset.records.image_paths}
    if cached:
        starts |= set(dataset.cache._layout.starts.tolist())
    assert {start for start, _ in parts} <= starts
    (tmp_path / "0.tar").unlink()
    dataset.records.announce(0)  # who reads it says that it is gone


def test_threads_announce_each_row_once_while_more_rows_come() -> None:
    upcoming = batches.Upcoming()
    announced: list[int] = []

    def load() -> None:
        for _ in range(5000):
            upcoming.begin()
            announced.extend(upcoming.to_announce())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        upcoming.extend(range(15_000))
        with ThreadPoolExecutor(3) as pool:
            loaders = [pool.submit(load) for _ in range(3)]
            for first in range(15_000, 27_000, 10):
                upcoming.extend(range(first, first + 10))
        for loader in loaders:
            loader.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(announced) == len(set(announced))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_blocks_are_counted_that_come_from_a_disk(tmp_path):
    path = tmp_path / "content"
    with path.open("wb") as file:
        file.write(os.urandom(2**20))
        file.flush()
        os.fsync(file.fileno())
        before = batches.blocks_read()
        path.read_bytes()
        assert batches.blocks_read() == before
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    path.read_bytes()
    if batches.blocks_read() == before:
        pytest.skip("this folder is in memory")
    assert batches.blocks_read() >= before + 2**20 // 512
