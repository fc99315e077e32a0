"""Backends load batches ahead of training: `threads` in this process here, worker processes in `mmlab.loading.workers`.

Requests are drawn in the caller's thread, as far ahead as `prefetch` and a limit on bytes allow; batches come out in the
order of the requests. A pool of workers loads them, and one thread finishes them (collates, pins, copies).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.errors import RunError, first_line
from mmlab.loading.batches import BatchRequest, LoadedBatch, LoadedSample, SampleLoader, Upcoming
from mmlab.loading.stages import StageMeter
from mmlab.machine import resolve_device
from mmlab.types import Batch

_NUM_READY = 2  # batches to keep ready
_QUICK_S = 2.5e-4  # to load a sample: 0.06 ms from the cache where it is in memory, over 1 ms to decode


class Setting(NamedTuple):
    """How many workers, and how many batches they prepare ahead."""

    num_workers: int
    prefetch: int


class Pending(NamedTuple):
    """A request under way."""

    request: BatchRequest
    num_bytes: int
    loaded: Future[LoadedBatch]


class Backend(ABC):
    """Loads requests with a pool of workers.

    Attributes:
        in_turns: a worker does all stages of a batch, one after the other.

    Args:
        loader: loads the requests; the workers share it.
        setting: number of workers (0 loads in the caller's thread), and of batches under way or ready besides
            the one in use.
        copier: pins, and copies to the device.
        max_bytes: limit on the padded bytes of the batches under way; one is always allowed.
    """

    in_turns = True

    def __init__(self, loader: SampleLoader, setting: Setting, *, copier: Copier, max_bytes: int) -> None:
        self.loader, self.setting, self.copier, self.max_bytes = loader, setting, copier, max_bytes
        self._largest_bytes = 0  # of the batches so far
        self._pools: list[Any] = []  # the finishing thread's, then workers'; the last takes new work
        weakref.finalize(self, self._end, self._pools)
        self.meter = self._new_meter()

    @abstractmethod
    def _new_pool(self) -> Executor:
        """A pool of workers for the present setting."""

    @abstractmethod
    def _submit(self, request: BatchRequest) -> Future[LoadedBatch]:
        """Begin to load a request."""

    @abstractmethod
    def _abandon(self, pending: deque[Pending]) -> None:
        """Give up what is pending, after an epoch or when it is left half-way."""

    @abstractmethod
    def ram_bytes(self, setting: Setting) -> int:
        """Memory that a setting may take."""

    def run(self, requests: Iterator[BatchRequest]) -> Generator[LoadedBatch]:
        """Load requests in their order.

        Raises:
            RunError: the loader was closed meanwhile.
        """
        self.meter = self._new_meter()
        if not self.setting.num_workers:
            for request in requests:
                yield finish(self.loader.load(request), self.meter, self.copier)
            return
        pending: deque[Pending] = deque()
        try:
            held = self._submit_from(requests, None, pending)
            while pending:
                loaded = self._await(pending)
                held = self._submit_from(requests, held, pending)
                yield loaded
        finally:
            self._abandon(pending)

    def resize(self, setting: Setting) -> None:
        """Change the numbers of workers and batches: new workers load what is not yet under way."""
        changed = setting.num_workers != self.setting.num_workers
        self.setting = setting
        self.meter.num_threads = self._new_meter().num_threads
        if self._pools and changed:
            self._pools[-1].shutdown(wait=False)  # it finishes what it has
            self._pools.append(self._new_pool())

    def close(self) -> None:
        """End all workers after their present task; a wait for a batch then raises a RunError."""
        self._end(self._pools)  # no function of the module: at exit that may be gone

    @staticmethod
    def _end(pools: list[Any]) -> None:
        """Cancel what has not begun and wait for the rest; also at garbage collection and exit."""
        ended = pools[:]
        pools.clear()  # an empty list tells a waiting thread that the loader was closed
        for pool in ended:
            pool.shutdown(cancel_futures=True)

    def _await(self, pending: deque[Pending]) -> LoadedBatch:
        try:
            loaded = pending[0].loaded.result()
        except CancelledError as error:
            raise RunError("the loader was closed while a batch was awaited") from error
        pending.popleft()
        return loaded

    def _submit_from(
        self, requests: Iterator[BatchRequest], held: BatchRequest | None, pending: deque[Pending]
    ) -> BatchRequest | None:
        """Submit requests while there is room; returns the one that was drawn but did not fit."""
        while len(pending) < self.setting.prefetch:
            request = held if held is not None else next(requests, None)
            if request is None:
                return None
            num_bytes = self.loader.batch_bytes(request.rows)
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            if pending and sum(item.num_bytes for item in pending) + num_bytes > self.max_bytes:
                return request
            held = None
            try:
                pending.append(Pending(request, num_bytes, self._submit(request)))
            except (OSError, EOFError, RuntimeError) as error:
                remedy = "where no thread or process can be started, use fewer num_workers, or raise the limits (`ulimit -a`)"
                raise RunError(f"workers cannot take a batch: {first_line(error)}; {remedy}") from error
        return held

    def _pool(self) -> Any:
        if not self._pools:
            self._pools += [_threads(1, "mmlab-collate"), self._new_pool()]
        return self._pools[-1]

    def _new_meter(self) -> StageMeter:
        num_workers, ahead = self.setting
        num_workers = max(1, min(num_workers, ahead) if self.in_turns else num_workers)  # that can have work
        shared = self.in_turns or not self.setting.num_workers
        stages = {"read": num_workers, "decode": num_workers, "collate": num_workers if shared else 1}
        return StageMeter(stages | ({"copy": 1} if self.copier.has_work else {}), shared=shared)


class Turns:
    """Lets at most `limit` threads work at the same time; each works `with` it."""

    def __init__(self) -> None:
        self.limit, self._num_working, self._changed = 1, 0, threading.Condition()

    def allow(self, limit: int) -> None:
        """Change the limit; threads that work already go on."""
        with self._changed:
            self.limit = limit
            self._changed.notify_all()

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_working < self.limit)
            self._num_working += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_working -= 1
            self._changed.notify()


class ThreadBackend(Backend):
    """Loads with threads of this process, which live for an epoch; each takes its share of every batch.

    While training waits, all of them work; else as few as keep two batches ready. Each needs the interpreter's lock for
    a part of its work, and beside eight of them the thread that starts a GPU's operations gets it late: epochs took half
    as long again (docs/internals/gpu.md).

    More threads than cores would overlap reading with decoding, but cost 8 % of the speed if files are in
    memory. Samples that are quick to load (from the cache) are left to the thread that collates: several
    threads would spend more time on the interpreter's lock than they save.
    """

    in_turns = False
    _is_quick = False  # whether the last samples were quick to load

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = Turns()

    def ram_bytes(self, setting: Setting) -> int:
        """Memory that a setting may take: batches, and two images with room to decode for each thread."""
        image_bytes = 3 * self.loader.dataset.most_pixels
        return setting.prefetch * self._largest_bytes + setting.num_workers * 2 * image_bytes

    def _new_pool(self) -> Executor:
        if not self._pools:  # else the number of workers changes in mid-epoch
            self._upcoming = Upcoming()
        return _threads(self.setting.num_workers, "mmlab-load")

    def _submit(self, request: BatchRequest) -> Future[LoadedBatch]:
        num_samples, pixels, pool = len(request.rows), self.loader.pixels(request), self._pool()
        # Each worker decodes its share of a batch, so that the batch is ready soon. Loading a sample from the
        # cache takes no longer than handing it over, so with a cache a thread takes whole batches.
        share = -(-num_samples // self.setting.num_workers)
        size = share if self.loader.dataset.cache is None else num_samples
        slices = [range(num_samples)[start : start + size] for start in range(0, num_samples, size)]
        self._upcoming.extend(request.rows)
        parts = [] if self._is_quick else [pool.submit(self._load, request, part, pixels) for part in slices]
        return self._pools[0].submit(self._collate, request, parts, pixels)

    def _await(self, pending: deque[Pending]) -> LoadedBatch:
        num_ready, limit = sum(item.loaded.done() for item in pending), self._turns.limit
        if not num_ready:
            self._turns.allow(self.setting.num_workers)
        loaded = super()._await(pending)
        limit += int(np.sign(_NUM_READY - num_ready))  # one more worker while too few batches are ready
        self._turns.allow(min(max(1, limit), self.setting.num_workers))
        return loaded

    def _load(self, request: BatchRequest, places: range, pixels: NDArray[np.uint8]) -> list[LoadedSample]:
        with self._turns:
            samples, busy_s = self.loader.load_part(request, places, pixels, self._upcoming)
        self._is_quick = sum(busy_s.values()) < _QUICK_S * len(places)
        for stage, seconds in busy_s.items():
            self.meter.add(stage, len(places), seconds)
        return samples

    def _collate(self, request: BatchRequest, parts: list[Future], pixels: NDArray[np.uint8]) -> LoadedBatch:
        samples = [sample for part in parts for sample in part.result()]
        samples = samples or self._load(request, range(len(request.rows)), pixels)
        return finish(self.loader.collate(request, samples, pixels), self.meter, self.copier)

    def _abandon(self, pending: deque[Pending]) -> None:
        self.close()

    def close(self) -> None:
        """End all threads after their present task; a wait for a batch then raises a RunError."""
        self._turns.allow(self.setting.num_workers)
        super().close()


def finish(loaded: LoadedBatch, meter: StageMeter, copier: Copier) -> LoadedBatch:
    """Record the times of the stages, pin the batch and send it to the device."""
    for stage, busy_s in loaded.busy_s.items():
        meter.add(stage, len(loaded.request.rows), busy_s)
    if loaded.batch is None or not copier.has_work:
        return loaded
    started = time.perf_counter()
    loaded = loaded._replace(batch=copier(loaded.batch))
    meter.add("copy", len(loaded.request.rows), time.perf_counter() - started)
    return loaded


class Copier:
    """Pins batches and copies them to a device.

    Copies to a CUDA device run on their own stream, while the device computes; `wait_for_copies` makes the current
    stream wait for them without blocking the CPU.

    Args:
        pin: page-lock the host's batch first; only from page-locked memory is a copy to a GPU asynchronous.
        device: where batches go; None leaves them in host memory.

    Raises:
        OptionError: not a device of this machine.
    """

    def __init__(self, *, pin: bool, device: torch.device | str | None = None) -> None:
        self.pin = pin
        self.device = None if device is None else torch.device(resolve_device(str(device)))
        self.has_work = pin or self.device is not None  # whether batches are changed at all
        on_gpu = self.device is not None and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None

    def __call__(self, batch: Batch) -> Batch:
        """The batch, pinned and on its way to the device; for any thread."""
        if self.pin and not batch.pixel_values.is_pinned():
            batch = batch.pin_memory()
        if self.device is None:
            return batch
        with torch.cuda.stream(self._stream):  # does nothing where there is no stream
            return batch.to(self.device, non_blocking=True)

    def wait_for_copies(self, batch: Batch) -> None:
        """Let the current stream wait for the copies; for the thread that trains."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in batch.tensors():
            tensor.record_stream(current)  # keep the memory until the current stream is done with it


def _threads(number: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, name, _begin_thread, (torch.get_num_threads(),))


def _begin_thread(num_threads: int) -> None:
    """Let this thread compute on one core and, when woken, wait for a free core instead of preempting.

    Otherwise torch's operations in each thread would use all cores and compete with training: the processors
    of conversations slowed it by a fifth. This setting also applies to threads that begin later, so another
    thread resets it.

    Each batch that training takes wakes the threads that load the next one. On busy cores they would preempt
    the very thread that woke them: 7 ms per batch were measured, 0.04 ms without. A thread's share of the
    cores stays the same.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # not allowed here: slower, not wrong
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.get_num_threads()  # else torch would read the number again later
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    back.start()
    back.join()
