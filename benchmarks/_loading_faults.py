"""What goes wrong while loading, done for real, each in a process of its own: wrong batches are counted.

    python benchmarks/_loading_faults.py NAME FOLDER

with `corpus.json` (paths and texts) in the folder; prints one JSON document. A hang is for the caller to notice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _loading_arms import planned_loader
from _loading_corpus import Corpus

from mmlab.cli.cache import cache_info
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError
from mmlab.loading.cache.slots import Layout
from mmlab.types import Batch

LIMIT_S = 120  # a fault that takes longer is a hang
TMPFS_MIB = 4  # 96 images of 224 x 224 take 14


def run_fault(name: str, folder: Path) -> dict[str, Any]:
    """A fault in a process of its own, or in one with a disk of its own."""
    command = [sys.executable, __file__, name, str(folder)]
    if name == "full disk":
        command = ["unshare", "--map-root-user", "--mount", *command]
    started = time.perf_counter()
    row = {"kind": "fault", "fault": name}
    try:
        child = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return row | {"hung": True, "num_wrong_batches": None, "fault_s": LIMIT_S}
    return row | {"hung": False, "fault_s": time.perf_counter() - started} | json.loads(child.stdout)


@dataclass
class KillsOnce:
    """An augmentation that changes nothing, and once, at one record, kills the process that it runs in."""

    record_id: str
    mark: Path

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        """The image as it is."""
        if record_id == self.record_id and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return image


def killed_worker(corpus: Corpus) -> int:
    """SIGKILL to a worker process in the middle of a batch."""
    mark = corpus.folder / "killed"
    with planned_loader(corpus, backend="torch", num_workers=2) as loader:
        kills = KillsOnce(loader.dataset.records.ids[len(corpus) // 2], mark)
    with planned_loader(corpus, backend="torch", num_workers=2, augment=kills) as loader:
        wrong = num_wrong(loader, corpus)
    assert mark.exists(), "no worker was killed"
    return wrong


def flipped_byte(corpus: Corpus) -> int:
    """A byte of a cached image changes."""
    with planned_loader(corpus, cached=True, backend="threads", num_workers=2):
        pass
    (path,) = (corpus.folder / "cache").iterdir()
    content = bytearray(path.read_bytes())
    content[int(Layout.of(path).starts[0]) + 1000] ^= 0x10
    path.write_bytes(content)
    with planned_loader(corpus, cached=True, backend="threads", num_workers=2) as loader:
        return num_wrong(loader, corpus)


def full_disk(corpus: Corpus) -> int:
    """The cache's disk has room for a part of the samples only."""
    folder = corpus.folder / "cache"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", str(folder)], check=True)
    with planned_loader(corpus, cached=True, backend="threads", num_workers=2) as loader:
        assert loader.dataset.cache is not None
        assert loader.dataset.cache.stats().num_left_out > 0, "the disk did not fill up"
        return num_wrong(loader, corpus)


def killed_builder(corpus: Corpus) -> int:
    """SIGKILL to a process that fills the cache, as soon as it has written something."""
    folder = corpus.folder / "cache"
    with subprocess.Popen([sys.executable, __file__, "build", str(corpus.folder)]) as builder:
        while num_cached(folder) == 0:
            time.sleep(0.001)
        builder.kill()
    with planned_loader(corpus, cached=True, backend="threads", num_workers=2) as loader:
        return num_wrong(loader, corpus)


def num_cached(folder: Path) -> int:
    """How many images a cache has; none where it is not there yet."""
    try:
        return cache_info(folder).document["num_images"]
    except DataError:
        return 0


def build(corpus: Corpus) -> int:
    """Fill the cache: what `killed_builder` kills."""
    with planned_loader(corpus, cached=True):
        return 0


def num_wrong(found: Iterable[Batch], corpus: Corpus) -> int:
    """How many batches are missing, or differ in any bit from those of an undisturbed loader without a cache."""
    batches = list(found)
    with planned_loader(corpus, backend="threads", num_workers=0) as loader:
        expected = list(loader)
    differ = sum(not same(batch, other) for batch, other in zip(batches, expected, strict=False))
    return differ + abs(len(batches) - len(expected))


def same(batch: Batch, other: Batch) -> bool:
    """Whether two batches are equal bit for bit."""
    return batch.record_ids == other.record_ids and all(
        torch.equal(getattr(batch, name), getattr(other, name))
        for name in ("pixel_values", "pixel_mask", "input_ids", "attention_mask")
    )


def resume(corpus: Corpus, backend: str) -> dict[str, Any]:
    """Stop in mid-epoch, go on in a new loader: how long until the next batch is there, and whether it is the one."""
    with planned_loader(corpus, backend=backend, num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(len(loader) // 2):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
    with planned_loader(corpus, backend=backend, num_workers=2) as loader:
        started = time.perf_counter()
        loader.load_state_dict(state)
        batches = iter(loader)
        found = [next(batches)]
        resume_s = time.perf_counter() - started
        found += batches
    wrong = sum(not same(batch, other) for batch, other in zip(found, rest, strict=True))
    return {"kind": "resume", "backend": backend, "resume_s": resume_s, "num_wrong_batches": wrong}


FAULTS = {
    "killed worker": killed_worker,
    "flipped byte": flipped_byte,
    "full disk": full_disk,
    "killed cache builder": killed_builder,
}

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    paths, texts = json.loads((Path(folder) / "corpus.json").read_text())
    warnings.simplefilter("ignore")
    corpus = Corpus(
        paths=paths, texts=texts, tokenizer=load_tokenizer(f"{folder}/tokenizer"), folder=Path(folder)
    )
    if name == "build":
        build(corpus)
    else:
        print(json.dumps({"num_wrong_batches": FAULTS[name](corpus)}))
