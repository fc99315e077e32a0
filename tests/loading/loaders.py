"""Augmentations with a purpose, and comparison bit for bit."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Batch

BACKENDS = {
    "here": {"backend": "threads", "num_workers": 0},
    "threads": {"backend": "threads", "num_workers": 3, "prefetch": 3},
    "torch": {"backend": "torch", "num_workers": 2},
}


def make_loader(dataset, backend: str = "here", **options) -> PlannedLoader:
    scheduler = options.pop("scheduler", None)
    if scheduler is None:
        scheduler = make_scheduler("budget", budget=200, seed=3)
    return PlannedLoader(dataset, scheduler, **{**BACKENDS[backend], **options})


class Noise:
    """Adds to the pixels what the key says."""

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        noise = np.random.default_rng([seed, epoch, *record_id.encode()]).integers(
            0, 9, image.shape, dtype=np.uint8
        )
        return image + torch.from_numpy(noise)


@dataclass
class Slow:
    """Takes its time, without the interpreter's lock; or (`holds_lock`) as much work with it."""

    seconds: float
    holds_lock: bool = False

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        if self.holds_lock:
            sum(range(int(self.seconds * 5e7)))
        else:
            time.sleep(self.seconds)
        return image


class NeedsLock:
    """Takes a lock of this module for each image."""

    lock = threading.Lock()

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        if not self.lock.acquire(timeout=5):
            raise TimeoutError("the lock is held by a thread that this process does not have")
        self.lock.release()
        return image


@dataclass
class Killed:
    """Kills its own process at one record: the first time only, if there is a folder to remember it in."""

    record_id: str
    folder: Path | None = None

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        if record_id == self.record_id:
            if self.folder is None:
                os.kill(os.getpid(), 9)
            elif not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), 9)
        return image


def assert_same(batches: list[Batch], expected: list[Batch]) -> None:
    """The same batches, bit for bit."""
    assert [batch.record_ids for batch in batches] == [batch.record_ids for batch in expected]
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.pixel_values, other.pixel_values)
        assert torch.equal(batch.pixel_mask, other.pixel_mask)
        assert torch.equal(batch.input_ids, other.input_ids)
