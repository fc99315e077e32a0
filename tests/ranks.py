"""Ranks for tests: functions called in real processes, forked from one server that has torch and mmlab imported.

A rank starts in a fraction of a second, where a fresh interpreter imports torch for five. Ranks are joined by gloo over a
file, and have the variables that `torchrun` sets. Every rank is killed when its test fails, ends or takes too long, and when
the process of the tests itself is killed.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from torch import distributed

from mmlab.cli.main import main
from mmlab.comparison import background
from tests.processes import free_port

LIMIT_S = 240.0  # of a whole test, on the busiest machine
_GRACE_S = 2.0  # for the others to say what they saw of a failure
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
    "PIL.Image",
    "mmlab.comparison.train",
    "mmlab.cli.main",
    "pytest",
    "tests.batches",
    "tests.planned_once",
]
_CONTEXT.set_forkserver_preload(_PRELOADED)


class Ranks:
    """Processes that were started together; see `started_ranks`."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._said: list[Connection] = []

    def start(
        self, function: Callable[..., Any], num_ranks: int, arguments: tuple[Any, ...], store: str
    ) -> None:
        port = free_port()
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if num_ranks > 1:
                variables |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            process = _CONTEXT.Process(
                target=_on_rank,
                args=(function, arguments, theirs, variables, store, rank, num_ranks),
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._said.append(ours)

    def results(self, timeout_s: float = LIMIT_S) -> list[Any]:
        """What every rank returned, by rank.

        Raises:
            AssertionError: a rank failed, was killed, or was not ready in time; with what each of them said.
        """
        found: dict[int, Any] = {}
        wrong: dict[int, str] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(found) + len(wrong) < len(self._said):
            left = {pipe: rank for rank, pipe in enumerate(self._said) if rank not in found | wrong}
            ready = wait(list(left), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                wrong |= dict.fromkeys(left.values(), "was not ready in time") if not wrong else {}
                break
            for pipe in ready:
                rank = left[pipe]  # type: ignore[index]
                try:
                    value, problem = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(_GRACE_S)
                    value, problem = None, f"ended with code {self.processes[rank].exitcode}"
                if problem is None:
                    found[rank] = value
                else:
                    wrong[rank] = problem
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        assert not wrong, "\n".join(f"rank {rank}: {problem}" for rank, problem in sorted(wrong.items()))
        return [found[rank] for rank in range(len(self._said))]

    def kill(self) -> None:
        """End whatever is left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextmanager
def started_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, joins: bool = True
) -> Iterator[Ranks]:
    """Ranks that call a function of a module; they are killed at the end of the context.

    Args:
        arguments: what can be pickled; all ranks get the same.
        joins: make a process group for them; else they find the variables of `torchrun` and make their own.
    """
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks.start(function, num_ranks, arguments, f"file://{folder}/store" if joins else "")
            yield ranks
        finally:
            ranks.kill()


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    joins: bool = True,
    timeout_s: float = LIMIT_S,
) -> list[Any]:
    """Call a function on several ranks; returns what each returned, see `started_ranks`."""
    with started_ranks(function, num_ranks, *arguments, joins=joins) as ranks:
        return ranks.results(timeout_s)


def mmlab_command(arguments: list[str], printed: Path) -> int:
    """For a rank: the exit code of an `mmlab` command, whose standard error is written to a file."""
    with printed.open("w") as file, redirect_stderr(file):
        try:
            return main(arguments)
        except SystemExit as end:
            return int(end.code or 0)


def fork_background_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `start_compare` fork its process here, so that each run begins at once; how it ends is as before."""
    monkeypatch.setattr(
        background, "subprocess", SimpleNamespace(PIPE=subprocess.PIPE, Popen=_ForkedBackgroundRun)
    )


class _ForkedBackgroundRun:
    """What `start_compare` needs of `subprocess.Popen`."""

    def __init__(self, call: Sequence[str], *, stdout: BinaryIO, start_new_session: bool, **_: Any) -> None:
        assert call[-1] == background.__name__
        assert start_new_session
        theirs, ours = _CONTEXT.Pipe(duplex=False)
        self._process: Any = _CONTEXT.Process(
            target=_background_run, args=(theirs, stdout.name, dict(os.environ))
        )
        self._process.start()
        theirs.close()
        self.stdin = os.fdopen(os.dup(ours.fileno()), "wb")
        ours.close()
        self.pid = self._process.pid
        self._lock = threading.Lock()  # several threads ask

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    returncode = property(poll)

    def __del__(self) -> None:
        self.stdin.close()


def _background_run(given: Connection, log: str, variables: dict[str, str]) -> None:
    _begin(variables)
    os.setsid()
    os.dup2(given.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    background._child()


def end_with_parent() -> None:
    """Let this process be killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _begin(variables: dict[str, str]) -> None:
    """What each forked process does first."""
    end_with_parent()  # the server ends with the tests' process
    # which may be ignored where the tests were started
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= variables
    gc.freeze()  # what the server has imported stays
    torch.set_num_threads(1)


def _on_rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    said: Connection,
    variables: dict[str, str],
    store: str,
    rank: int,
    num_ranks: int,
) -> None:
    _begin(variables)
    try:
        if store:
            distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        value = function(*arguments)
        if store:
            distributed.destroy_process_group()
        said.send((value, None))
    except BaseException:
        said.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
