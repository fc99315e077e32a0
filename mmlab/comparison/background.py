"""A comparison in a process of its own, so that the notebook's kernel stays free while it runs.

`start_compare` returns at once. The child writes the run's events to files and nothing else is shared: the
parent follows those files, a crash of one process does not affect the other, and the notebook's own Python
does not disturb the measured times (docs/decisions/0004-training-runs-in-its-own-process.md has the figures).
Starting costs the import of torch in the child, a few seconds.

The child ends with its parent: a pipe between them stays open, and when it breaks, because the kernel was
restarted or killed, the child stops as if it had been asked to. A child started with `detached` continues,
and `find_run` gives a handle on it again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

from mmlab.comparison.options import COMPARED
from mmlab.comparison.result import Comparison, load_comparison
from mmlab.errors import USER_ERRORS, DataError, OptionError, RunError, with_notes
from mmlab.machine import describe_process, end_with_parent, find_process, process_runs, share_cores
from mmlab.runs.control import CONTROL, PHASE, Control, replace_file, send
from mmlab.runs.folders import COMPARISON, COMPARISON_FILES, exclusive_folder, folder_now, move_earlier_aside

_POLL_S = 0.05  # how often a run is looked at while it is waited for
LOG, PROCESS, OUTCOME = "log.txt", "process.json", "outcome.json"

_latest: dict[Path, BackgroundRun] = {}  # the last run started in each folder


class BackgroundRun:
    """A handle on a comparison in another process. Safe to use from any thread.

    Made by `start_compare` and `find_run`.

    Attributes:
        folder: where the run writes; views may follow it.
        job: `data`, `schedulers` and `options` as given, as far as JSON can express them.
        asked_to_stop: whether this handle was told to stop the run.
    """

    def __init__(self, folder: Path, about: dict[str, Any], child: subprocess.Popen[bytes] | None) -> None:
        self.folder, self.job = folder, about["job"]
        self.asked_to_stop = False
        self._identity, self._child = about["process"], child

    @property
    def folder_now(self) -> Path:
        """Where the run's files are: a later run in the folder has moved them to `previous-N`."""
        return folder_now(self.folder, PROCESS, lambda text: json.loads(text)["process"] == self._identity)

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped` or `failed`."""
        return "running" if self._is_alive() else self._outcome()["status"]

    @property
    def error(self) -> str | None:
        """The traceback of a failed run, or the end of its log where there is none."""
        return None if self._is_alive() else self._outcome().get("traceback")

    def sleep(self, seconds: float) -> None:
        """Wait this long, or until the run ends."""
        until_s = time.monotonic() + seconds
        while self._is_alive() and time.monotonic() < until_s:
            time.sleep(min(seconds, _POLL_S))

    def ask_to_stop(self) -> None:
        """Ask for a clean stop after the current step; returns at once.

        A second call interrupts the step. Harmless if the run has ended.
        """
        if self._is_alive():
            self.asked_to_stop = True
            with contextlib.suppress(OSError):  # the folder is gone
                send(self.folder, "stop")
            self._signal(signal.SIGINT)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask for a clean stop after the current step, and wait; kill after `timeout_s`.

        Harmless if the run has ended.
        A run on another machine is asked through its control file only, and never killed.
        """
        self.ask_to_stop()
        self.sleep(timeout_s)
        if self._is_alive() and self._signal(signal.SIGKILL):
            self.sleep(10)
        self._let_go()

    def wait(self) -> Comparison:
        """Wait for the end and return the result. Interrupting the waiting cell stops the run cleanly.

        Raises:
            DataError, OptionError: the data or options cannot be used.
            RunError: the run failed, or was stopped before there was a result.
        """
        try:
            self.sleep(math.inf)
        except KeyboardInterrupt:
            self.stop()
        self._let_go()
        outcome = self._outcome()
        if outcome["status"] == "failed":
            if kind := USER_ERRORS.get(outcome.get("error", "")):
                raise kind(outcome["message"])
            message, trace = outcome["message"], outcome["traceback"]
            raise RunError(f"the run failed: {message}\n{trace.removeprefix(message)}".strip())
        folder = self.folder_now
        if not (folder / COMPARISON).exists():
            raise RunError("the run was stopped before every scheduler had finished an epoch: no result")
        return load_comparison(folder)

    def _is_alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return process_runs(self._identity) and not (self.folder / OUTCOME).exists()

    def _signal(self, number: int) -> bool:
        """Send a signal to the run's process if it is on this machine; returns whether it was sent."""
        with contextlib.suppress(psutil.Error):  # ended, or another user's, who reads the control file
            if (process := find_process(self._identity)) is not None:
                process.send_signal(number)
                return True
        return False

    def _let_go(self) -> None:
        """Close the pipe to the child, once it has ended."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def _outcome(self) -> dict[str, Any]:
        """How the process ended, from its outcome file; a killed process leaves none."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder_now / OUTCOME).read_text())
        if self.asked_to_stop:
            return {"status": "stopped"}
        code = "" if self._child is None else f" with exit code {self._child.returncode}"
        why = "without an error message" if self.folder.is_dir() else f"after {self.folder} was removed"
        kept = ""
        if (self.folder_now / COMPARISON).exists():
            kept = f"; load_comparison({str(self.folder)!r}) has the epochs that all schedulers finished"
        message = trace = f"its process ended{code} {why}{kept}"
        with contextlib.suppress(FileNotFoundError):
            if log := (self.folder_now / LOG).read_text(errors="replace")[-4000:]:
                trace = f"{message}\nIts log ends:\n{log}"
        return {"status": "failed", "message": message, "traceback": trace}


def start_compare(
    data: Any, schedulers: Any = COMPARED, *, out: str | Path, detached: bool = False, **options: Any
) -> BackgroundRun:
    """Start `mmlab.compare(data, schedulers, out=out, **options)` in a fresh interpreter and return at once.

    A run that this process started in the same folder and that is still running is stopped first.

    Args:
        detached: the run continues when this process ends.

    Raises:
        OptionError: an argument cannot be sent to another process, or another process's run uses the folder. Options
            and data that cannot work are errors of `BackgroundRun.wait`.
    """
    folder = Path(out)
    try:
        sent = pickle.dumps((data, schedulers, {**options, "out": str(out)}, detached))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(f"cannot send this to another process ({error}); give paths and names") from error
    if folder.resolve() in _latest:
        _latest[folder.resolve()].stop(timeout_s=10)
    ours = (LOG, PROCESS, OUTCOME, PHASE, CONTROL)
    with exclusive_folder(folder):  # fails while a run of another process uses the folder
        # move aside an earlier run's files now, so that followers of the new run do not see them
        if any((folder / name).exists() for name in COMPARISON_FILES):
            move_earlier_aside(folder, (*COMPARISON_FILES, *ours))
        for name in ours:
            (folder / name).unlink(missing_ok=True)
    with (folder / LOG).open("wb") as log:
        # unbuffered: the log has all that was printed, however the process ends
        call = [sys.executable, "-u", "-m", "mmlab.comparison.background"]
        # in a session of its own: interrupting a cell of the notebook must not interrupt the run
        child = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    about = {"process": describe_process(child.pid), "job": job_of(data, schedulers, options)}
    replace_file(folder / PROCESS, json.dumps(about, indent=2, default=str))
    _latest[folder.resolve()] = run = BackgroundRun(folder, about, child)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has died already: its log says why
        child.stdin.write(sent)
        child.stdin.flush()
    return run


def job_of(data: Any, schedulers: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as far as JSON can express them: data are a path, or None and a mark, schedulers names and marks."""
    place = str(data) if isinstance(data, str | Path) else None
    if place is not None and "://" not in place:
        place = os.path.abspath(os.path.expanduser(place))
    given = schedulers.items() if isinstance(schedulers, Mapping) else ()
    marked = {f"scheduler {name}": repr(each) for name, each in given}
    if place is None and data is not None:
        marked["data in memory"] = repr(data)
    told = {name: f"{text:.80} {crc32(text.encode()):x}" for name, text in marked.items()}
    return {"data": place, "schedulers": list(schedulers), "options": {**options, **told}}


def find_run(folder: str | Path) -> BackgroundRun | None:
    """A handle on the last run that any process started in a folder; None if there was none."""
    folder = Path(folder)
    own, path = _latest.get(folder.resolve()), folder / PROCESS
    if not path.exists():
        return own
    try:
        found = BackgroundRun(folder, json.loads(path.read_text()), None)
        found._is_alive()  # reads what identifies the process
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it, and start the run again") from error
    return own if own is not None and own._identity == found._identity else found


def _child() -> None:
    """Make the call that is read from standard input, and record how it ended."""
    # a notebook's kernel ignores interrupts between cells, and a child started by a button inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    share_cores()
    # before torch is imported: the parent may block until the pipe is read
    data, schedulers, options, detached = pickle.load(sys.stdin.buffer)
    outcome: dict[str, Any] = {"status": "done"}
    try:
        if not detached:
            threading.Thread(target=end_with_parent, args=(signal.SIGINT,), daemon=True).start()
        control = Control(options["out"], obey_earlier=True)
        control.report_phase("importing torch")
        import mmlab

        if mmlab.compare(data, schedulers, **options, control=control).interrupted:
            outcome["status"] = "stopped"
    except KeyboardInterrupt:
        outcome["status"] = "stopped"
    except Exception as error:
        traceback.print_exc()
        outcome |= {"status": "failed", "error": type(error).__name__, "message": with_notes(error)}
        outcome["traceback"] = traceback.format_exc()
    replace_file(Path(options["out"]) / OUTCOME, json.dumps(outcome, indent=2))
    # views show a run that goes on as long as its process does, and tearing down torch takes Python seconds
    os._exit(0)


if __name__ == "__main__":
    _child()
