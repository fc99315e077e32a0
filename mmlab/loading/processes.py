"""The `torch` backend: torch's DataLoader with worker processes, each of which does whole batches.

Workers stay for the next epoch. One that dies is noticed within about 5 s (torch looks after that long without data)
and named with the sample it held; the batches that were not delivered are done again by new workers.

Workers are forked where that is safe: on Linux, before CUDA is in use. Elsewhere they start afresh and import the
classes they need; a class that was defined in a notebook cell cannot be imported, which is said before a worker fails
at it. The `threads` backend has no such limits.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mmlab.errors import OptionError, RunError
from mmlab.loading.copying import Copier
from mmlab.loading.stages import StageMeter
from mmlab.loading.work import Done, Job, Recipe, Setting

_MAX_DEATHS = 2  # of workers, without a batch delivered in between


class TorchBackend:
    """Does jobs with a DataLoader's worker processes.

    Args:
        recipe: what to do; has to be picklable where workers are not forked.
        num_workers: processes, at least 1.
        prefetch: batches under way or ready; every worker has its share, at least one.
        copier: pins (in torch's own thread), and copies to the device.
        max_bytes: limit on the padded bytes of the batches under way, as many as the first is large; every worker may
            have one.
        warn: takes a message when a worker has died.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        num_workers: int,
        prefetch: int,
        copier: Copier,
        max_bytes: int,
        warn: Callable[[str], None],
    ) -> None:
        self.recipe, self.num_workers, self.prefetch = recipe, num_workers, prefetch
        self.copier, self._warn = copier, warn
        self._jobs = _JobSampler()
        self._loader: DataLoader | None = None
        self._closing, self._is_awaited = threading.Lock(), False
        self._holding: Any = []  # the row that each of them works at, in shared memory; -1 between two samples
        self._num_deaths = self._batch_bytes = self._worker_bytes = 0
        self.max_bytes = max_bytes
        self.meter = self._new_meter()

    def run(self, jobs: Iterator[Job]) -> Generator[Done]:
        """Outcomes in the order of `jobs`, which are drawn in the caller's thread, `prefetch` ahead.

        Raises:
            OptionError: the dataset or the augmentation cannot reach a worker.
            RunError: workers die again and again.
        """
        self.meter, self._num_deaths = self._new_meter(), 0
        if (first := next(jobs, None)) is None:
            return
        self._batch_bytes = self.recipe.batch_bytes(first.rows)
        self._jobs.begin(chain([first], jobs))
        try:
            while not (yield from self._deliver()):
                self._loader = None
                self._jobs.begin_again()
        finally:
            self._jobs.begin(iter(()))  # torch keeps the sampler; it must not keep the caller

    def resize(self, setting: Setting) -> None:
        """Change the number of workers and batches: what is under way is finished, the rest is for new workers."""
        self.num_workers, self.prefetch = setting
        self.meter.num_threads |= dict.fromkeys(("read", "decode", "collate"), self.num_workers)
        self._jobs.paused = True

    def ram_bytes(self, setting: Setting) -> int:
        """Memory that a setting may take: batches, and what a worker was seen to have for itself."""
        for process in self._processes():
            if psutil.pid_exists(process.pid):
                self._worker_bytes = max(
                    self._worker_bytes, psutil.Process(process.pid).memory_full_info().uss
                )
        return setting.prefetch * self._batch_bytes + setting.num_workers * self._worker_bytes

    def close(self) -> None:
        """End the workers at once, also where a traceback still holds on to torch's iterator."""
        with self._closing:
            iterator, processes, is_awaited = self._iterator(), self._processes(), self._is_awaited
            self._loader = None
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        if iterator is not None and not is_awaited:  # else by who waits for it, in another thread
            iterator._shutdown_workers()

    def _iterator(self) -> Any:
        """Torch's, which stays from epoch to epoch; there is no public way to it, nor to its workers."""
        return None if self._loader is None else self._loader._iterator

    def _processes(self) -> list[Any]:
        """The workers, those included that have not begun."""
        iterator = self._iterator()
        return [] if iterator is None else list(iterator._workers)

    def _new_meter(self) -> StageMeter:
        return StageMeter(dict.fromkeys(("read", "decode", "collate"), self.num_workers), shared=True)

    def _deliver(self) -> Generator[Done, None, bool]:
        """Outcomes, until all are delivered (True), or workers must be started anew."""
        workers: Any = None
        while True:
            try:
                if workers is None:
                    with _no_warning_of_many_workers():
                        workers = _iter_elsewhere(self._open())
                done = self._next(workers)
            except (RuntimeError, OSError, EOFError) as error:
                if self._loader is None:
                    if workers is not None:
                        workers._shutdown_workers()
                    raise RunError("the loader was closed while a batch was awaited") from error
                self._report_deaths(error)
                return False
            if done is None:
                return not self._jobs.paused
            self._num_deaths = 0
            self._jobs.undelivered.popleft()
            for stage, busy_s in done.busy_s.items():
                self.meter.add(stage, len(done.job.rows), busy_s)
            yield done if done.batch is None else done._replace(batch=self.copier(done.batch))

    def _next(self, workers: Any) -> Done | None:
        """The next outcome; None after the last."""
        with self._closing:
            if self._loader is None:
                raise RuntimeError("closed")
            self._is_awaited = True
        try:
            return next(workers, None)
        finally:
            self._is_awaited = False

    def _open(self) -> DataLoader:
        if self._loader is None:
            context = multiprocessing.get_context(start_method(self.recipe))
            self._holding = context.RawArray("q", [-1] * self.num_workers)
            num_ahead = min(self.prefetch, self.max_bytes // self._batch_bytes)
            self._loader = DataLoader(
                _Worker(self.recipe, self._holding),
                batch_sampler=self._jobs,  # type: ignore[arg-type]
                collate_fn=_as_it_is,  # type: ignore[arg-type]
                num_workers=self.num_workers,
                prefetch_factor=max(1, num_ahead // self.num_workers),
                pin_memory=self.copier.pin,
                persistent_workers=True,
                multiprocessing_context=context,
                generator=torch.Generator(),  # making an iterator must not draw from the global generator
            )
        return self._loader

    def _report_deaths(self, error: Exception) -> None:
        """Warn of the workers that died, or raise where none did, or too many."""
        held_by = zip(self._processes(), self._holding, strict=True)
        dead = [(process.pid, row) for process, row in held_by if not process.is_alive()]
        if not dead:
            raise error
        records = self.recipe.dataset.records
        held = "; ".join(
            f"process {pid}, between two samples"
            if row < 0
            else f"process {pid}, with record {records.ids[row]!r} ({records.image_paths[row]})"
            for pid, row in dead
        )
        self._num_deaths += 1
        if self._num_deaths == _MAX_DEATHS:
            raise RunError(
                f"data workers were killed or crashed {_MAX_DEATHS} times without a batch in between: {held}; "
                "look at that record, and at the machine's free memory"
            ) from error
        self._warn(f"data workers were killed or crashed: {held}; new workers do their batches again")


@contextmanager
def _no_warning_of_many_workers() -> Iterator[None]:
    """More workers than cores, where reading is slow, are no mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def _iter_elsewhere(loader: DataLoader) -> Iterator[Done]:
    """An iterator, made in a thread of its own: torch lets one of the main thread raise there at any moment.

    A plain thread, as a worker forked from an executor's fails at its own end: it is told to wait for itself.
    """
    made: list[Iterator[Done]] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            made.append(iter(loader))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="mmlab-start")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return made.pop()


class _JobSampler:
    """What torch takes for a batch sampler: draws jobs and remembers those that were not delivered."""

    def __init__(self) -> None:
        self.undelivered: deque[Job] = deque()
        self.paused = False  # draws no more, until it begins again
        self._jobs: Iterator[Job] = iter(())

    def begin(self, jobs: Iterator[Job]) -> None:
        self._jobs, self.undelivered, self.paused = jobs, deque(), False

    def begin_again(self) -> None:
        self.begin(chain(self.undelivered, self._jobs))

    def __iter__(self) -> Iterator[Job]:
        while not self.paused and (job := next(self._jobs, None)) is not None:
            self.undelivered.append(job)
            yield job


class _Worker(Dataset):
    """What torch takes for a dataset: whole jobs are its items."""

    def __init__(self, recipe: Recipe, holding: Any) -> None:
        self._recipe, self._holding = recipe, holding

    def __getitems__(self, job: Job) -> Done:
        number = get_worker_info().id  # type: ignore[union-attr]

        def hold(row: int) -> None:
            self._holding[number] = row

        done = self._recipe.run(job, hold)
        hold(-1)
        return done


def _as_it_is(done: Done) -> Done:
    return done


def start_method(recipe: Recipe) -> str:
    """How worker processes may be started now: "fork" where that is safe, else "forkserver" or "spawn".

    Raises:
        OptionError: they cannot be forked, and something of the recipe cannot be imported by a fresh process.
    """
    methods = multiprocessing.get_all_start_methods()
    if sys.platform == "linux" and not torch.cuda.is_initialized():
        return "fork"
    try:
        interactive = not hasattr(sys.modules["__main__"], "__file__")
        unreachable = b"__main__" in pickle.dumps(recipe) and interactive
        reason = "it was defined in a notebook or an interactive session"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        unreachable, reason = True, str(error)
    if unreachable:
        raise OptionError(
            "worker processes cannot import the dataset, its cache or its augmentation: "
            f"{reason}; use backend='threads', or define it in a module"
        )
    return "forkserver" if "forkserver" in methods else "spawn"
