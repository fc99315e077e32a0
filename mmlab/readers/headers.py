"""Image sizes from file headers, read in parallel and remembered.

Costs about 0.1 ms of CPU an image the first time; after that a look-up in a sidecar file, keyed by path, size in bytes
and modification time. A sidecar that cannot be understood is rebuilt, with a warning. Does not decode a pixel, so a
file that is cut off after its header still has a size.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from tqdm.auto import tqdm

from mmlab.images import displayed_size

Stamp = tuple[int, int]  # bytes, mtime in ns: when either changes, the header is read again
Size = tuple[int, int]  # height, width in pixels, as displayed
SIDECAR_NAME = ".mmlab-sizes.json"
_VERSION = 1
_NUM_THREADS = 8  # waiting for the disk overlaps; parsing holds the interpreter's lock


def image_sizes(
    stamps: Mapping[str, Stamp | None],
    open_image: Callable[[str], BinaryIO],
    *,
    root: Path | None = None,
    progress: bool = True,
) -> dict[str, Size | str]:
    """Displayed height and width of each image or, as a string, why its header cannot be read.

    Args:
        stamps: each image's key and stamp; an image without a stamp is not remembered.
        open_image: gives a file object at the start of an image; called from several threads.
        root: the folder that the sidecar belongs to.
        progress: show a bar if stderr is a terminal and something must be read.
    """
    sidecar = _sidecar_path(root, stamps)
    known = {} if sidecar is None else _load(sidecar)
    names = _names(stamps, sidecar)
    sizes: dict[str, Size | str] = {}
    for key, stamp in stamps.items():
        entry = known.get(names[key])
        if stamp is not None and entry is not None and (entry[0], entry[1]) == stamp:
            sizes[key] = (entry[2], entry[3])
    new = [key for key in stamps if key not in sizes]
    if not new:
        return sizes
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        outcomes = pool.map(lambda key: _measure(key, open_image), new)
        bar = tqdm(outcomes, "image headers", len(new), disable=None if progress else True)
        sizes |= zip(new, bar, strict=True)
    for key in new:
        stamp, size = stamps[key], sizes[key]
        if stamp is not None and not isinstance(size, str):
            known[names[key]] = [*stamp, *size]
    if sidecar is not None:
        _save(sidecar, known)
    return sizes


def _measure(key: str, open_image: Callable[[str], BinaryIO]) -> Size | str:
    from PIL import Image

    try:
        with open_image(key) as file, Image.open(file) as image:
            return displayed_size(image)
    except Image.UnidentifiedImageError:
        return "not an image that Pillow can read"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"image header cannot be read: {error}"


def _sidecar_path(root: Path | None, stamps: Mapping[str, Stamp | None]) -> Path | None:
    """Beside the images if they are in one folder that can be written, else in the user's cache folder."""
    if not any(stamps.values()):
        return None
    folders = {os.path.dirname(key) for key in stamps} if root is None else {str(root)}
    if len(folders) == 1 and _may_write(folder := folders.pop()):
        return Path(os.path.realpath(folder), SIDECAR_NAME)
    digest = hashlib.sha256(str(root or min(stamps)).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mmlab", f"sizes-{digest}.json")


def _may_write(folder: str) -> bool:
    """Whether files may be added; a folder that is marked read-only stays as it is even for an administrator."""
    return os.access(folder, os.W_OK) and bool(os.stat(folder).st_mode & 0o222)


def _names(keys: Mapping[str, object], sidecar: Path | None) -> dict[str, str]:
    """The keys as the sidecar writes them: relative to its folder, so that a data set can be moved with it."""
    folder = "" if sidecar is None else os.path.join(sidecar.parent, "")
    return {key: key.removeprefix(folder) for key in keys}


def _load(sidecar: Path) -> dict[str, list[int]]:
    try:
        content = json.loads(sidecar.read_bytes())
        sizes = content["sizes"] if content["version"] == _VERSION else {}
        if not all(
            len(entry) == 4 and all(type(number) is int for number in entry) for entry in sizes.values()
        ):
            raise ValueError("an entry is not four integers")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{sidecar} is damaged and will be rebuilt from the images' headers: {error}", stacklevel=2
        )
        return {}
    return sizes


def _save(sidecar: Path, sizes: Mapping[str, list[int]]) -> None:
    """Write a new file beside the old one and swap them, so that a reader sees either, whole."""
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    draft = sidecar.with_name(f"{sidecar.name}.{uuid.uuid4().hex}")
    draft.write_text(
        json.dumps({"version": _VERSION, "sizes": sizes}, separators=(",", ":")), encoding="ascii"
    )
    os.replace(draft, sidecar)
