"""Looking after a cache from outside, whatever it was made from: what it has, whether it is sound, away with it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from mmlab.cli.printed import Printed
from mmlab.errors import DataError
from mmlab.loading.cache.slots import Damaged, Layout, SlotFile, disk_bytes, slot_files


def cache_info(folder: str | Path) -> Printed:
    """What a cache has, and what it was made with. Reads the tables only.

    Raises:
        DataError: the folder is no cache, or what a file says of itself is damaged.
    """
    files = _files(folder)
    try:
        layouts = [Layout.of(path) for path, _ in files]
    except Damaged as error:
        raise DataError(str(error)) from error
    num_images = sum(
        len(SlotFile(path, layout, writable=False).filled())
        for (path, _), layout in zip(files, layouts, strict=True)
    )
    document: dict[str, Any] = {
        "folder": str(folder),
        "settings": layouts[-1].settings,
        "num_files": len(files),  # one for every list of images
        "num_images": num_images,
        "num_slots": sum(len(layout.shapes) for layout in layouts),
        "cache_bytes": sum(disk_bytes(stat) for _, stat in files),
        "last_used": f"{datetime.fromtimestamp(files[-1][1].st_mtime):%Y-%m-%d %H:%M:%S}",  # local time
    }
    settings = ", ".join(f"{name} {value}" for name, value in layouts[-1].settings.items())
    text = (
        f"{folder}: {num_images:,} images of {document['num_slots']:,} in {len(files)} files, "
        f"{document['cache_bytes'] / 2**20:,.1f} MiB; last used {document['last_used']}\nmade with {settings}"
    )
    return Printed(document=document, text=text)


def verify_cache(folder: str | Path, *, progress: bool = True) -> Printed:
    """Read every image and compare it with its checksum. Changes nothing, not even the time of last use.

    Returns:
        How many images and bytes were read, and a line on each damaged part.

    Raises:
        DataError: the folder is no cache.
    """
    num_images = num_bytes = 0
    damage: list[str] = []
    for path, _ in _files(folder):
        try:
            file = SlotFile(path, Layout.of(path), writable=False)
        except Damaged as error:
            damage.append(str(error))
            continue
        for slot in tqdm(file.filled().tolist(), "Verifying", disable=None if progress else True):
            try:
                pixels = file.read(slot)
                num_bytes += 0 if pixels is None else pixels.nbytes
            except Damaged as error:
                damage.append(str(error))
            num_images += 1
    lines = [f"{num_images:,} images with {num_bytes / 2**20:,.1f} MiB read, {len(damage)} damaged", *damage]
    if damage:
        lines.append("Training makes these again when it reads them; or clear the cache.")
    document = {"num_images": num_images, "num_bytes": num_bytes, "damage": damage}
    return Printed(document=document, text="\n".join(lines), ok=not damage)


def clear_cache(folder: str | Path) -> Printed:
    """Remove all that a cache has; a training that uses it goes on.

    Returns:
        How many files and bytes that were.

    Raises:
        DataError: the folder is no cache.
    """
    files = _files(folder)
    for path, _ in files:
        path.unlink(missing_ok=True)
    gone = {"num_files": len(files), "num_bytes": sum(disk_bytes(stat) for _, stat in files)}
    text = f"Removed {gone['num_files']} files, {gone['num_bytes'] / 2**20:,.1f} MiB"
    return Printed(document=gone, text=text)


def _files(folder: str | Path) -> list[Any]:
    if not (files := slot_files(Path(folder))):
        raise DataError(f"{folder}: no cache is there; mmlab cache build makes one")
    return files
