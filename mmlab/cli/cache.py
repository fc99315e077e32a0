"""`mmlab cache info`, `verify` and `clear`: inspect and clear a cache without its data set.

Each raises DataError if the folder is no cache; `info` also if the header of a file is damaged.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from mmlab.cli.printed import Printed
from mmlab.errors import DataError
from mmlab.machine import progress_bar

CacheFolder = Annotated[str | Path, "the cache's folder"]


def cache_info(folder: CacheFolder) -> Printed:
    """Show what a cache holds and the settings it was made with."""
    from mmlab.loading.cache.slots import Damaged, Layout, SlotFile, disk_bytes

    files = _files(folder)
    try:
        slots = [SlotFile(path, Layout.of(path), writable=False) for path, _ in files]
    except Damaged as error:
        raise DataError(str(error)) from error
    settings = slots[-1].layout.settings
    document: dict[str, Any] = {
        "folder": str(folder),
        "settings": settings,
        "num_files": len(files),  # one for every list of images
        "num_images": sum(len(file.filled()) for file in slots),
        "num_slots": sum(len(file.layout.shapes) for file in slots),
        "cache_bytes": sum(disk_bytes(stat) for _, stat in files),
        "last_used": f"{datetime.fromtimestamp(files[-1][1].st_mtime):%Y-%m-%d %H:%M:%S}",  # local time
    }
    made_with = ", ".join(f"{name} {value}" for name, value in settings.items())
    text = (
        f"{folder}: {document['num_images']:,} images of {document['num_slots']:,} in {len(files)} files, "
        f"{document['cache_bytes'] / 2**20:,.1f} MiB; last used {document['last_used']}\nmade with {made_with}"
    )
    return Printed(document=document, text=text)


def verify_cache(folder: CacheFolder) -> Printed:
    """Read all of a cache and list what is damaged; change nothing."""
    from mmlab.loading.cache.slots import Damaged, Layout, SlotFile

    num_images = num_bytes = 0
    damage: list[str] = []
    for path, _ in _files(folder):
        try:
            file = SlotFile(path, Layout.of(path), writable=False)
        except Damaged as error:
            damage.append(str(error))
            continue
        for slot in progress_bar(file.filled().tolist(), "Verifying"):
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


def clear_cache(folder: CacheFolder) -> Printed:
    """Remove all files of a cache; training that uses it continues."""
    from mmlab.loading.cache.slots import disk_bytes

    files = _files(folder)
    for path, _ in files:
        path.unlink(missing_ok=True)
    gone = {"num_files": len(files), "num_bytes": sum(disk_bytes(stat) for _, stat in files)}
    text = f"Removed {gone['num_files']} files, {gone['num_bytes'] / 2**20:,.1f} MiB"
    return Printed(document=gone, text=text)


def _files(folder: str | Path) -> list[Any]:
    from mmlab.loading.cache.slots import slot_files

    if not (files := slot_files(Path(folder))):
        raise DataError(f"{folder}: no cache is there; mmlab cache build makes one")
    return files
