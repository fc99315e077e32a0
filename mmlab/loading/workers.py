"""The `torch` backend: worker processes, each of which loads whole batches; tensors come back in shared memory.

Workers start from a fresh process (`forkserver`) and never from a copy of this one, in which other
threads may hold locks that nobody would release in the copy. So they import the classes they need; a class that was
defined in a notebook cell cannot be imported, which is reported before any worker starts. The `threads`
backend has no such limits.

Workers stay for the next epoch. One that dies is named with the sample it held; the batches that were not delivered are
loaded again by new workers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import psutil
import torch

from mmlab.errors import OptionError, RunError
from mmlab.loading.backends import Backend, Pending, Setting, finish
from mmlab.loading.batches import BatchRequest, LoadedBatch, SampleLoader

_MAX_DEATHS = 2  # of workers, without a batch delivered in between
# worker processes start from a server without threads
START_METHOD = "forkserver"


class ProcessBackend(Backend):
    """Loads with worker processes.

    Args:
        warn: takes a message when a worker has died.
    """

    def __init__(self, *args: Any, warn: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._warn = warn
        self._holding: Any = []  # process id and row of each worker, in shared memory; -1 between two samples
        self._retired: list[Any] = []  # workers of pools before the present one
        self._num_deaths = self._worker_bytes = 0
        self._num_abandoned = multiprocessing.get_context(START_METHOD).Value("q", 0)  # abandoned epochs

    def ram_bytes(self, setting: Setting) -> int:
        """Memory that a setting may take: batches, and the most that a worker was seen to use by itself."""
        for process in _processes(self._pools):
            if process.is_alive():
                own_bytes = psutil.Process(process.pid).memory_full_info().uss
                self._worker_bytes = max(self._worker_bytes, own_bytes)
        return setting.prefetch * self._largest_bytes + setting.num_workers * self._worker_bytes

    def resize(self, setting: Setting) -> None:
        """Change the numbers of workers and batches: new workers load what is not yet under way."""
        self._retired += _processes(self._pools)  # a pool forgets them when it shuts down
        super().resize(setting)

    def close(self) -> None:
        """End the workers at once."""
        processes, self._retired = [*self._retired, *_processes(self._pools)], []
        for process in processes:
            process.terminate()
        super().close()
        for process in processes:
            process.join()

    def _new_pool(self) -> Executor:
        content, num_workers = _pickled(self.loader), self.setting.num_workers
        context = multiprocessing.get_context(START_METHOD)
        preloaded = [__name__, "mmlab.data.dataset", "pandas", type(self.loader.dataset.tokenizer).__module__]
        context.set_forkserver_preload(preloaded + _libraries_of_main())
        self._holding = context.RawArray("q", [0, -1] * num_workers)
        arguments = (content, self._holding, context.Value("q", 0), self._num_abandoned)
        return ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=arguments)

    def _submit(self, request: BatchRequest) -> Future[LoadedBatch]:
        pool = self._pool()
        try:
            made = pool.submit(_load, request, self._num_abandoned.value)
        except BrokenProcessPool as error:
            made = Future()
            made.set_exception(error.with_traceback(None))  # raised when this batch is awaited
        # holds no reference to this backend, which ends its workers when it is garbage-collected
        meter, copier = self.meter, self.copier
        return self._pools[0].submit(lambda: finish(made.result(), meter, copier))

    def _abandon(self, pending: deque[Pending]) -> None:
        """Let the workers skip what is left.

        It is not cancelled: a pool that loses a worker while cancelled work is queued raises in its own
        thread (`terminate_broken` of Python 3.11).
        """
        with self._num_abandoned.get_lock():
            self._num_abandoned.value += 1
        for item in pending:
            item.loaded.cancel()

    def _await(self, pending: deque[Pending]) -> LoadedBatch:
        while True:
            try:
                loaded = super()._await(pending)
            except BrokenProcessPool as error:
                if not self._pools:
                    raise RunError("the loader was closed while a batch was awaited") from error
                self._report_deaths(error)
                error.__traceback__ = None  # futures keep the error, whose frames keep this backend alive
                for place, item in enumerate(pending):
                    pending[place] = item._replace(loaded=self._submit(item.request))
            except RuntimeError as error:  # torch's own, as in a container with its usual 64 MiB
                if "shared memory" not in str(error):
                    raise
                raise RunError(f"{error}; enlarge /dev/shm (--shm-size), or use backend='threads'") from error
            else:
                self._num_deaths = 0
                return loaded

    def _report_deaths(self, error: BrokenProcessPool) -> None:
        """Warn of the workers that died, or raise if that happens repeatedly."""
        processes = _processes(self._pools)
        super().close()  # the pool itself ends the workers that are left
        ended = [item for item in processes if item.exitcode not in (0, -signal.SIGTERM)] or processes
        records = self.loader.dataset.records
        rows = dict(zip(self._holding[::2], self._holding[1::2], strict=True))
        held = "; ".join(
            f"process {process.pid}, between two samples"
            if (row := rows.get(process.pid, -1)) < 0
            else f"process {process.pid}, with record {records.ids[row]!r} ({records.image_paths[row]})"
            for process in ended
        )
        self._num_deaths += 1
        if not any(rows):
            raise RunError(
                f"data workers could not start ({error}; their own message is above); a script that uses "
                "backend='torch' must begin its work under `if __name__ == '__main__':`"
            ) from error
        if self._num_deaths == _MAX_DEATHS:
            raise RunError(
                f"data workers were killed or crashed {_MAX_DEATHS} times without a batch in between: {held}; "
                "look at that record, and at the machine's free memory"
            ) from error
        self._warn(f"data workers were killed or crashed: {held}; new workers do their batches again")


def _libraries_of_main() -> list[str]:
    """Modules of installed libraries that a script imports, as each worker does (none runs a notebook).

    Modules beside the script are left to the workers: they may read the arguments of its command line.
    """
    main = sys.modules["__main__"]
    # lists, as other threads may import meanwhile
    values = list(vars(main).values()) if hasattr(main, "__file__") else []
    names: Any = [getattr(each, "__module__", None) or getattr(each, "__name__", None) for each in values]
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name in names if files.get(name, "").startswith(sys.prefix)]


def _processes(pools: list[Executor]) -> list[Any]:
    """The workers of some pools. There is no public way to them before Python 3.14."""
    return [process for pool in pools for process in (getattr(pool, "_processes", None) or {}).values()]


def _pickled(loader: SampleLoader) -> bytes:
    """The loader, pickled for a fresh process.

    Raises:
        OptionError: something of it cannot be pickled or imported.
    """
    try:
        content = pickle.dumps(loader)
        unreachable = b"__main__" in content and not hasattr(sys.modules["__main__"], "__file__")
        reason = "it was defined in a notebook or an interactive session"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        unreachable, reason = True, str(error)
    if unreachable:
        raise OptionError(
            "worker processes cannot import the dataset, its cache or its augmentation: "
            f"{reason}; use backend='threads', or define it in a module"
        )
    return content


# in a worker process: its loader, the function that records the present row, the number of abandoned epochs
_worker: Any = None


def _begin(content: bytes, holding: Any, num_begun: Any, num_abandoned: Any) -> None:
    """Make this process a worker."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with num_begun.get_lock():
        number, num_begun.value = num_begun.value, num_begun.value + 1

    def hold(row: int) -> None:
        holding[2 * number + 1] = row

    _worker = pickle.loads(content), hold, num_abandoned
    holding[2 * number] = os.getpid()


def _end_with_parent() -> None:
    """End this worker when its main process ends; otherwise it would wait for work for ever."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def _load(request: BatchRequest, num_abandoned_before: int) -> LoadedBatch:
    loader, hold, num_abandoned = _worker
    if num_abandoned.value != num_abandoned_before:
        raise RunError("the epoch of this batch was left")  # nobody waits for it
    loaded = loader.load(request, hold)
    hold(-1)
    return loaded
