"""Run several ranks from a notebook or a program: real processes, started by torch's own launcher.

Ranks are never forks of this process, because a GPU context does not survive a fork. They are forked from a
server that has only imported torch and mmlab, so the first start waits some seconds for that import, and
later ones do not. The function they call must be in a module; they cannot find one that is defined in a
notebook cell.

An error in a rank is raised in the caller, with the rank and its own traceback, and the other ranks are
ended. An interrupt reaches all ranks once; each has 30 s to finish its step and write a checkpoint. On
several machines start `torchrun -m mmlab train CONFIG.toml` on each.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mmlab.errors import USER_ERRORS, OptionError, RunError, check_is, check_numbers
from mmlab.loading.workers import START_METHOD
from mmlab.machine import num_usable_cores, place_in_launch, share_cores
from mmlab.parallel.faults import broke_off

# signals that the launcher takes over
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# variables that the launcher sets for each rank
_OF_A_RANK = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_ASYNC.*)$"
)
# loggers that repeat each failure
_NOISY = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
_BERT = "transformers.models.bert.modeling_bert"  # of the models that mmlab builds; two seconds to import
_SHUTDOWN_S = 30  # for a rank that is asked to end, before it is killed


def run_on_ranks(
    function: Callable[..., Any], *arguments: Any, num_processes: int = 2, shows_progress: bool = False
) -> list[Any]:
    """Call a function in several processes, which have the environment variables that `torchrun` sets.

    Args:
        function: defined in a module, not in a notebook cell.
        arguments: picklable; all ranks get the same.
        shows_progress: leave rank 0's stderr on the terminal, for a progress bar.

    Returns:
        What each rank returned, by rank.

    Raises:
        DataError, OptionError: a rank raised it; or the function or an argument cannot be sent, or the number of
            processes is out of range.
        RunError: a rank failed otherwise, or was killed.
    """
    _check(function, arguments, num_processes)
    redirects = {rank: Std.OUT if shows_progress and rank == 0 else Std.ALL for rank in range(num_processes)}
    # torch 2.11 does not have this option
    shutdown: Any = {"shutdown_timeout": _SHUTDOWN_S} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    with tempfile.TemporaryDirectory(prefix="mmlab-ranks-") as folder, _undisturbed():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=f"ranks-{time.time_ns()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method=START_METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=redirects),
            **shutdown,
        )
        before = multiprocessing.active_children()
        # what `train_on` runs, and what plans batches; ranks import any other modules themselves
        preloaded = ["mmlab.comparison.train", "mmlab.schedule._dense_loops", "pandas", _BERT]
        multiprocessing.get_context(START_METHOD).set_forkserver_preload(preloaded)
        variables = {name: value for name, value in os.environ.items() if not _OF_A_RANK.match(name)}
        try:
            found = elastic_launch(config, _on_rank)(function, arguments, num_processes, variables)
        except ChildFailedError as failure:
            _raise(failure, Path(folder), config.run_id)
        except SignalException as stopped:
            for process in set(multiprocessing.active_children()).difference(before):
                process.kill()  # the launcher ends those that it knows: none while it is still starting them
            code = 128 + stopped.sigval
            raise (KeyboardInterrupt() if stopped.sigval == signal.SIGINT else SystemExit(code)) from None
    return [found[rank] for rank in range(num_processes)]


def _on_rank(
    function: Callable[..., Any], arguments: tuple[Any, ...], num_processes: int, variables: dict[str, str]
) -> Any:
    """What each process does; the launcher writes its error into a file."""
    # else Jupyter interrupts the ranks, then the launcher does: a second interrupt does not wait for the step
    os.setsid()
    caller: Any = multiprocessing.parent_process()
    threading.Thread(target=_follow, args=[caller], daemon=True).start()
    os.environ |= variables  # the server still has those from its own start
    np.random.seed()  # noqa: NPY002 - else all ranks would continue from the server's state
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_usable_cores() // num_processes))
    found = function(*arguments)
    if not caller.is_alive():
        raise SystemExit(1)  # the launcher's own code would wait until the result is read
    return found


def _follow(caller: Any) -> None:
    """If the caller is killed, end as after an interrupt: with a checkpoint, or at last without one."""
    caller.join()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_SHUTDOWN_S)
    os._exit(1)


def _raise(failure: ChildFailedError, logs: Path, run_id: str) -> NoReturn:
    """Raise the first error: one rank's failure makes others fail."""
    found = []
    for path in logs.glob(f"{run_id}_*/attempt_0/*/error.json"):
        with suppress(ValueError):  # the rank ended while it wrote the file
            about = json.loads(path.read_text("utf-8"))["message"]
            # an exchange that broke off follows from another rank's failure
            is_echo = broke_off(RuntimeError(about["message"]))
            found.append((is_echo, path.stat().st_mtime_ns, int(path.parent.name), about))
    if found:
        *_, rank, about = min(found, key=lambda each: each[:3])
        kind = USER_ERRORS.get(about["message"].partition(":")[0], RunError)
        raise kind(
            f"rank {rank} failed: {about['message']}\n\n{about['extraInfo']['py_callstack']}"
        ) from None
    rank, process = failure.get_first_failure()
    log = "".join(path.read_text(errors="replace") for path in logs.glob(f"{run_id}_*/*/{rank}/stderr.log"))
    message = f"rank {rank} ended without an exception: {process.message}\n\n{log[-2000:]}"
    raise RunError(message.rstrip()) from None


def _check(function: Callable[..., Any], arguments: tuple[Any, ...], num_processes: int) -> None:
    check_numbers({"num_processes": num_processes})
    if place_in_launch()[1] > 1:
        raise OptionError("this process is a rank already, and cannot start others")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise OptionError(
            "a rank imports the script that started it, and must not start others: put the call under "
            "if __name__ == '__main__':"
        )
    check_is("the first argument", function, "__call__", "a function")
    name = getattr(function, "__qualname__", "")  # a functools.partial has none
    in_a_cell = function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if in_a_cell or "<" in name:
        raise OptionError(f"{name} cannot be found by other processes; put it into a module and import it")
    try:
        pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(f"cannot send these arguments to other processes: {error}") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore what the launcher changes in this process: signal handlers and an environment variable."""
    share_cores()
    for name in _NOISY:
        logging.getLogger(name).disabled = True
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        with suppress(ValueError):  # only the main thread may set handlers, and only there were they changed
            for number, handler in handlers.items():
                signal.signal(number, handler)
