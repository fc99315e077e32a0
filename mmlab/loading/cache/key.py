"""What a cached image depends on: the image itself, and the settings of everything that prepares it.

The settings and the list of images name the cache's file, so that an image is found only if decoding it again
would give exactly the same pixels. A changed image is recognised by its file's size and times of change (2
µs); where a store has no `part_of(image_path)`, which names the file that holds an image, it is read and
hashed at every access instead.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError
from mmlab.machine import versions

if TYPE_CHECKING:
    from mmlab.data.dataset import MultimodalDataset
    from mmlab.data.records import Records

FORMAT = 3  # of the slot file
_DECODING = ("types.py", "data/decode.py")  # modules whose code makes the pixels
_LIBRARIES = ("pillow", "simplejpeg", "torch", "torchvision")


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheKey:
    """Gives each distinct image a slot, and lists what its pixels depend on. Picklable, thread-safe."""

    records: Records
    settings: dict[str, str]  # of what makes the pixels
    images: str  # digest of the list of images and their sizes
    shapes: NDArray[np.int64]  # (S, 2) height and width of the image in each slot, after the image policy
    slots: NDArray[np.int64]  # (N,) the slot of each row's image; -1 without an image

    @cached_property
    def settings_digest(self) -> str:
        """Digest of the settings, 16 characters."""
        return _digest(json.dumps(self.settings, sort_keys=True).encode()).hex()[:16]

    def source(self, row: int) -> bytes:
        """Sixteen bytes that change when the image of a row changes.

        Raises:
            OSError: the image is not there.
        """
        path = self.records.image_paths[row]
        assert path is not None
        part_of = getattr(self.records.store, "part_of", None)
        if part_of is None:
            return _digest(self.records.read_image(row))
        stat = os.stat(part_of(path)[0])
        return _digest(os.fsencode(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"))


def cache_key(dataset: MultimodalDataset, *, among: Iterable[MultimodalDataset] = ()) -> CacheKey:
    """The key of a data set's images, as they are prepared now.

    Args:
        dataset: whose images are kept.
        among: data sets of the same image policy that share the cache's file, such as training and held-out pairs:
            the file then does not depend on how the images are divided.

    Raises:
        OptionError: an image policy that does not show its settings.
    """
    policy = repr(dataset.image_policy)
    if " at 0x" in policy:
        raise OptionError(
            f"image policy {policy} cannot be part of a cache's key: give its class a __repr__ with its settings, "
            "for example by making it a dataclass"
        )
    shape_of: dict[str, tuple[int, int]] = {}
    for part in (dataset, *among):
        shapes = zip(part.sizes.height.tolist(), part.sizes.width.tolist(), strict=True)
        pairs = zip(part.records.image_paths, shapes, strict=True)
        shape_of |= {path: shape for path, shape in pairs if path is not None}
    paths = sorted(shape_of)
    slot_of = {path: slot for slot, path in enumerate(paths)}
    images = [(path, *shape_of[path]) for path in paths]
    root, found = Path(__file__).parents[2], versions(_LIBRARIES)
    code = b"".join((root / name).read_bytes() for name in _DECODING)  # no change of it can be forgotten
    return CacheKey(
        records=dataset.records,
        settings={
            "cache format": str(FORMAT),
            "image policy": policy,
            "decoding code": _digest(code).hex()[:12],
            **{name: found[name] or "not installed" for name in _LIBRARIES},
        },
        images=_digest(json.dumps(images).encode()).hex()[:16],
        shapes=np.array([shape_of[path] for path in paths], np.int64).reshape(-1, 2),
        slots=np.array([slot_of.get(path or "", -1) for path in dataset.records.image_paths], np.int64),
    )


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
