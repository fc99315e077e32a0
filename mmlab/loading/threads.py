"""The `threads` backend: every stage has threads of its own in this process, and a queue before it.

Samples pass through read and decode in any order; batches come out in the plan's. At most `prefetch` batches are under
way or ready, few encoded images wait for a decoding thread, and a batch that does not fit into `max_bytes` beside the
others waits. With `num_workers=0` the caller does all the work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmlab.errors import RunError
from mmlab.loading.copying import Copier
from mmlab.loading.stages import StageMeter
from mmlab.loading.work import Done, Job, Recipe, Setting

if TYPE_CHECKING:
    from numpy.typing import NDArray

_JOIN_S = 5.0  # a thread stuck in a read for longer is left behind, to end with the process


class Channel:
    """A queue between stages: `put` waits for room, `get` for an item; after `close`, `get` gives None at once."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._items: deque[Any] = deque()
        self._closed = False
        lock = threading.Lock()
        self._filled, self._emptied = threading.Condition(lock), threading.Condition(lock)

    def put(self, item: Any) -> None:
        """Append an item as soon as there is room; nothing is kept after `close`."""
        with self._emptied:
            while self.capacity is not None and len(self._items) >= self.capacity and not self._closed:
                self._emptied.wait()
            if not self._closed:
                self._items.append(item)
                self._filled.notify()

    def put_all(self, items: Sequence[Any]) -> None:
        """Append items to a queue without a limit: their takers are woken once."""
        assert self.capacity is None
        with self._filled:
            if not self._closed:
                self._items.extend(items)
                self._filled.notify(len(items))

    def get(self) -> Any:
        """The oldest item as soon as there is one; None after `close`."""
        with self._filled:
            while not self._items and not self._closed:
                self._filled.wait()
            if self._closed:
                return None
            self._emptied.notify()
            return self._items.popleft()

    def close(self) -> None:
        """Let go of what is queued and wake everybody who waits."""
        with self._filled:
            self._closed = True
            self._items.clear()
            self._filled.notify_all()
            self._emptied.notify_all()


@dataclass(slots=True, eq=False)
class _Ticket:
    """A job under way."""

    job: Job
    num_bytes: int
    made: list[Any]  # one Made a row, as far as they are done
    num_left: int
    pixels: NDArray[np.uint8] | None  # memory for images from the cache
    ready: threading.Event = field(default_factory=threading.Event)
    done: Done | None = None
    error: BaseException | None = None


class _Stage(NamedTuple):
    name: str
    source: Channel
    sink: Channel | None
    work: Callable[..., Any]  # (ticket, ...) -> what goes into the sink; None: nothing yet


class ThreadBackend:
    """Does jobs with threads; `run` starts them, and ends them however it is left.

    Args:
        recipe: what to do.
        num_workers: threads that decode, and as many that read; 0 works in the caller's thread.
        prefetch: batches under way or ready, beyond the one in use.
        copier: pins, and copies to the device.
        max_bytes: limit on the padded bytes of the batches under way; one is always allowed.
    """

    def __init__(
        self, recipe: Recipe, *, num_workers: int, prefetch: int, copier: Copier, max_bytes: int
    ) -> None:
        self.recipe, self.num_workers, self.prefetch = recipe, num_workers, prefetch
        self.copier, self.max_bytes = copier, max_bytes
        self._largest_bytes = 0  # of the batches so far
        self._lock = threading.Lock()
        self._under_way: deque[_Ticket] = deque()
        self._stages: list[_Stage] = []
        self._threads: list[threading.Thread] = []
        self.meter = self._new_meter()

    def run(self, jobs: Iterator[Job]) -> Generator[Done]:
        """Outcomes in the order of `jobs`, which are drawn in the caller's thread, `prefetch` ahead."""
        self.meter = self._new_meter()
        if not self.num_workers:
            yield from map(self._do_here, jobs)
            return
        under_way = self._under_way = deque()
        self._start()
        try:
            held = self._submit_from(jobs, None, under_way)
            while under_way:
                under_way[0].ready.wait()
                ticket = under_way.popleft()
                if ticket.error is not None:
                    raise ticket.error
                held = self._submit_from(jobs, held, under_way)
                assert ticket.done is not None
                yield ticket.done
        finally:
            self.close()

    def resize(self, setting: Setting) -> None:
        """Change the number of threads and batches; during `run` as well, from the same thread."""
        self.num_workers, self.prefetch = setting
        if self._threads:
            self._stages[1].source.capacity = self.num_workers
            self._start_threads()
        self.meter.num_threads |= dict.fromkeys(("read", "decode"), self.num_workers)

    def ram_bytes(self, setting: Setting) -> int:
        """Memory that a setting may take: batches, and two images with room to decode for each thread."""
        records = self.recipe.dataset.records
        num_pixels = int((records.height.astype(np.int64) * records.width).max(initial=0))
        return setting.prefetch * self._largest_bytes + setting.num_workers * 2 * 3 * num_pixels

    def close(self) -> None:
        """End the threads at once, but for the samples in hand; whoever waits for a batch is told."""
        if not self._stages:
            return
        atexit.unregister(self.close)
        for stage in self._stages:
            stage.source.close()
        for ticket in list(self._under_way):
            if not ticket.ready.is_set():
                ticket.error = RunError("the loader was closed while a batch was awaited")
                ticket.ready.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._stages, self._threads = [], []

    def _new_meter(self) -> StageMeter:
        num_threads = max(1, self.num_workers)
        stages = {"read": num_threads, "decode": num_threads, "collate": 1}
        if self.copier.has_work:
            stages["copy"] = 1
        return StageMeter(stages, shared=not self.num_workers)

    def _do_here(self, job: Job) -> Done:
        done = self.recipe.run(job)
        for stage, busy_s in done.busy_s.items():
            self.meter.add(stage, len(job.rows), busy_s)
        if done.batch is not None and self.copier.has_work:
            started = time.perf_counter()
            done = done._replace(batch=self.copier(done.batch))
            self.meter.add("copy", len(job.rows), time.perf_counter() - started)
        return done

    def _start(self) -> None:
        to_read, to_decode, to_collate = Channel(), Channel(self.num_workers), Channel()
        to_copy = Channel() if self.copier.has_work else None
        self._stages = [
            _Stage("read", to_read, to_decode, self._read),
            _Stage("decode", to_decode, to_collate, self._decode),
            _Stage("collate", to_collate, to_copy, self._collate),
        ]
        if to_copy is not None:
            self._stages.append(_Stage("copy", to_copy, None, self._copy))
        atexit.register(self.close)  # a daemon's thread must not meet a half-dismantled interpreter
        self._start_threads()

    def _start_threads(self) -> None:
        """Start the threads that are missing."""
        running = {thread.name for thread in self._threads if thread.is_alive()}
        for stage in self._stages:
            for number in range(self.num_workers if stage.name in ("read", "decode") else 1):
                name = f"mmlab-{stage.name}-{number}"
                if name not in running:
                    thread = threading.Thread(
                        target=self._serve, args=(stage, number), name=name, daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def _submit_from(self, jobs: Iterator[Job], held: Job | None, under_way: deque[_Ticket]) -> Job | None:
        """Begin jobs while there is room; gives back the one that was drawn and did not fit."""
        while len(under_way) < self.prefetch:
            job = held if held is not None else next(jobs, None)
            if job is None:
                return None
            num_bytes = self.recipe.batch_bytes(job.rows)
            self._largest_bytes = max(self._largest_bytes, num_bytes)
            if under_way and sum(ticket.num_bytes for ticket in under_way) + num_bytes > self.max_bytes:
                return job
            held = None
            ticket = _Ticket(job, num_bytes, [None] * len(job.rows), len(job.rows), self.recipe.pixels(job))
            under_way.append(ticket)
            size = self._num_at_once(len(job.rows))
            starts = range(0, len(job.rows), size)
            self._stages[0].source.put_all(
                [(ticket, range(start, min(start + size, len(job.rows)))) for start in starts]
            )
        return held

    def _num_at_once(self, num_samples: int) -> int:
        """How many samples of a batch pass from stage to stage together.

        Handing over costs about 50 us, as much as a sample from the cache; decoding one takes far longer, so that
        threads share a batch more evenly in small parts, and few encoded images wait.
        """
        most, parts = (8, 4) if self.recipe.dataset.cache is None else (32, 1)
        return max(1, min(most, num_samples // (parts * self.num_workers)))

    def _serve(self, stage: _Stage, number: int) -> None:
        """A thread's life: it ends when the channel closes or fewer threads are wanted."""
        samples_each = stage.name in ("read", "decode")
        _let_others_go_on()
        while not samples_each or number < self.num_workers:
            item = stage.source.get()
            if item is None:
                return
            ticket = item[0]
            started = time.perf_counter()
            try:
                goes_on = stage.work(*item)
            except BaseException as error:  # raised again in the thread that asked for the batch
                ticket.error = error
                ticket.ready.set()
                continue
            num_samples = len(item[1] if samples_each else ticket.job.rows)
            self.meter.add(stage.name, num_samples, time.perf_counter() - started)
            if goes_on is None:
                continue
            if stage.sink is not None:
                stage.sink.put(goes_on)
            else:
                ticket.ready.set()

    def _read(self, ticket: _Ticket, places: range) -> tuple:
        rows, pixels = ticket.job.rows, ticket.pixels
        found = [self.recipe.read(rows[place], None if pixels is None else pixels[place]) for place in places]
        return ticket, places, found

    def _decode(self, ticket: _Ticket, places: range, found: list[Any]) -> tuple | None:
        for place, content in zip(places, found, strict=True):
            ticket.made[place] = self.recipe.sample(ticket.job, ticket.job.rows[place], content)
        with self._lock:
            ticket.num_left -= len(places)
            return None if ticket.num_left else (ticket,)

    def _collate(self, ticket: _Ticket) -> tuple:
        made, pixels = ticket.made, ticket.pixels
        ticket.made, ticket.pixels = [], None  # samples end here, not in the thread that trains
        ticket.done = self.recipe.finish(ticket.job, made, pixels=pixels)
        return (ticket,)

    def _copy(self, ticket: _Ticket) -> tuple:
        assert ticket.done is not None
        if ticket.done.batch is not None:
            ticket.done = ticket.done._replace(batch=self.copier(ticket.done.batch))
        return (ticket,)


def _let_others_go_on() -> None:
    """Let this thread, when it is woken, wait for a free core instead of taking one away.

    Each batch that training takes wakes the threads that fill its place. On busy cores they would push aside the very
    thread that woke them: 7 ms a batch were measured, 0.04 ms without. A thread's share of the cores stays the same.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # not allowed here: slower, not wrong
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
