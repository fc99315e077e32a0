"""Looking after a cache from outside, whatever it was made from: what it has, whether it is sound, away with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from mmlab.errors import DataError
from mmlab.loading.cache.settings import KEY_FILE, read_settings
from mmlab.loading.cache.shards import (
    ENTRY_BYTES,
    Damaged,
    Shard,
    index_bytes,
    is_shard,
    list_shards,
    read_index,
)

_PIXEL_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """What a cache has on the disk."""

    folder: str
    settings: dict[str, dict[str, str]]  # what it was made with
    num_shards: int
    num_images: int
    num_texts: int
    cache_bytes: int
    unused_bytes: int  # left by builders that were killed
    last_used: str | None  # local time

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {self.num_images:,} images and {self.num_texts:,} texts in {self.num_shards} shards, "
            f"{self.cache_bytes / 2**20:,.1f} MiB, {self.unused_bytes / 2**20:.1f} MiB of it unused; "
            f"last used {self.last_used or 'never'}"
        ]
        for what, settings in self.settings.items():
            lines.append(
                f"{what} made with " + ", ".join(f"{name} {value}" for name, value in settings.items())
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify_cache` found."""

    num_records: int
    num_bytes: int
    damage: tuple[str, ...]  # a line on each damaged part

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage

    def __str__(self) -> str:
        found = f"{self.num_records:,} records with {self.num_bytes / 2**20:,.1f} MiB read, {len(self.damage)} damaged"
        remedy = [] if self.ok else ["Training makes these again when it reads them; or clear the cache."]
        return "\n".join([found, *self.damage, *remedy])


def cache_info(folder: str | Path) -> CacheInfo:
    """What a cache has. Reads the indexes only.

    Raises:
        DataError: the folder is no cache.
    """
    path = _existing(folder)
    shards = list_shards(path)
    num_images = num_texts = used_bytes = 0
    for shard in shards:
        entries = read_index(path / f"{shard.name}.index")
        images = int((entries["shape"][:, 0] == _PIXEL_CHANNELS).sum())
        num_images += images
        num_texts += len(entries) - images
        used_bytes += int(-(-entries["num_bytes"].astype("i8") // 64 * 64).sum()) + len(entries) * ENTRY_BYTES
    cache_bytes = sum(shard.num_bytes for shard in shards)
    return CacheInfo(
        folder=str(folder),
        settings=read_settings(path) or {},
        num_shards=len(shards),
        num_images=num_images,
        num_texts=num_texts,
        cache_bytes=cache_bytes,
        unused_bytes=cache_bytes - used_bytes,
        last_used=f"{datetime.fromtimestamp(shards[-1].used_ns / 1e9):%Y-%m-%d %H:%M:%S}" if shards else None,
    )


def verify_cache(folder: str | Path, *, progress: bool = True) -> Verification:
    """Read every record and compare it with its checksum. Changes nothing, not even the time of last use.

    Raises:
        DataError: the folder is no cache.
    """
    path = _existing(folder)
    num_records = num_bytes = 0
    damage = []
    for files in tqdm(list_shards(path), "Verifying", disable=None if progress else True):
        shard = Shard(path, files.name, touch=False)
        for number in range(len(shard.new_keys())):
            num_records += 1
            try:
                num_bytes += shard.read(number)[0].nbytes
            except Damaged as error:
                damage.append(str(error))
        index = path / f"{files.name}.index"
        if (torn_bytes := index_bytes(index) % ENTRY_BYTES) > 0:
            damage.append(f"{index} ends with {torn_bytes} bytes of an entry")
    return Verification(num_records=num_records, num_bytes=num_bytes, damage=tuple(damage))


def clear_cache(folder: str | Path) -> dict[str, Any]:
    """Remove all that a cache has; a training that uses it goes on without.

    Returns:
        How many shards and bytes that were.

    Raises:
        DataError: the folder is no cache.
    """
    path = _existing(folder)
    shards = list_shards(path)
    for file in path.iterdir():
        if is_shard(file) or file.name.startswith(KEY_FILE):
            file.unlink(missing_ok=True)
    return {"num_shards": len(shards), "num_bytes": sum(shard.num_bytes for shard in shards)}


def _existing(folder: str | Path) -> Path:
    path = Path(folder)
    if not (path / KEY_FILE).exists() and not list_shards(path):
        raise DataError(f"{folder}: no cache is there; mmlab cache build makes one")
    return path
