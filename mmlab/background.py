"""A comparison in a process of its own, so that the notebook's kernel stays free while it runs.

`start_compare` returns at once. The child writes the run's events to files and nothing else is shared: the
parent follows those files, a crash of one does not touch the other, and the measured times are not disturbed
by the notebook's own Python. Starting costs the import of torch in the child, a few seconds.

The child ends with its parent: a pipe between them stays open, and when it breaks, because the kernel was restarted
or killed, the child stops as if it had been asked to.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from mmlab.comparison import Comparison, load_comparison
from mmlab.errors import DataError, MmlabError, OptionError, RunError
from mmlab.machine import share_cores

LOG = "log.txt"
_USER_ERROR = 2  # exit code of the child after a DataError or OptionError

_latest: dict[Path, BackgroundRun] = {}  # the last run started in each folder


class BackgroundRun:
    """A handle on a running comparison. Safe to use from any thread.

    Attributes:
        folder: where the comparison writes; views may follow `folder / "runs"`.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        assert process.stdin is not None
        self.folder = folder
        self._process, self._pipe = process, process.stdin
        self._stopped = False

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped` or `failed`."""
        code = self._process.poll()
        if code is None:
            return "running"
        if self._stopped:
            return "stopped"
        return "done" if code == 0 else "failed"

    @property
    def log(self) -> str:
        """What the child wrote to its terminal so far: progress, and the traceback of a failure."""
        return (self.folder / LOG).read_text(errors="replace")

    def sleep(self, seconds: float) -> None:
        """Wait so long, or less if the run ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask for a clean stop after the current step, and wait; kill after `timeout_s`. Harmless if it has ended."""
        if self._process.poll() is None:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._pipe.close()

    def wait(self) -> Comparison:
        """Wait for the end. An interrupt of the waiting cell stops the run cleanly.

        Raises:
            DataError, OptionError: what the user gave cannot be used.
            RunError: the run failed, or was stopped before every scheduler had finished an epoch.
        """
        try:
            code = self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            code = self._process.returncode
        self._pipe.close()
        if code == _USER_ERROR:
            kind, _, message = self.log.strip().splitlines()[-1].partition(": ")
            raise (DataError if kind == "DataError" else OptionError)(message)
        if code != 0 and self.state == "stopped":
            raise RunError(
                "the run was stopped before every scheduler had finished an epoch; nothing to compare"
            )
        if code != 0:
            raise RunError(f"the comparison failed with exit code {code}:\n{self.log[-4000:]}")
        return load_comparison(self.folder)


def start_compare(
    data: Any, schedulers: Any = ("random", "sorted", "bucket", "budget"), *, out: str | Path, **options: Any
) -> BackgroundRun:
    """Start `mmlab.compare(data, schedulers, out=out, **options)` in a fresh interpreter and return at once.

    A run that this process started in the same folder, and that still goes on, is stopped first.

    Raises:
        OptionError: something that cannot be sent to another process.
    """
    try:
        job = pickle.dumps((data, schedulers, {**options, "out": str(out)}))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"cannot send these arguments to another process ({error}); give paths and names"
        ) from error
    folder = Path(out)
    if folder.resolve() in _latest:
        _latest[folder.resolve()].stop(timeout_s=10)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("wb") as log:
        command = [sys.executable, "-m", "mmlab.background"]
        # in a session of its own: interrupting a cell of the notebook must not interrupt the run
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    _latest[folder.resolve()] = run = BackgroundRun(process, folder)
    run._pipe.write(job)
    run._pipe.flush()
    return run


def _child() -> int:
    share_cores()
    data, schedulers, options = pickle.load(
        sys.stdin.buffer
    )  # before torch: the parent may wait for it to be read
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    from mmlab.experiment import compare

    try:
        compare(data, schedulers, **options)
    except KeyboardInterrupt:
        return 1
    except (DataError, OptionError) as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return _USER_ERROR
    except (MmlabError, Exception):
        traceback.print_exc()
        return 1
    return 0


def _stop_with_parent() -> None:
    os.read(0, 1)  # the parent writes nothing more: this returns when the pipe breaks
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(_child())
