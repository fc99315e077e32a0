"""What a cached sample depends on: its own content, and the settings of everything that prepares it.

Both go into the digest under which arrays are stored, so that an array is found only where it would be made again
exactly. A file's content is recognised by its path, size and times of change (2 µs); `verify_content` reads and hashes
it at every access instead, as is always done where a store has no `file_of(image_path)`, which names the file that
holds an image.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmlab.errors import OptionError
from mmlab.machine import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmlab.data.records import Records
    from mmlab.types import ImagePolicy

FORMAT = 2  # of the shards
_DECODING = ("types.py", "data/decode.py")  # modules whose code makes the pixels
_IMAGE_LIBRARIES = ("pillow", "simplejpeg", "torch", "torchvision")
_TEXT_LIBRARIES = ("tokenizers",)


class Prepares(Protocol):
    """What the key is made from, such as a `MultimodalDataset`."""

    records: Records
    image_policy: ImagePolicy
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Names every sample of a data set together with all that prepares it. Picklable, thread-safe."""

    records: Records
    image_settings: dict[str, str]
    text_settings: dict[str, str]
    verify_content: bool = False  # hash the image's bytes at every access

    @cached_property
    def image_digest(self) -> bytes:
        """Digest of the image settings."""
        return _digest_of(self.image_settings)

    @cached_property
    def text_digest(self) -> bytes:
        """Digest of the text settings."""
        return _digest_of(self.text_settings)

    def digests(self, row: int) -> tuple[bytes | None, bytes | None]:
        """Digests of a row's pixels and of its token ids, 32 bytes each; None for what the record has not.

        Raises:
            OSError: the image is not there.
        """
        path, text = self.records.image_paths[row], self.records.texts[row]
        image = None if path is None else _digest(self.image_digest, self._content(row, path))
        return image, None if text is None else _digest(
            self.text_digest, text.encode("utf-8", "surrogatepass")
        )

    def _content(self, row: int, path: str) -> bytes:
        """What changes when the image changes."""
        file_of = None if self.verify_content else getattr(self.records.store, "file_of", None)
        if file_of is None:
            return hashlib.sha256(self.records.read_image(row)).digest()
        stat = os.stat(file_of(path))
        return f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}".encode(
            "utf-8", "surrogateescape"
        )


def cache_key(dataset: Prepares, *, verify_content: bool = False) -> CacheKey:
    """The key of a data set's samples, as they are prepared now.

    Args:
        dataset: a `MultimodalDataset`.
        verify_content: recognise images by a hash of their bytes, read at every access, instead of by path, size
            and times of change; for file systems whose times cannot be trusted.

    Raises:
        OptionError: an image policy that does not show its settings.
    """
    policy = repr(dataset.image_policy)
    if " at 0x" in policy:
        raise OptionError(
            f"image policy {policy} cannot be part of a cache's key: give its class a __repr__ with its settings, "
            "for example by making it a dataclass"
        )
    return CacheKey(
        records=dataset.records,
        image_settings={
            "cache format": str(FORMAT),
            "image policy": policy,
            "decoding code": _code_digest(),
            **_versions(_IMAGE_LIBRARIES),
        },
        text_settings={
            "tokenizer": tokenizer_fingerprint(dataset.tokenizer),
            "max_tokens": str(dataset.max_tokens),
            **_versions(_TEXT_LIBRARIES),
        },
        verify_content=verify_content,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short digest of all that decides which token ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    if backend is not None:
        content = json.loads(backend.to_str())
        content |= {"padding": None, "truncation": None}  # left by the last call
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _code_digest() -> str:
    """Of the decoding modules' source: no change of them can be forgotten."""
    root = Path(__file__).parents[2]
    code = b"".join((root / name).read_bytes() for name in _DECODING if (root / name).exists())
    return hashlib.sha256(code).hexdigest()[:12]


def _versions(libraries: tuple[str, ...]) -> dict[str, str]:
    found = versions(libraries)
    return {name: found[name] or "not installed" for name in libraries}


def _digest_of(settings: dict[str, str]) -> bytes:
    return _digest(b"", json.dumps(settings, sort_keys=True).encode())


def _digest(prefix: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(prefix + content, digest_size=32).digest()
