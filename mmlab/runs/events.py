"""The events of a run, as lines of a file: the interface between training and everything that reads a run.

A run is a folder; each rank appends to its own `events-rank<rank>.jsonl`, one JSON object per line. The
trainer and the device monitor write, views read: in the same process, in another one, or long after the run.
All keys are listed in `mmlab.runs.event_keys.EVENT_KEYS`.

Costs: about 25 us and 400 bytes per step event: one unbuffered `write` to the operating system, no `fsync`.
So a killed process loses nothing and leaves at most one torn last line; a power cut may lose the last
seconds.
Does not: rotate or compress files, nor guard against two processes that write the same rank's file.

JSON has neither NaN nor infinity, and a loss may be either. They are written as the texts "NaN", "Infinity"
and "-Infinity" (which JavaScript's `Number()` reads back as numbers) and `read_events` returns them as
floats.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from mmlab.errors import DataError, OptionError, check_name, unknown_name
from mmlab.machine import regular
from mmlab.runs.event_keys import EVENT_KEYS, EVENT_KINDS, USER_PREFIX
from mmlab.runs.folders import is_aside

if TYPE_CHECKING:
    import pandas as pd

PROCESS_RSS = "process RSS"  # `memory_source` of a figure of the whole process, not of its tensors
EVENT_FILES = "events-rank*.jsonl"  # the pattern of a run's files, one per rank
# of every event, with their types
_FIELDS = {"kind": (str,), "step": (int,), "rank": (int,), "time_s": (float, int)}
_TYPES = {"text": (str, float), "object": (dict,)}  # by unit, else numbers; a text may read "NaN"
_KEY_TYPES = {name: _TYPES.get(key.unit, (float, int)) for name, key in EVENT_KEYS.items()}
# a clock that goes on when the system's is set, on Linux also while the machine sleeps: events of a run stay in order
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S = time.time() - time.clock_gettime(_CLOCK)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened in a run.

    >>> RunEvent("step", 3, 0, 1792000000.5, {"loss": 2.25}).values["loss"]
    2.25
    """

    kind: str  # a key of EVENT_KINDS
    step: int  # optimizer steps done when it happened; -1 where the writer does not know (device)
    rank: int
    time_s: float  # seconds since 1970, UTC
    values: Mapping[str, Any]  # keys of EVENT_KEYS

    @classmethod
    def now(cls, kind: str, step: int, values: Mapping[str, Any], rank: int = 0) -> RunEvent:
        """An event that happens now."""
        return cls(kind, step, rank, _BEGAN_S + time.clock_gettime(_CLOCK), values)


class RunLog(AbstractContextManager["RunLog"]):
    """Append events to one rank's file in a run's folder; a context manager, safe to call from any thread.

    The folder is made if need be. If a killed run left a torn last line, it is cut off and a warning event says so.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunLog(folder) as log:
    ...         log.write("step", 1, loss=float("nan"))
    ...     events, _ = read_events(log.path)
    >>> events[0].kind, events[0].values
    ('step', {'loss': nan})

    Raises:
        OptionError: an event's kind or key is not in the table, so no view would know its unit.
        TypeError: a value is not a number, text, truth value, None, or a list or dict of those; the step or the rank
            is no whole number, the time no finite one; an end has no status.
        OSError: the file cannot be written, or was removed.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.rank = rank
        self.path = Path(folder) / f"events-rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.read_bytes() if self.path.exists() else b""
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (close() closes it)
        self._lock = threading.Lock()
        if num_torn_bytes := len(written) - written.rfind(b"\n") - 1:
            self._file.truncate(len(written) - num_torn_bytes)
            message = f"cut {num_torn_bytes} bytes of a torn last line, left by a run killed while writing"
            self.write("warning", -1, message=message, source="events")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append an event that happens now."""
        self.emit(RunEvent.now(kind, step, values, self.rank))

    def emit(self, event: RunEvent) -> None:
        """Append an event."""
        line = _encode(event)
        with self._lock:
            num_written = 0
            try:
                if not os.fstat(self._file.fileno()).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "the file was removed while its run wrote it")
                while num_written < len(line):  # a signal or a full disk can cut a write short
                    num_written += self._file.write(line[num_written:])
            except OSError as error:  # it names no file
                if num_written:
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - num_written)
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file; writing after that is an error."""
        self._file.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def warn(emit: Callable[[RunEvent], object] | None, message: str, *, source: str) -> None:
    """Emit a warning as an event, or as a Python warning if `emit` is None."""
    if emit is None:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    else:
        emit(RunEvent.now("warning", -1, {"message": message, "source": source}))


class FileReplacedError(DataError):
    """An event file was replaced by a new one."""


def read_events(
    path: str | Path, offset: int = 0, head: bytes = b"", num_bytes: int = -1
) -> tuple[list[RunEvent], int]:
    """Read the complete lines of a file after `offset` bytes; call again with the new offset to follow a run.

    A last line without its newline is still being written (or torn): it is left for the next call.

    Args:
        head: the file's first bytes as read earlier; they hold the time of its first event, so no other file
            has them.
        num_bytes: read about so many bytes at most, but a whole line at least; -1 reads all.

    Returns:
        The events, and the offset after the last complete line.

    Raises:
        DataError: a complete line is not an event.
        FileReplacedError: the file begins differently, or is shorter than `offset`.
        OSError: there is no such file, or it is no regular one.
    """
    with open(path, "rb", buffering=0, opener=regular) as file:
        if file.read(len(head)) != head or file.seek(0, 2) < offset:
            raise FileReplacedError(f"{path}: the file was replaced by a new run; read it from offset 0")
        file.seek(offset)
        data = file.read(num_bytes)
        if b"\n" not in data:
            data += file.read()
    events = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        events.append(_decode(line, path, offset))
        offset += len(line)
    return events, offset


def read_runs(folder: str | Path) -> pd.DataFrame:
    """All events of all runs below a folder, one row each, in order of run and time; runs moved aside do not count.

    Columns: `run` (the run's folder relative to `folder`; for `folder` itself its name), `kind`, `step`, `rank`,
    `time_s`, `elapsed_s` (since the run's first event), then the keys that any event has, in the table's order.

    Raises:
        DataError: there is no event file below the folder, or a line is not an event.
    """
    import pandas as pd

    folder = Path(folder)
    rows = []
    for path in sorted(folder.rglob(EVENT_FILES)):
        below = path.parent.relative_to(folder)
        run = below.as_posix() if below.parts else folder.resolve().name
        events = [] if any(map(is_aside, below.parts)) else read_events(path)[0]
        rows += [
            {"run": run, **{field: getattr(event, field) for field in _FIELDS}, **event.values}
            for event in events
        ]
    if not rows:
        raise DataError(f"{folder}: no events in {EVENT_FILES} below it; give a run's folder, or one above")
    table = pd.DataFrame(rows).sort_values(["run", "time_s"], kind="stable", ignore_index=True)
    table["elapsed_s"] = table["time_s"] - table.groupby("run")["time_s"].transform("min")
    first = ["run", *_FIELDS, "elapsed_s"]
    known = [key for key in EVENT_KEYS if key in table]
    return table[first + known + [key for key in table if key not in {*first, *known}]]


def _encode(event: RunEvent) -> bytes:
    check_name("kind of event", event.kind, EVENT_KINDS)
    for key in event.values:
        if key in _FIELDS:
            raise OptionError(f"event key {key!r} is taken: kind, step, rank and time_s are the event's")
        if key not in EVENT_KEYS and not key.startswith(USER_PREFIX):
            error = unknown_name("event key", key, EVENT_KEYS)
            raise OptionError(f"{error}. Begin keys of your own with {USER_PREFIX!r}.")
    flat = {field: _plain(field, getattr(event, field)) for field in _FIELDS}
    flat |= {key: _plain(key, value) for key, value in event.values.items()}
    _check_fields(flat)
    return json.dumps(flat, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):  # it may hold a file's name, which need not be UTF-8
        return value.encode(errors="backslashreplace").decode()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    raise TypeError(
        f"event key {key!r}: expected a number, text, true or false, None, or a list or dict of those, "
        f"found {type(value).__name__}; give a tensor's .item(), a path's str()"
    )


def _decode(line: bytes, path: str | Path, offset: int) -> RunEvent:
    try:
        values = orjson.loads(line)
        _check_fields(values)
        kind, step, rank, time_s = [values.pop(field) for field in _FIELDS]
        _restore(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the line at byte {offset} is not an event ({error!r}): {line[:80]!r}; "
            "remove that line to read the rest"
        ) from error
    return RunEvent(kind, step, rank, time_s, values)


def _check_fields(flat: Mapping[str, Any]) -> None:
    """Raise TypeError for an event that makes its file unreadable: a field of the wrong type, an end without a status."""
    for name, types in (_FIELDS | ({"status": (str,)} if flat["kind"] == "end" else {})).items():
        if type(flat.get(name)) not in types:
            raise TypeError(f"{name} should be {_words(types)}, found {flat.get(name)!r}")


def check_types(events: Iterable[RunEvent], path: str | Path) -> None:
    """Check the types of the events' values, since views compute with them.

    Raises:
        DataError: a value has the wrong type; the message names the first one.
    """
    for event in events:
        for key, value in event.values.items():
            types = _KEY_TYPES.get(key)
            if types is not None and value is not None and not isinstance(value, types):
                raise DataError(
                    f"{path}: {key} of the {event.kind} event at step {event.step} should be {_words(types)}, "
                    f"found {str(value)[:80]!r}; remove that line to see the rest"
                )


def _words(types: tuple[type, ...]) -> str:
    return {str: "a text", dict: "an object", int: "a whole number", float: "a number"}[types[0]]


def _restore(values: dict[str, Any]) -> None:
    """Turn the texts that stand for NaN and infinity into floats again."""
    for key, value in values.items():
        if type(value) is str and value in _NON_FINITE:
            values[key] = _NON_FINITE[value]
        elif type(value) is dict:
            _restore(value)
