"""Measurements of images, such as their sizes, made in parallel and remembered in a sidecar file.

An image is measured again when its size in bytes or its modification time changes. The sidecar is written
beside the images if they are in one writable folder, else to the user's cache folder. A sidecar that cannot
be parsed is rebuilt, with a warning. Failures are not saved.

Sizes come from headers: about 0.1 ms of CPU per image the first time. No pixel is decoded, so a file that is
cut off after its header still has a size.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from mmlab.data.decode import displayed_size, opened
from mmlab.errors import DataError
from mmlab.machine import progress_bar, regular, replace_file

Size = tuple[int, int]  # height, width in pixels, as displayed
OpenImage = Callable[[str], AbstractContextManager[BinaryIO]]  # a file object at the start of an image
Stamp = tuple[int, int]  # bytes, mtime in ns: when either changes, the image is measured again
Numbers = tuple[float, ...]
_VERSION = 1  # the images of a sidecar of another version are measured again
_NUM_THREADS = 8  # waiting for the disk overlaps, and Pillow decodes without the interpreter's lock


def image_sizes(
    stamps: Mapping[str, Stamp | None], open_image: OpenImage, *, root: Path | None = None, progress: bool
) -> dict[str, Size | str]:
    """Displayed height and width of each image or, as a string, why its header cannot be read.

    Args:
        open_image: gives a file object at the start of an image; called from several threads.
        stamps, root, progress: as in `measure_once`.
    """
    return measure_once(  # type: ignore[return-value]  # two whole numbers
        "sizes", (int, int), stamps, lambda key: _size(key, open_image), root=root, progress=progress
    )


def _size(key: str, open_image: OpenImage) -> Size | str:
    try:
        with open_image(key) as file, opened(file) as image:
            return displayed_size(image)
    except DataError as error:
        return str(error)
    except Exception as error:  # decoders raise nearly anything on damaged files; the row is reported with it
        return f"image header cannot be read: {error}"


def measure_once(
    name: str,
    types: tuple[type, ...],
    stamps: Mapping[str, Stamp | None],
    measure: Callable[[str], Numbers | str],
    *,
    root: Path | None = None,
    progress: bool = True,
) -> dict[str, Numbers | str]:
    """The numbers of each image, remembered or measured, or a string that says why it cannot be measured.

    Args:
        name: names what is measured, the sidecar `.mmlab-NAME.json`, and the one table in it.
        types: of each of an image's numbers.
        stamps: each image's key and stamp; an image without a stamp is not remembered.
        measure: measures one image; called from several threads.
        root: the folder that the sidecar belongs to.
        progress: show a bar on stderr if something must be measured.
    """
    sidecar = _sidecar_path(name, root, stamps)
    known = {} if sidecar is None else _load(sidecar, name, types)
    # the sidecar's names are relative to its folder, so that a data set can be moved with it
    folder = "" if sidecar is None else os.path.join(sidecar.parent, "")
    names = {key: key.removeprefix(folder) for key in stamps}
    outcomes: dict[str, Numbers | str] = {}
    for key, stamp in stamps.items():
        entry = known.get(names[key])
        if entry is not None and stamp == tuple(entry[:2]):
            outcomes[key] = tuple(entry[2:])
    new = [key for key in stamps if key not in outcomes]
    if not new:
        return outcomes
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        bar = progress_bar(pool.map(measure, new), f"image {name}", len(new), show=progress)
        for key, outcome in zip(new, bar, strict=True):
            outcomes[key] = outcome
            if (stamp := stamps[key]) is not None and not isinstance(outcome, str):
                known[names[key]] = [*stamp, *outcome]
    if sidecar is not None:
        _save(sidecar, name, known)
    return outcomes


def _sidecar_path(name: str, root: Path | None, stamps: Mapping[str, Stamp | None]) -> Path | None:
    if not any(stamps.values()):
        return None
    folders = {os.path.dirname(key) for key in stamps} if root is None else {str(root)}
    if len(folders) == 1 and _may_write(folder := folders.pop()):
        return Path(os.path.realpath(folder), f".mmlab-{name}.json")
    digest = hashlib.sha256(str(root or min(stamps)).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mmlab", f"{name}-{digest}.json")


def _may_write(folder: str) -> bool:
    """Whether files may be added; a folder that is marked read-only stays as it is even for an administrator."""
    return os.access(folder, os.W_OK) and bool(os.stat(folder).st_mode & 0o222)


def stamp_of(path: str) -> Stamp:
    """A file's stamp."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _load(sidecar: Path, name: str, types: tuple[type, ...]) -> dict[str, list]:
    expected = [int, int, *types]  # the stamp first
    try:
        with open(sidecar, "rb", opener=regular) as file:
            content = json.load(file)
        entries = content[name] if content["version"] == _VERSION else {}
        if not all([type(number) for number in entry] == expected for entry in entries.values()):
            raise ValueError(f"an entry is not {len(expected)} numbers of the kind that belongs there")
        if not all(isinstance(n, float) or 0 < n < 2**31 for entry in entries.values() for n in entry[2:]):
            raise ValueError("a number of pixels is not between 1 and 2^31 - 1")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"{sidecar} is damaged and will be rebuilt from the images: {error}", stacklevel=2)
        return {}
    return entries


def _save(sidecar: Path, name: str, entries: Mapping[str, list]) -> None:
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        replace_file(sidecar, json.dumps({"version": _VERSION, name: entries}, separators=(",", ":")))
    except OSError as error:
        warnings.warn(f"image {name} cannot be kept in {sidecar} for the next time: {error}", stacklevel=3)
