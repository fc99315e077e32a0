"""`Checkpoints`: the checkpoints of one run; when to save, what to keep, where to resume."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlab.errors import DataError, OptionError, check_name, check_numbers
from mmlab.runs.event_keys import EVENT_KEYS, USER_PREFIX
from mmlab.runs.events import RunEvent, warn
from mmlab.training.checkpoint.files import SAVING, check, read_manifest, read_state, sync, write_state
from mmlab.training.strategy import Strategy

_NAME, _UNFINISHED = re.compile("[0-9]+-step-[0-9]+"), ".unfinished-"


@dataclass(kw_only=True)
class CheckpointOptions:
    """The options of `Checkpoints`."""

    keep_last: int = 3
    keep_best: int = 1
    best_key: str = "loss"
    maximize: bool = False
    every_steps: int | None = None
    every_minutes: float | None = 10.0


@dataclass(kw_only=True, eq=False)
class Checkpoints(CheckpointOptions):
    """The checkpoints of one run: when to save, what to keep, where to resume.

    Example: `checkpoints = Checkpoints("runs/one/checkpoints")`, then `checkpoints.restore(trainer, loader)` and
    `trainer.fit(loader, num_epochs=3 - trainer.epoch, checkpoints=checkpoints)`.

    Args:
        folder: made if necessary; use one for each run.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of best checkpoints to keep besides, of those saved after an evaluation.
        best_key: key of `eval` events to judge by.
        maximize: whether the largest value is the best.
        every_steps: save when the number of optimizer steps is a multiple of it.
        every_minutes: save when this time has passed since the last save. `FusionTrainer.fit` also saves
            after every epoch and when it is stopped.
        emit: called with a `warning` event for each damaged checkpoint; None issues a Python warning.

    Raises:
        OptionError: a number out of range, or a `best_key` that no evaluation has.
    """

    folder: str | Path = field(kw_only=False)
    emit: Callable[[RunEvent], object] | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.keep_best and not self.best_key.startswith(USER_PREFIX):
            check_name("best_key", self.best_key, [k for k, row in EVENT_KEYS.items() if "eval" in row.kinds])
        self._folder = Path(self.folder)
        self.start_interval()

    @property
    def paths(self) -> list[Path]:
        """All checkpoints, oldest first; damaged ones too."""
        found = (path for path in self._folder.glob("*-step-*") if _NAME.fullmatch(path.name))
        return sorted(found, key=_number)

    @property
    def best(self) -> Path | None:
        """The best of the checkpoints that were saved after an evaluation."""
        return next(iter(self._ranked()), None)

    def due(self, step: int) -> bool:
        """Whether an interval, in steps or minutes, is over."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        elapsed_s = time.monotonic() - self._saved_s
        return by_steps or (self.every_minutes is not None and elapsed_s >= 60 * self.every_minutes)

    def start_interval(self) -> None:
        """Count `every_minutes` from now, as after a save; for ranks that leave saving to another."""
        self._saved_s = time.monotonic()

    def save(
        self,
        state: Mapping[str, Any],
        *,
        values: Mapping[str, Any] | None = None,
        ranks: Strategy | None = None,
    ) -> dict[str, Any]:
        """Write a checkpoint, then remove those that are no longer to be kept.

        Args:
            state: `FusionTrainer.state_dict()`, with the loader's under `loader`.
            values: of an evaluation, to judge the best by.
            ranks: the ranks that write together, if the state holds this rank's shares; all of them make this
                call. None writes in this process alone.

        Returns:
            The values of a `checkpoint` event.

        Raises:
            OptionError: the evaluation has no `best_key`; the checkpoint is written nevertheless.
            OSError: the disk is full or read-only; no checkpoint was added and none removed.
            RunError: the same if several ranks write; raised on all of them, and names those that failed.
            TypeError: progress or the loader's state hold more than numbers and texts.
        """
        started = time.perf_counter()
        progress = state["progress"]
        ranks = ranks or Strategy()
        path = ranks.run_on_main(lambda: self._begin(progress["step"]), SAVING)
        unfinished = self._aside(path)
        try:
            num_bytes = write_state(unfinished, state, values or {}, ranks)
            ranks.run_on_main(lambda: unfinished.rename(path), SAVING)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self.start_interval()
        ranks.run_on_main(lambda: self._tidy(values or {}), SAVING)
        return {
            "path": path.relative_to(self._folder.parent).as_posix(),
            "checkpoint_bytes": num_bytes,
            "checkpoint_s": time.perf_counter() - started,
            "epoch": progress["epoch"],
        }

    def _begin(self, step: int) -> Path:
        """The path of the next checkpoint; makes the folder in which it is written first."""
        path = self._folder / f"{1 + max(map(_number, self.paths), default=0):06d}-step-{step}"
        self._clear_away()
        self._aside(path).mkdir(parents=True)
        return path

    def _tidy(self, values: Mapping[str, Any]) -> None:
        """Flush the new name to the disk; then keep only the newest and the best."""
        sync(self._folder)
        known = [key for key, value in values.items() if isinstance(value, int | float)]
        if known and self.keep_best:
            check_name("best_key of evaluations", self.best_key, known)
        kept = {*self.paths[-self.keep_last :], *self._ranked()[: self.keep_best]}
        for old in set(self.paths) - kept:
            old.rename(self._aside(old))
        self._clear_away()

    def newest(self, ranks: Strategy | None = None) -> Path | None:
        """The newest checkpoint that is whole; None if there is none at all.

        Args:
            ranks: the ranks that share the reading and get the same result; all of them make this call.

        Raises:
            DataError: all are damaged.
        """
        ranks = ranks or Strategy()
        paths = ranks.run_on_main(lambda: self.paths, f"look for checkpoints in {self._folder}")
        for path in reversed(paths):
            try:
                check(path, ranks)
            except DataError as error:
                warn(self.emit, f"{error}; using the checkpoint before it", source="checkpoint")
            else:
                return path
        if paths:
            raise DataError(
                f"{self._folder}: none of the {len(paths)} checkpoints is whole; start anew in another folder"
            )
        return None

    def restore(self, trainer: Any, loader: Any = None) -> Path | None:
        """Resume from the newest whole checkpoint: bitwise the same run, even in the middle of an epoch.

        On several ranks a collective.

        Args:
            trainer: made with the options of the run.
            loader: for training; one with a state of its own continues with the next batch, any other is read
                from the epoch's start, skipping the batches that are done.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            DataError: all are damaged, or the newest belongs to another model, other trained weights, other data or
                another scheduler.
            OptionError: it has other objectives.
        """
        path = self.newest(trainer.strategy)
        if path is not None:
            restore(trainer, loader, path)
        return path

    def _ranked(self) -> list[Path]:
        """Checkpoints with an evaluation, best first."""
        scores = {}
        for path in self.paths:
            with suppress(DataError):  # damaged: `newest` reports it
                score = read_manifest(path)[1].get(self.best_key, math.nan)
                if not math.isnan(score):
                    scores[path] = score
        return sorted(scores, key=lambda path: scores[path], reverse=self.maximize)

    def _aside(self, path: Path) -> Path:
        return self._folder / f"{_UNFINISHED}{path.name}"

    def _clear_away(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            if _NAME.fullmatch(path.name.removeprefix(_UNFINISHED)):  # else it is not ours
                shutil.rmtree(path)


def restore(trainer: Any, loader: Any, path: Path) -> None:
    """Load a whole checkpoint's state into a trainer and its loader; see `check`.

    Raises:
        DataError: it belongs to another model, other trained weights, other data or another scheduler.
        OptionError: it has other objectives.
    """
    try:
        state = read_state(path, like=trainer.model.state_dict())
        # the loader comes first: its error says that the vocabulary differs, the model's only that a size does
        if "loader" in state and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state["loader"])
        trainer.load_state_dict(state)
    except (DataError, OptionError) as error:
        raise type(error)(f"{path}: {error}") from error
    except (RuntimeError, ValueError) as error:  # torch's errors for weights that do not match
        raise DataError(f"{path} is of another model: {' '.join(str(error).split()):.300}") from error
    except KeyError as error:
        raise DataError(f"{path} is of another version of mmlab: it has no {error}") from error


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])
