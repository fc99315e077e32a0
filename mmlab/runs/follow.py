"""Follows runs by their event files: each `poll` reads what was written since the last one.

The only reader behind every view: the live panel, `mmlab watch`, tables, figures and `Lab`. It reads nothing
but the files, so it follows a run of this process, of another one, of several ranks, or of last week.
`RunState` follows one run, `Runs` all runs below some folders.

Costs: a poll without news is one `stat` per file, about 3 us; an event takes about 10 us. Every number is
kept, in 8 bytes: about 25 MB for 100,000 steps.
Does not: write, draw, or need torch. Not thread-safe: one thread polls.
"""

from __future__ import annotations

import os
import time
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import DataError, unknown_name
from mmlab.machine import IDENTITY, process_runs, regular
from mmlab.runs.events import EVENT_FILES, FileReplacedError, RunEvent, check_types, read_events
from mmlab.runs.folders import is_aside

ACTIVE = ("waiting", "running", "paused")  # statuses of a run that has not ended
ENDED = ("done", "stopped", "failed", "unreadable")  # overall statuses once all runs have ended
NOTED = ("warning", "out_of_memory", "decision", "bad_sample")  # kinds of event that a person should see
MAX_NOTES = 30  # kept of each run
HEAD_BYTES = 128  # first bytes of an event file, which tell it from a new file in its place
READ_BYTES = 1 << 22  # of an event file at once: a long run's file has many hundred megabytes
UNREAD = (0, b"", 0)

Source = str | Path | Sequence[str | Path]  # folders of runs, or folders above them


class RunState:
    """A run's state by its event files so far: the latest values, and a column of numbers for every key.

    >>> state = RunState()
    >>> state.apply([RunEvent("step", 1, 0, 10.0, {"loss": 2.5})])
    >>> state.apply([RunEvent("step", 2, 0, 10.5, {"loss": 2.0, "lr": 0.1})])
    >>> state.column("loss"), state.column("lr"), state.column("time_s")
    (array([2.5, 2. ]), array([nan, 0.1]), array([10. , 10.5]))
    >>> state.latest("step")["loss"], state.status
    (2.0, 'running')

    Args:
        folder: a run's folder; `poll` reads what is new in it. It need not exist yet.
        id: distinguishes this run from others in a view, also from an earlier one in the same folder.
    """

    def __init__(self, folder: str | Path | None = None, *, id: str = "") -> None:
        self.folder = None if folder is None else Path(folder)
        self.id = id
        self.name = "" if self.folder is None else self.folder.resolve().name
        self.first_s = self.last_s = nan  # time of the first and the last event, seconds since 1970
        self.notes: deque[RunEvent] = deque(maxlen=MAX_NOTES)  # the last events that a person should see
        self.error: dict[str, str] = {}  # why one of its files cannot be read, until it is mended or replaced
        self._written_status = "waiting"
        self._status_from = (0, -inf)  # rank and time of the event that says so
        # path -> inode, first bytes (a new file may reuse an old one's inode), and the offset read so far
        self._files: dict[str, tuple[int, bytes, int]] = {}
        self._found: dict[str, os.stat_result] = {}  # of each file when it was last looked at
        self._latest: dict[tuple[str, int], RunEvent] = {}
        self._columns: dict[tuple[str, int], dict[str, array[float]]] = {}
        self._checked_s, self._process_runs = -inf, True

    @property
    def status(self) -> str:
        """Waiting, running, paused, done, stopped or failed; killed if the run's process ended without
        writing an `end` event, and unreadable once `Runs` has found its files damaged.
        """
        if self.error:
            return "unreadable"
        start = self.latest("start")
        if self._written_status not in ("running", "paused") or not start.keys() >= set(IDENTITY):
            return self._written_status
        if self._process_runs and time.monotonic() - self._checked_s > 0.5:  # each check takes 0.1 ms
            try:
                self._process_runs = process_runs({key: start[key] for key in IDENTITY})
            except (TypeError, ValueError, OverflowError):  # no process has such a number
                self._process_runs = False
            self._checked_s = time.monotonic()
        return self._written_status if self._process_runs else "killed"

    def poll(self) -> int:
        """Read what was written since the last call; returns the number of new events.

        Raises:
            DataError: a file was replaced, or has a line that is not an event or a value of a wrong type.
            OSError: a file was moved away (`FileNotFoundError`), or cannot be read.
        """
        if self.folder is None:
            return 0
        for path in sorted(map(str, self.folder.glob(EVENT_FILES))):
            self._files.setdefault(path, UNREAD)
        return self._read()

    def apply(self, events: Iterable[RunEvent]) -> None:
        """Add events, in the order in which they happened."""
        for event in events:
            if not self._latest:
                self.first_s = self.last_s = event.time_s
            self.last_s = max(self.last_s, event.time_s)
            self._latest[event.kind, event.rank] = event
            self._append(event)
            if event.kind in NOTED or (event.kind == "end" and event.values.get("traceback")):
                self.notes.append(event)
            status = {"start": "running", "resume": "running", "pause": "paused"}.get(event.kind)
            status = event.values["status"] if event.kind == "end" else status
            if status is None and self._written_status == "waiting":
                self._written_status = "running"
            # older ones of other ranks are of those that a later start did without; one rank's are in order
            elif status and (event.rank == self._status_from[0] or event.time_s >= self._status_from[1]):
                self._written_status, self._status_from = status, (event.rank, event.time_s)
            if event.kind == "start":
                self._process_runs = True

    def event(self, kind: str, rank: int = 0) -> RunEvent | None:
        """The latest event of a kind, or None."""
        return self._latest.get((kind, rank))

    def latest(self, kind: str, rank: int = 0) -> dict[str, Any]:
        """The latest values of a kind of event; empty before the first."""
        event = self.event(kind, rank)
        return {} if event is None else dict(event.values)

    def messages(self) -> list[str]:
        """The messages of the last warnings."""
        return [str(event.values.get("message")) for event in self.notes if event.kind == "warning"]

    def ranks(self) -> list[int]:
        """The ranks that have written anything."""
        return sorted({rank for _, rank in self._latest})

    def keys(self, kind: str = "step", rank: int = 0) -> list[str]:
        """The keys for which `column` has numbers of a kind of event."""
        return list(self._columns.get((kind, rank), {}))

    def count(self, kind: str = "step", rank: int = 0) -> int:
        """The number of events of a kind."""
        return len(self._columns.get((kind, rank), {}).get("step", ()))

    def column(self, key: str, kind: str = "step", rank: int = 0, start: int = 0) -> NDArray[np.float64]:
        """A key's numbers, one for each event of a kind: NaN where an event lacks it. Also `step` and `time_s`.

        Args:
            start: the first event to return, for a view that has the ones before it.

        Returns:
            (N,) a copy.

        Raises:
            OptionError: there are events of this kind, but none has the key.
        """
        columns = self._columns.get((kind, rank), {})
        if columns and key not in columns:
            raise unknown_name(f"key of {kind} events", key, columns)
        return self.column_or_nan(key, kind, rank, start)

    def column_or_nan(
        self, key: str, kind: str = "step", rank: int = 0, start: int = 0
    ) -> NDArray[np.float64]:
        """Like `column`, but all NaN if no event has the key."""
        return self.rows([key], kind, rank, start)[0]

    def rows(
        self, keys: Sequence[str], kind: str, rank: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.float64]:
        """(K, N) columns of several keys; NaN where no event has a key."""
        columns = self._columns.get((kind, rank), {})
        blank, found = array("d", [nan]) * len(range(self.count(kind, rank))[start:stop]), array("d")
        for key in keys:
            found += columns[key][start:stop] if key in columns else blank
        return np.array(found).reshape(len(keys), -1)

    def done(self, keys: Sequence[str], rank: int = 0) -> NDArray[np.float64]:
        """(K, N) columns of the steps in order, without those that a killed run lost and a resumed one repeats.

        `mmlab.runs.trackers.current_events` leaves out the same steps of a list of events.
        """
        steps, *found = self.rows(("step", *keys), "step", rank)
        least_after = np.minimum.accumulate(np.append(steps[1:], inf)[::-1])[::-1]
        return np.array(found)[:, steps < least_after]

    def pauses(self, rank: int = 0) -> list[tuple[float, float]]:
        """Begin and end of each pause, seconds since 1970; a pause that lasts ends at infinity, of a killed run at its next start."""
        begins, *ends = (self.column("time_s", kind, rank) for kind in ("pause", "resume", "start"))
        after = np.append(np.sort(np.concatenate(ends)), inf)
        return list(zip(begins.tolist(), after[np.searchsorted(after, begins)].tolist(), strict=True))

    def utilization(self, rank: int = 0, start: int = 0, stop: int | None = None) -> NDArray[np.float64]:
        """The busy share of each device reading; NaN if training was paused since the previous reading."""
        first = max(0, start - 1)
        busy, read_s = self.rows(("utilization_ratio", "time_s"), "device", rank, first, stop)
        before_s = np.concatenate([read_s[:1], read_s[:-1]])
        for paused_s, resumed_s in self.pauses(rank):
            busy[(read_s > paused_s) & (before_s < resumed_s)] = nan
        return busy[start - first :]

    def _read(self) -> int:
        num_events = 0
        for path, (inode, head, offset) in self._files.items():
            found = self._found[path] = os.stat(path)
            if inode and (found.st_ino != inode or found.st_size < offset):
                raise FileReplacedError(f"{path} was replaced by a new run")
            while found.st_size > offset:
                events, after = read_events(path, offset, head, READ_BYTES)
                if after == offset:
                    break  # a line that is still being written
                offset = after
                check_types(events, path)
                if len(head) < HEAD_BYTES:
                    with open(path, "rb", buffering=0) as file:
                        head = file.read(min(offset, HEAD_BYTES))  # holds the first event's time
                self.apply(events)
                num_events += len(events)
            self._files[path] = (found.st_ino, head, offset)
        return num_events

    def _look_again(self) -> int:
        """Raise FileReplacedError if a file was changed by other than its run, which only appends."""
        for path, old in self._found.items():
            found = self._found[path] = os.stat(path)
            is_appended = found.st_ino == old.st_ino and found.st_size > old.st_size
            if found.st_ctime_ns != old.st_ctime_ns and not is_appended:
                raise FileReplacedError(f"{path} was mended or replaced")
        return 0

    def _append(self, event: RunEvent) -> None:
        """Add a row: all columns of a kind have as many numbers as there are events of that kind."""
        new = {"step": array("d"), "time_s": array("d")}
        columns = self._columns.setdefault((event.kind, event.rank), new)
        num_rows = len(columns["step"])
        columns["step"].append(event.step)
        columns["time_s"].append(event.time_s)
        for key, value in event.values.items():
            if isinstance(value, int | float):
                if key not in columns:
                    columns[key] = array("d", [nan]) * num_rows
                columns[key].append(value)
        for column in columns.values():
            if len(column) == num_rows:
                column.append(nan)


class Runs:
    """All runs below some folders. A run that replaces another one in its folder is a new run.

    Args:
        source: folders of runs, or folders above them. They need not exist yet; runs that were moved aside
            (`previous-N`) do not count.
        scan_s: seconds between two scans for new files. A slow scan is repeated less often.
    """

    def __init__(self, source: Source, *, scan_s: float = 0.0) -> None:
        self.errors: list[dict[str, str]] = []  # what cannot be read: where, text, traceback
        self._states: dict[Path, RunState] = {}
        self._scan_s = scan_s
        self._num_runs = 0
        self.source, self._next_scan_s = source, -inf

    @property
    def ordered(self) -> list[RunState]:
        """The runs in the order in which they began."""
        return sorted(self._states.values(), key=lambda run: run.first_s if run.ranks() else inf)

    @property
    def states(self) -> dict[str, RunState]:
        """The same, keyed by folder relative to `source`."""
        root = Path(self.source) if isinstance(self.source, str | Path) else Path()
        named = {}
        for run in self.ordered:
            folder = run.folder or root
            below = folder.relative_to(root) if folder.is_relative_to(root) else folder
            named[run.name if folder == root else below.as_posix()] = run
        return named

    def poll(self) -> bool:
        """Read what was written since the last call; True if anything is new. Never raises for a bad file."""
        changed, started_s = False, time.monotonic()
        if started_s >= self._next_scan_s:
            changed = self._scan()
            now_s = time.monotonic()
            self._next_scan_s = now_s + max(self._scan_s, 50 * (now_s - started_s)) if self._scan_s else now_s
        if self._read():
            self._read()  # runs in lockstep are written one after the other: read the rest at once
            return True
        return changed

    def forget(self, *, but: Collection[str]) -> None:
        """Drop every run but those of these ids; a later `poll` reads them again, as new runs."""
        self._states = {folder: run for folder, run in self._states.items() if run.id in but}
        self._next_scan_s = -inf

    def _read(self) -> bool:
        changed = False
        for folder, state in list(self._states.items()):
            try:
                changed |= (state._look_again() if state.error else state._read()) > 0
            except FileReplacedError:
                self._take(folder, list(state._files))
                changed = True
            except FileNotFoundError:  # moved aside: a new run may take its place
                del self._states[folder]
                self._next_scan_s, changed = -inf, True
            except (DataError, OSError) as error:
                state.error, changed = shown_error("reading", error), True
        self.errors = [state.error for state in self._states.values() if state.error]
        return changed

    def _scan(self) -> bool:
        """Find folders of runs that were added or removed."""
        before, found = list(self._states), run_files(self.source)
        for folder in set(self._states) - set(found):
            del self._states[folder]
        for folder, paths in found.items():
            if folder not in self._states:
                self._take(folder, paths)
            for path in paths:
                self._states[folder]._files.setdefault(path, UNREAD)
        if changed := before != list(self._states):
            for folder, name in names_of(self._states).items():
                self._states[folder].name = name
        return changed

    def _take(self, folder: Path, paths: Iterable[str]) -> None:
        self._num_runs += 1
        state = self._states[folder] = RunState(folder, id=f"r{self._num_runs}")
        state._files = dict.fromkeys(paths, UNREAD)


def names_of(folders: Iterable[Path]) -> dict[Path, str]:
    """Each run's folder and its name: that of the folder, after those above it if ambiguous, or if it was moved aside."""
    parts = {}
    for folder in folders:
        *above, name = folder.resolve().parts
        parts[folder] = [*(part for part in above if part != "runs"), name]
    depths = {folder: 1 + is_aside(own[-2]) for folder, own in parts.items()}
    while True:
        names = {folder: "/".join(own[-depths[folder] :]) for folder, own in parts.items()}
        counts = Counter(names.values())
        alike = [folder for folder, name in names.items() if counts[name] > 1]
        longer = [folder for folder in alike if depths[folder] < len(parts[folder])]
        if not longer:
            return names
        for folder in longer:
            depths[folder] += 1


def shown_error(where: str, error: Exception) -> dict[str, str]:
    """An error as views show it; `where` is the activity that failed: reading, training, ..."""
    text = f"{type(error).__name__}: {error}"[:500]
    return {"where": where, "text": text, "traceback": "".join(traceback.format_exception(error))[-8000:]}


def run_files(source: Source) -> dict[Path, list[str]]:
    """The folders of all runs of a source, and the event files of each."""
    roots = [source] if isinstance(source, str | Path) else source
    start, end = EVENT_FILES.split("*")
    found: dict[Path, list[str]] = {}
    for root in roots:
        for folder, below, files in os.walk(root):
            ours = [name for name in files if name.startswith(start) and name.endswith(end)]
            if ours:
                found[Path(folder)] = [os.path.join(folder, name) for name in sorted(ours)]
            # a run's folder holds no other run; runs that were moved aside do not count
            below[:] = [] if ours else sorted(name for name in below if not is_aside(name))
    return found


def overall_status(states: Iterable[RunState]) -> str:
    """The overall status of runs, such as those of a comparison; `failed` if one of them was killed."""
    found = {state.status for state in states}
    if "waiting" in found and len(found) > 1:
        found.add("running")
    for status in ("paused", "running", "waiting", "failed", "killed", "unreadable", "stopped", "done"):
        if status in found:
            return "failed" if status == "killed" else status
    return "waiting"


def summary_line(folder: str | Path) -> str:
    """A run's progress in words, from the last start, which names the process, and the last 64 KiB of its first rank's file."""
    path = min(Path(folder).glob(EVENT_FILES))
    with open(path, "rb", opener=regular) as file:
        data = file.read()
    begun = max(0, data.rfind(b'{"kind":"start"'))
    late = max(begun, data.rfind(b"\n", 0, max(0, len(data) - 65536)) + 1)
    state = RunState()
    state.apply(read_events(path, begun, num_bytes=8192)[0][:1] + read_events(path, late)[0])
    step = state.event("step")
    return f"{state.status} at step {step.step if step else 0}"
