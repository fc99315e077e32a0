"""Pause, resume or stop a run from anywhere: a small file in the run's folder, read between two optimizer steps.

`send` replaces the file atomically; `Control`, in the training process, checks it after every step and waits
while it says pause. Whoever can write to the folder can steer the run: a notebook, a terminal, a kernel that
was restarted.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> control = Control(folder)
>>> send(folder, "stop")
>>> control.wait_if_paused_or_stop()
True

Costs: one `stat` of the file for every step, about two microseconds; the file is read only when it has changed.
Does not: interrupt a step, an evaluation or a read of a file; those are finished first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmlab.errors import check_name
from mmlab.machine import replace_file

CONTROL = "control.json"
PHASE = "phase.txt"  # what a run is doing before its first step, in words
POLL_S = 0.05  # how often a paused run checks whether it may continue
_LEVELS = {"resume": 0, "pause": 1, "stop": 2}  # the highest among the ranks applies to all


def send(folder: str | Path, command: str) -> None:
    """Tell the run that writes into `folder` to `pause`, `resume` or `stop`. Returns at once.

    The run obeys after the current step. A run that starts later ignores the command.

    Raises:
        OptionError: an unknown command.
        OSError: the folder does not exist or cannot be written to.
    """
    check_name("command to a run", command, _LEVELS)
    replace_file(Path(folder) / CONTROL, json.dumps({"command": command}))


def read_phase(folder: str | Path) -> str:
    """The last text of `Control.report_phase` for a run in this folder; empty if there is none."""
    with suppress(OSError):
        return (Path(folder) / PHASE).read_text()
    return ""


class Control:
    """The commands to a run, read by its training loop. Use from one thread.

    Args:
        folder: of the run. None reads no commands: only rank 0 reads them, for all ranks.
        obey_earlier: a command that is there already counts, too, not only those that come later. It was meant for
            an earlier run, unless whoever starts this one has removed such a file.
    """

    def __init__(self, folder: str | Path | None, *, obey_earlier: bool = False) -> None:
        self._path = None if folder is None else Path(folder) / CONTROL
        self._seen: tuple[int, int] | None = None  # inode and time of the file as last read
        self._wanted = "resume"
        if not obey_earlier and self.wanted:  # reading it makes it old
            self._wanted = "resume"
        self.paused_s = 0.0  # spent waiting so far
        self.stopped = False  # the last result of `wait_if_paused_or_stop`

    def report_phase(self, phase: str) -> None:
        """Tell views what the run is doing before its first step; does nothing if there is no folder."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                replace_file(self._path.with_name(PHASE), phase)

    @property
    def wanted(self) -> str:
        """The latest command; `resume` if there was none."""
        if self._path is not None:
            # no command yet, or none that `send` wrote
            with suppress(OSError, ValueError, KeyError, TypeError):
                status = os.stat(self._path)
                if (status.st_ino, status.st_mtime_ns) != self._seen:
                    self._seen = (status.st_ino, status.st_mtime_ns)
                    found = json.loads(self._path.read_text())
                    if found["command"] in _LEVELS:
                        self._wanted = found["command"]
        return self._wanted

    def wait_if_paused_or_stop(
        self,
        stopping: Callable[[], object] = lambda: False,
        *,
        agree: Callable[[float], float] = float,
        emit: Callable[[str, dict[str, Any]], object] = lambda kind, values: None,
    ) -> bool:
        """Wait while the run is paused; returns whether it is to stop. A pause emits two events.

        Args:
            stopping: another reason to stop, called after every step and repeatedly during a pause.
            agree: gives every rank the largest of the ranks' numbers (an all-reduce), so that all pause and
                stop at the same step.
            emit: takes the kind of an event, `pause` or `resume`, and its values.
        """
        started: float | None = None
        while (level := agree(_LEVELS["stop" if stopping() else self.wanted])) == _LEVELS["pause"]:
            if started is None:
                started = time.perf_counter()
                emit("pause", {})
            time.sleep(POLL_S)
        if started is not None:
            paused_s = time.perf_counter() - started
            self.paused_s += paused_s
            emit("resume", {"paused_s": paused_s})
        self.stopped = level == _LEVELS["stop"]
        return self.stopped
