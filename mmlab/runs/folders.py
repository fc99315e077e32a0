"""The folder of a run or comparison: earlier files are moved aside, never overwritten; one run at a time."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmlab.errors import OptionError
from mmlab.machine import lock

TIME_MODEL = "time_model.json"
COMPARISON = "comparison.json"
COMPARISON_FILES = (COMPARISON, "table.csv", "figure.png", "report.html", TIME_MODEL, "runs")
ASIDE = "previous-"  # files of earlier runs are in previous-1, previous-2, ...


def is_aside(name: str) -> bool:
    """Whether a folder of this name holds the files of an earlier run."""
    return name.startswith(ASIDE) and name.removeprefix(ASIDE).isdecimal()


def folder_now(folder: Path, name: str, is_own: Callable[[str], bool]) -> Path:
    """Where a run's files are now: a later run in its folder has moved them to `previous-N` inside it.

    Args:
        name: a file that the run wrote.
        is_own: whether the content of such a file is this run's. It may raise ValueError, TypeError or LookupError.
    """
    for path in (folder / name, *folder.glob(f"{ASIDE}*/{name}")):
        with suppress(OSError, ValueError, TypeError, LookupError):
            if is_own(path.read_text()):
                return path.parent
    return folder


def move_earlier_aside(folder: Path, written: Iterable[str], *, say: bool = False) -> Path:
    """Move an earlier run's files in a folder to `previous-N` inside it; returns the folder.

    Args:
        written: names of the files and folders that a run writes, with wildcards.
        say: tell on stderr where they are now.
    """
    if old := [path for name in written for path in folder.glob(name)]:
        numbers = [int(path.name.removeprefix(ASIDE)) for path in folder.iterdir() if is_aside(path.name)]
        aside = folder / f"{ASIDE}{1 + max(numbers, default=0)}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        if say:
            print(f"the files of an earlier run in {folder} are now in {aside}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def put_back_if_refused(folder: Path, written: Iterable[str], *, begun: str) -> Iterator[None]:
    """If an exception ends this context before a run has begun, remove its files, and put back those moved aside in it.

    Where an earlier run is resumed, its JSON files get their content back.

    Args:
        written: names of the files and folders that a run writes, with wildcards.
        begun: the file that a run writes when it begins, also if it is there.
    """
    earlier, contents = set(folder.iterdir()), {path: path.read_bytes() for path in folder.glob("*.json")}
    sign = folder / begun
    inode = sign.stat().st_ino if sign.exists() else None  # another one once it is written anew
    try:
        yield
    except BaseException:  # an interrupt too
        if sign.exists() and sign.stat().st_ino != inode:
            raise
        moved = set(folder.glob(f"{ASIDE}*")) - earlier
        for path in [path for name in written for path in folder.glob(name)]:
            if moved or path not in earlier:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path in contents:
                path.write_bytes(contents[path])
        for aside in moved:
            for path in aside.iterdir():
                path.rename(folder / path.name)
            aside.rmdir()
            print(f"they are back in {folder}: no run has begun", file=sys.stderr)
        raise


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, made if need be, until the context is left or this process ends.

    The lock is on the folder itself, so it leaves no file. Nothing is locked where locks are not supported.

    Raises:
        OptionError: another run holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # child processes do not inherit it
    try:
        try:
            lock(descriptor, wait=False)
        except BlockingIOError:
            problem = f"another run is active in {folder}{_holder(folder)}; stop it, or name another folder"
            raise OptionError(problem) from None
        yield
    finally:
        with suppress(OSError):  # not only by closing it: forked workers have it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _holder(folder: Path) -> str:
    """Which process holds a folder, in brackets; empty if unknown."""
    with suppress(OSError):
        end = f":{folder.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process_id, place, *_ = line.split()
            if kind == "FLOCK" and place.endswith(end):
                return f" (process {process_id} on {platform.node()})"
    return ""
