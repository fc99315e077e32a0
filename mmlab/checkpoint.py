"""Checkpoints: whole or not there, checked when they are read, the newest and the best kept.

A checkpoint is a folder of four files, written under another name, brought to the disk (`fsync`) and then renamed: a
process killed at any moment, or a power cut, leaves the checkpoints before it as they were.

    000003-step-1200/
        weights.safetensors   the model's weights and buffers, readable by any program that knows safetensors
        state.pt              optimizer and loss scaler, for `torch.load(..., weights_only=True)`
        progress.json         counters of the trainer and position of the loader
        manifest.json         size and SHA-256 of the other files, and what an evaluation found

Costs 12 bytes a weight on disk (fp32 with AdamW), written while training waits: 41 million weights, 490 MB, took 1.9 s.
Does not: write shares of ranks (rank 0 collects and writes, all read), nor guard against two runs in one folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import DataError, OptionError
from mmlab.events import RunEvent

_WEIGHTS, _STATE, _PROGRESS, MANIFEST = "weights.safetensors", "state.pt", "progress.json", "manifest.json"
_JSON_KEYS = ("progress", "loader")  # of a state: plain numbers and texts
_NAMES = "[0-9]*-step-*"


class Checkpoints:
    """The checkpoints of one run: when to save, what to keep, where to go on.

    Example: `checkpoints = Checkpoints("runs/one/checkpoints")`, then `checkpoints.restore(trainer, loader)` and
    `trainer.fit(loader, num_epochs=3 - trainer.epoch, checkpoints=checkpoints)`.

    Args:
        folder: made if need be; a folder for each run.
        keep_last: newest ones to keep.
        keep_best: best ones to keep besides, of those saved after an evaluation.
        best_key: key of `eval` events to judge by.
        maximize: whether the largest is the best.
        every_steps: save when the number of optimizer steps is a multiple of it.
        every_minutes: save when so long has passed since the last one. `FusionTrainer.fit` also saves after every epoch
            and when it is stopped.
        emit: takes a `warning` event for each damaged checkpoint; without it that is a Python warning.

    Raises:
        OptionError: a number out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        best_key: str = "loss",
        maximize: bool = False,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        emit: Callable[[RunEvent], object] | None = None,
    ) -> None:
        if keep_last < 1:
            raise OptionError(f"keep_last must be at least 1, found {keep_last}")
        if keep_best < 0:
            raise OptionError(f"keep_best must not be negative, found {keep_best}")
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise OptionError(f"{name} must be above 0, found {value}; leave it out for none")
        self.folder = Path(folder)
        self.keep_last, self.keep_best, self.best_key, self.maximize = (
            keep_last,
            keep_best,
            best_key,
            maximize,
        )
        self.every_steps, self.every_minutes = every_steps, every_minutes
        self._emit = emit
        self._is_warned = False
        self.start_interval()

    @property
    def paths(self) -> list[Path]:
        """All checkpoints, oldest first; damaged ones too."""
        return sorted(self.folder.glob(_NAMES), key=_number)

    @property
    def best(self) -> Path | None:
        """The best checkpoint that an evaluation came with."""
        return next(iter(self._ranked()), None)

    def due(self, step: int) -> bool:
        """Whether an interval, in steps or minutes, is over."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        elapsed_s = time.monotonic() - self._saved_s
        return by_steps or (self.every_minutes is not None and elapsed_s >= 60 * self.every_minutes)

    def start_interval(self) -> None:
        """Count `every_minutes` from now, as after a save; for ranks that leave saving to another."""
        self._saved_s = time.monotonic()

    def save(self, state: Mapping[str, Any], *, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write a checkpoint, then remove those that are no longer to be kept.

        Args:
            state: `FusionTrainer.state_dict()`, with the loader's under `loader`.
            values: what an evaluation found, to judge the best by.

        Returns:
            The values of a `checkpoint` event.

        Raises:
            OSError: the disk is full or read-only; no checkpoint was added and none removed.
            TypeError: progress or the loader's state hold more than numbers and texts.
        """
        started = time.perf_counter()
        progress = state["progress"]
        number = 1 + max((_number(path) for path in self.paths), default=0)
        path = self.folder / f"{number:06d}-step-{progress['step']}"
        self._clear_away()
        unfinished = self._aside(path)
        unfinished.mkdir(parents=True)
        try:
            num_bytes = _write(unfinished, state, values or {})
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished)
            raise
        _sync(self.folder)
        self.start_interval()
        if values and self.best_key not in values and self.keep_best and not self._is_warned:
            self._is_warned = True
            known = ", ".join(sorted(key for key, value in values.items() if isinstance(value, float)))
            self._warn(f"evaluations have no {self.best_key!r}, so no checkpoint is the best; known: {known}")
        kept = {*self.paths[-self.keep_last :], *self._ranked()[: self.keep_best]}
        for old in set(self.paths) - kept:
            old.rename(self._aside(old))
        self._clear_away()
        return {
            "path": path.relative_to(self.folder.parent).as_posix(),
            "checkpoint_bytes": num_bytes,
            "checkpoint_s": time.perf_counter() - started,
            "epoch": progress["epoch"],
        }

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is whole, and its state; None where there is none at all.

        Raises:
            DataError: all are damaged.
        """
        paths = self.paths
        for path in reversed(paths):
            try:
                return path, read_checkpoint(path)
            except DataError as error:
                self._warn(f"{error}; using the checkpoint before it")
        if paths:
            raise DataError(
                f"{self.folder}: none of the {len(paths)} checkpoints is whole; start anew in another folder"
            )
        return None

    def restore(self, trainer: Any, loader: Any = None) -> Path | None:
        """Go on from the newest whole checkpoint: bitwise the same run, in the middle of an epoch too.

        Args:
            trainer: made with the options of the run.
            loader: for training; one with a state of its own goes on with the next batch, any other is read from the
                epoch's start and the batches that are done are left out.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            DataError: all are damaged, or the newest is of another model, other data or another scheduler.
        """
        found = self.load()
        if found is None:
            return None
        restore(trainer, loader, *found)
        return found[0]

    def _ranked(self) -> list[Path]:
        """Checkpoints with an evaluation, best first."""
        scores = {}
        for path in self.paths:
            with suppress(DataError):  # damaged: `load` says so
                score = _read_manifest(path)[1].get(self.best_key, math.nan)
                if not math.isnan(score):
                    scores[path] = score
        return sorted(scores, key=lambda path: scores[path], reverse=self.maximize)

    def _warn(self, message: str) -> None:
        if self._emit is None:
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        else:
            self._emit(RunEvent.now("warning", -1, {"message": message, "source": "checkpoint"}))

    def _aside(self, path: Path) -> Path:
        return self.folder / f".unfinished-{path.name}"

    def _clear_away(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for path in self.folder.glob(".unfinished-*"):
            shutil.rmtree(path)


def restore(trainer: Any, loader: Any, path: Path, state: Mapping[str, Any]) -> None:
    """Put a checkpoint's state into a trainer and its loader.

    Raises:
        DataError: it is of another model, other data or another scheduler.
        OptionError: it is of other objectives, or of weights that follow other losses.
    """
    try:
        trainer.load_state_dict(state)
    except OptionError:  # says what it is
        raise
    except (RuntimeError, ValueError) as error:  # torch's words for weights that do not match
        raise DataError(f"{path} is of another model: {' '.join(str(error).split())}") from error
    if "loader" in state and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(state["loader"])


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU, every file checked against the manifest.

    Raises:
        DataError: a file is missing, truncated or altered.
    """
    path = Path(path)
    for name, expected in _read_manifest(path)[0].items():
        found = _size_and_digest(path / name) if (path / name).exists() else None
        if found != expected:
            raise DataError(
                f"{path} is damaged: {name} should be {expected}, found {found or 'no such file'}"
            )
    from safetensors import safe_open

    with safe_open(path / _WEIGHTS, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        weights |= {
            alias: weights[name] for alias, name in (file.metadata() or {}).items() if name in weights
        }
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    return {"model": weights, **state, **json.loads((path / _PROGRESS).read_text())}


def _write(folder: Path, state: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Write all files of a checkpoint and bring them to the disk; returns their bytes."""
    from safetensors.torch import save_file

    weights, aliases = _without_aliases(state["model"])
    save_file(weights, folder / _WEIGHTS, metadata=aliases or None)
    rest = {key: value for key, value in state.items() if key not in ("model", *_JSON_KEYS)}
    torch.save(rest, folder / _STATE)
    (folder / _PROGRESS).write_text(json.dumps({key: state[key] for key in _JSON_KEYS if key in state}))
    files = {name: _size_and_digest(folder / name) for name in (_WEIGHTS, _STATE, _PROGRESS)}
    scores = {key: value for key, value in values.items() if isinstance(value, int | float)}
    (folder / MANIFEST).write_text(json.dumps({"files": files, "values": scores}, indent=1))
    for name in (*files, MANIFEST):
        _sync(folder / name)
    _sync(folder)
    return sum(file.stat().st_size for file in folder.iterdir())


def _without_aliases(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, laid out as safetensors wants it, and the other names of those that share memory."""
    first: dict[tuple[Any, ...], str] = {}
    once, aliases = {}, {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(key, name) != name:
            aliases[name] = first[key]
            continue
        tensor = tensor.detach()
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes
        once[name] = tensor.clone() if shared else tensor.contiguous()
    return once, aliases


def _size_and_digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the files should be, and what an evaluation found."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return manifest["files"], manifest["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no whole checkpoint: {MANIFEST} is missing or damaged") from error


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])
