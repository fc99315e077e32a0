"""What a live view needs of runs that are being written: new rows of float32 columns, and facts about each run.

`RunFeed` follows run folders by their event files alone; `Controller` is what a view may call to steer a run. A run
has three tracks of rows, `step`, `device` and `eval`, each with the columns of `TRACKS`, one series a run, rank and
track. A view keeps count of the rows that it has of each series and asks for the rest, so nothing is lost however
seldom it asks.

Costs: a poll without news is one `stat` a file (about 3 us); an event costs about 10 us to parse. Columns stay in
memory, 4 bytes a number.
Does not: send, draw, or write. Not thread-safe: one thread polls.
"""

from __future__ import annotations

import os
import time
import traceback
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from mmlab.errors import DataError
from mmlab.runs.events import EVENT_FILES, RunEvent, read_events
from mmlab.runs.monitor import RunState

TRACKS: Mapping[str, tuple[str, ...]] = {
    "step": (
        "step", "time_s", "num_samples", "num_tokens", "height", "width", "loss", "samples_per_s", "step_s",
        "data_wait_s", "combined_waste", "peak_bytes", "predicted_bytes", "limit_bytes",
        "allocated_bytes", "reserved_bytes", "lr",
    ),
    "device": (
        "time_s", "memory_bytes", "memory_total_bytes", "allocated_bytes", "reserved_bytes", "utilization_ratio",
    ),
    "eval": ("step", "time_s", "loss"),
}  # fmt: skip
SCAN_S = 0.5  # seconds between looks for new folders and files
MAX_NOTES = 30  # messages kept of each run
_FIELDS = ("kind", "step", "rank", "time_s")
_NOTED = {"warning": "message", "out_of_memory": "operation", "decision": "reason", "bad_sample": "message"}


class Controller(Protocol):
    """What starts and stops a run, as far as a panel knows. Any thread may call it, and every call returns at once."""

    @property
    def state(self) -> str:
        """`idle`, `running`, `paused`, `stopping`, `done`, `stopped` or `failed`."""

    @property
    def progress(self) -> tuple[float, float]:
        """Share of the run that is done (0 to 1) and seconds that are left; NaN where unknown."""

    @property
    def error(self) -> str | None:
        """Traceback of what ended the run, if anything did."""

    @property
    def folder(self) -> Path:
        """What to follow: a run's folder, or a folder of runs."""

    def start(self) -> object:
        """Begin."""

    def pause(self) -> object:
        """Hold after the step in hand."""

    def resume(self) -> object:
        """Go on."""

    def stop(self) -> object:
        """End after the step in hand."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one series that a view does not have yet."""

    series: str  # "<run id>.<rank>.<track>"
    start: int  # rows before these
    columns: NDArray[np.float32]  # (C, N), in the order of TRACKS


class RunFeed:
    """Follow one run or several.

    >>> import tempfile
    >>> from mmlab.runs.events import RunLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunLog(f"{folder.name}/runs/budget") as log:
    ...     log.write("step", 1, loss=2.5, num_samples=32)
    >>> feed = RunFeed(folder.name)
    >>> feed.poll()
    True
    >>> [rows] = feed.rows({})
    >>> rows.series, rows.columns[TRACKS["step"].index("loss")]
    ('r1.0.step', array([2.5], dtype=float32))
    >>> list(feed.rows({rows.series: 1})), feed.poll()
    ([], False)
    >>> folder.cleanup()

    Args:
        source: a run's folder; a folder of runs, or one whose subfolder `runs` holds them (a comparison); or several
            of those. None follows nothing. Nothing need exist yet. A run that is written anew counts as another run.
    """

    def __init__(self, source: str | Path | Sequence[str | Path] | None = None) -> None:
        self.runs: dict[Path, FollowedRun] = {}
        self.errors: list[dict[str, str]] = []  # what could not be read: where, text, traceback
        self._cleared: dict[Path, bytes] = {}  # folders not to show -> how their first file begins
        self._num_runs = 0
        self.follow(source)

    def follow(self, source: str | Path | Sequence[str | Path] | None) -> None:
        """Follow something else from now on; what is no longer followed is dropped at the next poll."""
        self._source = source
        self._next_scan_s = -inf

    @property
    def source(self) -> str | Path | Sequence[str | Path] | None:
        """What is followed, as it was given."""
        return self._source

    @property
    def stepped_s(self) -> float:
        """When the last step of any run was written, seconds since 1970; minus infinity before the first."""
        return max((run.stepped_s for run in self.runs.values()), default=-inf)

    def poll(self) -> bool:
        """Read what was written since the last call; True if anything is new. Never raises for what a file holds."""
        now_s = time.monotonic()
        changed = False
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S
            changed = self._scan()
        if self._read():  # runs that step together are written one after the other: take the rest at once
            self._read()
            changed = True
        return changed

    def rows(self, have: Mapping[str, int], max_numbers: int = 1 << 62) -> Iterator[Rows]:
        """Rows beyond the first `have[series]` of each series.

        Args:
            max_numbers: rows are left for the next call where there would be more numbers than this.
        """
        for run in self.runs.values():
            for rank, track in run.series():
                name = f"{run.id}.{rank}.{track}"
                keys = TRACKS[track]
                room = max_numbers // len(keys)
                if room <= 0:
                    return
                columns = run.columns(track, rank, start=have.get(name, 0), limit=room)
                if columns is not None:
                    max_numbers -= columns.size
                    yield Rows(name, have.get(name, 0), columns)

    def clear(self, run_id: str | None = None) -> None:
        """Show a run (or all there are) no more, until it is written anew. Its files stay."""
        for folder, run in list(self.runs.items()):
            if run_id in (None, run.id):
                self._cleared[folder] = _beginning(folder)
                del self.runs[folder]

    def report(self, where: str, text: str, details: str) -> None:
        """Keep an error for the view to show; the same one only once."""
        error = {"where": where, "text": text[:500], "traceback": details[-8000:]}
        if error not in self.errors:
            self.errors = [*self.errors[-9:], error]

    def progress(self) -> tuple[float, float]:
        """Share of the plans that all runs have done, and seconds left at this pace; NaN where unknown.

        What is done counts by its cost where every run's events tell it, else by steps: batches differ in cost.
        """
        runs = list(self.runs.values())
        by_cost = all(run.planned_cost > 0 for run in runs)
        planned = [run.planned_cost if by_cost else run.num_steps for run in runs]
        if not runs or not all(planned):
            return nan, nan
        share = min(1.0, sum(run.cost if by_cost else run.step for run in runs) / sum(planned))
        elapsed_s = max(run.last_s for run in runs) - min(run.first_s for run in runs)
        return share, elapsed_s * (1 - share) / share if share > 0 else nan

    def status(self) -> str:
        """`waiting`, `running`, `paused`, or how the runs ended: the worst of `failed`, `stopped` and `done`."""
        found = {run.state.status for run in self.runs.values()}
        for status in ("running", "paused", "waiting", "failed", "stopped", "done"):
            if status in found:
                return "running" if status == "waiting" and len(found) > 1 else status
        return "waiting"

    def _read(self) -> bool:
        changed = False
        for run in list(self.runs.values()):
            try:
                changed |= run.read()
            except FileNotFoundError:  # moved aside: a new one may come in its place
                del self.runs[run.folder]
                self._next_scan_s = -inf
                changed = True
            except _WrittenAnewError:
                self.runs[run.folder] = self._take(run.folder)
                changed = True
            except (DataError, OSError) as error:
                run.broken = changed = True
                self.report("reading", f"{type(error).__name__}: {error}", traceback.format_exc())
        return changed

    def _scan(self) -> bool:
        """Look for folders of runs that came or went."""
        found = _run_files(self._source)
        before = list(self.runs)
        for folder, paths in found.items():
            if folder in self.runs:
                self.runs[folder].scan(paths)
            elif self._cleared.get(folder) != _beginning(folder):
                self._cleared.pop(folder, None)
                self.runs[folder] = self._take(folder)
        for folder in set(self.runs) - set(found):
            del self.runs[folder]
        return before != list(self.runs)

    def _take(self, folder: Path) -> FollowedRun:
        self._num_runs += 1
        twins = [run for run in self.runs.values() if run.folder.name == folder.name and run.folder != folder]
        name = f"{folder.parent.parent.name}/{folder.name}" if twins else folder.resolve().name
        run = FollowedRun(f"r{self._num_runs}", name, folder)
        run.scan(_event_files(str(folder)))
        return run


class _WrittenAnewError(Exception):
    """A file is another one than before."""


@dataclass(slots=True)
class _File:
    offset: int = 0
    inode: int = 0


@dataclass(slots=True)
class FollowedRun:
    """One run's folder and what was read of it so far."""

    id: str
    name: str
    folder: Path
    state: RunState = field(default_factory=RunState)  # what is no row of a track
    first_s: float = nan  # time of the first and the last event, seconds since 1970
    last_s: float = nan
    step: int = 0
    stepped_s: float = -inf  # time of the last step
    num_steps: int = 0  # planned; 0 where unknown
    cost: float = 0.0  # of the first rank's steps, as the plan counts it
    planned_cost: float = nan  # NaN where unknown
    broken: bool = False  # a file of it cannot be read; left alone
    notes: list[dict[str, Any]] = field(default_factory=list)
    _files: dict[str, _File] = field(default_factory=dict)
    _tables: dict[tuple[int, str], array[float]] = field(default_factory=dict)  # rows of each rank and track
    _latest: dict[str, dict[str, Any]] = field(default_factory=dict)  # track -> the first rank's last values

    def scan(self, paths: Sequence[str]) -> None:
        """These are its files, one a rank."""
        for path in paths:
            self._files.setdefault(path, _File())

    def read(self) -> bool:
        """Read what is new; True if anything is."""
        changed = False
        if self.broken:
            return False
        for path, file in self._files.items():
            found = os.stat(path)
            if found.st_size < file.offset or (file.inode and found.st_ino != file.inode):
                raise _WrittenAnewError(path)
            file.inode = found.st_ino
            if found.st_size > file.offset:
                events, file.offset = _read(path, file.offset, found.st_size)
                for event in events:
                    self._fold(*event)
                changed |= bool(events)
        return changed

    def series(self) -> list[tuple[int, str]]:
        """Rank and track of every series that has rows, in order."""
        return sorted(self._tables)

    def columns(self, track: str, rank: int, *, start: int, limit: int) -> NDArray[np.float32] | None:
        """(C, N) the rows after the first `start`, at most `limit`; None if there are none."""
        table, width = self._tables.get((rank, track), ()), len(TRACKS[track])
        part = table[start * width : (start + limit) * width]
        return np.array(part, dtype=np.float32).reshape(-1, width).T if part else None

    def facts(self) -> dict[str, Any]:
        """What a view shows of the run beside its numbers."""
        step, device = self._latest.get("step", {}), self._latest.get("device", {})
        start = self.state.event("start")
        return {
            "id": self.id,
            "name": self.name,
            "ranks": sorted({rank for rank, _ in self._tables}),
            "status": self.state.status,
            "first_s": self.first_s if isfinite(self.first_s) else None,
            "device": (start and start.values.get("device")) or device.get("device"),
            "memory_source": device.get("memory_source"),
            "peak_source": step.get("memory_source"),
            "utilization_source": device.get("utilization_source"),
        }

    def _fold(self, kind: str, step: int, rank: int, time_s: float, values: dict[str, Any]) -> None:
        """Remember an event: a row where its kind is a track, else what `RunState` makes of it, and its message."""
        if not isfinite(self.first_s):  # never moved later: rows that were given already count from it
            self.first_s = self.last_s = time_s
        self.last_s = max(self.last_s, time_s)
        if kind not in TRACKS or self.state.status == "waiting":
            self.state.fold([RunEvent(kind, step, rank, time_s, values)])
        if kind in TRACKS:
            self._append(kind, rank, {**values, "step": step, "time_s": time_s - self.first_s})
            if rank == 0:
                self._latest[kind] = values
            if kind == "step":
                self.step, self.stepped_s = step, time_s
                if rank == 0 and isfinite(cost := _number(values.get("predicted_cost"))):
                    self.cost += cost
        elif kind == "start":
            self.num_steps = int(values.get("num_steps") or 0)
            self.planned_cost = _number(values.get("planned_cost"))
        elif kind in _NOTED or (kind == "end" and values.get("traceback")):
            text = str(values.get(_NOTED.get(kind, "message"), ""))
            note = {
                "run": self.name, "kind": kind, "step": step, "time_s": time_s,
                "text": text[:400], "traceback": str(values.get("traceback") or "")[-8000:],
            }  # fmt: skip
            self.notes = [*self.notes[1 - MAX_NOTES :], note]

    def _append(self, track: str, rank: int, values: dict[str, Any]) -> None:
        row = [values.get(key, nan) for key in TRACKS[track]]
        try:
            numbers = array("f", row)
        except TypeError:  # a text, which NaN is in JSON, or nothing
            numbers = array("f", map(_number, row))
        table = self._tables.get((rank, track))
        if table is None:
            table = self._tables[rank, track] = array("f")
        table.extend(numbers)


def _number(value: object) -> float:
    """A value of an event, NaN where it is no number; infinity and NaN are texts in JSON."""
    if isinstance(value, int | float) or value in ("Infinity", "-Infinity"):
        return float(value)
    return nan


def _read(path: str, offset: int, size: int) -> tuple[list[tuple[str, int, int, float, dict[str, Any]]], int]:
    """As `read_events`, at a quarter of its cost: NaN and infinity are left as texts."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, size - offset)
    finally:
        os.close(file)
    end, found = data.rfind(b"\n") + 1, []
    try:
        for line in data[:end].splitlines():
            values = orjson.loads(line)
            found.append((*map(values.pop, _FIELDS), values))
    except (ValueError, KeyError, TypeError, AttributeError):  # says which line is no event
        events, offset = read_events(path, offset)
        return [
            (event.kind, event.step, event.rank, event.time_s, dict(event.values)) for event in events
        ], offset
    return found, offset + end


def run_folders(source: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """The folders of the runs that a source stands for, as `RunFeed` takes it."""
    return list(_run_files(source))


def glance(folder: Path) -> str:
    """How far a run is, in words, from the last 64 KiB of its first rank's file."""
    path = min(folder.glob(EVENT_FILES))
    with open(path, "rb") as file:
        offset = max(0, file.seek(0, 2) - 65536)
        file.seek(offset)
        if offset:
            offset += len(file.readline())  # a line that is cut
    events, _ = read_events(path, offset)
    steps = [event.step for event in events if event.kind == "step"]
    ends = [event.values["status"] for event in events if event.kind == "end"]
    return f"{ends[-1] if ends else 'running'} at step {steps[-1] if steps else 0}"


def _run_files(source: str | Path | Sequence[str | Path] | None) -> dict[Path, list[str]]:
    """The folders of runs that a source stands for, and the event files of each."""
    roots = [] if source is None else [source] if isinstance(source, str | Path) else source
    found: dict[Path, list[str]] = {}
    for root in map(str, roots):
        found |= {Path(folder): files for folder, files in _files_below(root).items()}
    return found


def _files_below(root: str) -> dict[str, list[str]]:
    """Of this folder, of those in it, or of those in its `runs`: the first that hold any."""
    if files := _event_files(root):
        return {root: files}
    for parent in (root, os.path.join(root, "runs")):
        folders = (os.path.join(parent, name) for name in sorted(_names(parent)))
        if found := {folder: files for folder in folders if (files := _event_files(folder))}:
            return found
    return {}


def _event_files(folder: str) -> list[str]:
    start, end = EVENT_FILES.split("*")
    return [
        os.path.join(folder, name) for name in _names(folder) if name.startswith(start) and name.endswith(end)
    ]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not there, no folder, not ours to read
        return []


def _beginning(folder: Path) -> bytes:
    """Of the first rank's file: its first event, which carries the time and so tells one run from the next."""
    first = min(folder.glob(EVENT_FILES), default=None)
    try:
        return b"" if first is None else _head(first)
    except FileNotFoundError:
        return b""


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.readline(1 << 16)
