"""What a cache's folder was made with, in its `key.json`; what becomes of it when that changes."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mmlab.errors import OptionError
from mmlab.loading.cache.shards import is_shard, list_shards, remove_shard

if TYPE_CHECKING:
    from mmlab.loading.cache.key import CacheKey

KEY_FILE = "key.json"


def adopt(folder: Path, key: CacheKey) -> None:
    """Make the folder this key's: say what has changed since it was made, and remove what no longer holds."""
    folder.mkdir(parents=True, exist_ok=True)
    strange = [
        path.name for path in folder.iterdir() if not path.name.startswith(KEY_FILE) and not is_shard(path)
    ]
    if strange:
        raise OptionError(
            f"{folder} is no cache: it has {strange[0]}; name an empty folder, or one that does not exist"
        )
    settings = {"images": key.image_settings, "token ids": key.text_settings}
    before = read_settings(folder)
    for what, now in settings.items():
        if before is not None and (changes := _changes(before[what], now)):
            kept = "" if what == "images" else "; images are kept"
            warnings.warn(f"{what} of the cache {folder} are made again: {changes}{kept}", stacklevel=3)
    for shard in list_shards(folder):
        if not shard.name.startswith(key.image_digest.hex()[:16]):
            remove_shard(folder, shard.name)
    if before != settings:
        draft = folder / f"{KEY_FILE}.{uuid.uuid4().hex}"
        draft.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        os.replace(draft, folder / KEY_FILE)


def read_settings(folder: Path) -> dict[str, dict[str, str]] | None:
    """What the folder's samples were made with; None for a new folder, or where that cannot be read."""
    try:
        settings = json.loads((folder / KEY_FILE).read_bytes())
        return {what: dict(settings[what]) for what in ("images", "token ids")}
    except (
        FileNotFoundError,
        ValueError,
        LookupError,
        TypeError,
    ):  # shards say by themselves what they are for
        return None


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}" for name in names)
