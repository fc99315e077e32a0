"""`Run`: records a training run in a folder with an events file, for others to follow.

The file says how the run was started, what happened, and how it ended: done, stopped, or failed with a
traceback. `train` is one run, `compare` several in turns. Every run is paused and stopped by the control file
in its folder.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mmlab.errors import with_notes
from mmlab.machine import this_process, versions
from mmlab.runs.control import Control
from mmlab.runs.events import RunEvent, RunLog
from mmlab.runs.monitor import DeviceMonitor
from mmlab.training.loop import FusionTrainer
from mmlab.types import Batch


class Run(AbstractContextManager["Run"]):
    """A context manager around one training run: it writes the run's events.

    The last event, `end`, is written when the context is left, if `start` was called (else a new file is removed): with
    the status `done`, `stopped` (by the control file, an interrupt or SIGTERM) or `failed` (by any other exception).

    Args:
        folder: of the run; made if need be. None writes nothing.
        rank: of this process; each rank has its own file.
        control: where requests to pause and stop are read (default: the folder's control file).
    """

    def __init__(self, folder: str | Path | None, *, rank: int = 0, control: Control | None = None) -> None:
        self.rank = rank
        self.control = control or Control(folder if rank == 0 else None)
        self.step = 0  # of the last event that had one
        self._log = None if folder is None else RunLog(folder, rank)
        self._is_new = self._log is not None and not self._log.path.stat().st_size
        self._started_s: float | None = None

    def emit(self, event: RunEvent) -> None:
        """Write an event. Safe to call from any thread."""
        self.step = max(self.step, event.step)
        if self._log is not None:
            self._log.emit(event)

    def write(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Write an event that happens now, at the last step unless another is given."""
        self.emit(RunEvent.now(kind, self.step if step is None else step, values, self.rank))

    def start(self, step: int = 0, **values: Any) -> None:
        """Write the first event, to which every run adds its process and its library versions.

        Args:
            step: optimizer steps already done by the run that this one resumes.
            values: keys of a `start` event.
        """
        self.step, self._started_s = step, time.perf_counter()
        self.write("start", **values, **this_process(), versions=versions())

    def fit(self, trainer: FusionTrainer, loader: Iterable[Batch], **options: Any) -> None:
        """Train with `trainer.fit`, under this run's control, while the device is monitored.

        Args:
            options: of `FusionTrainer.fit`.
        """
        with DeviceMonitor(self.emit, device=trainer.device, rank=self.rank):
            trainer.fit(loader, control=self.control, **options)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        details: dict[str, Any] = {}
        status = "done" if error is None and not self.control.stopped else "stopped"
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            status = "failed"
            details = {"message": with_notes(error), "traceback": "".join(traceback.format_exception(error))}
        if self._started_s is not None:
            run_s, paused_s = time.perf_counter() - self._started_s, self.control.paused_s
            self.write("end", status=status, num_steps=self.step, run_s=run_s, paused_s=paused_s, **details)
        if self._log is not None:
            self._log.close()
            if self._is_new and self._started_s is None:  # refused: a view would wait for it for ever
                self._log.path.unlink(missing_ok=True)
