"""The images that every loader loads, and the ways to decode one: RGB, 224 x 224 with antialiasing, uint8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision import io as vision_io
from torchvision import transforms
from torchvision.transforms import v2
from transformers import PreTrainedTokenizerFast

from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.data.text import load_tokenizer
from mmlab.types import Region

SIDE = 224
SIDES = (320, 640, 960)  # longest sides of generated images, a third each: 100 kB on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files and captions, and a tokenizer for them."""

    paths: list[str]
    texts: list[str]
    tokenizer: PreTrainedTokenizerFast
    folder: Path  # for what an arm must write beforehand

    def __len__(self) -> int:
        return len(self.paths)


def make_corpus(folder: Path, num_images: int, data: Path | None) -> Corpus:
    """Images of `data`, again and again until there are enough, each with one caption; generated ones without it."""
    if data is None:
        num_each = -(-num_images // len(SIDES))
        sources = [
            make_dataset(folder / str(side), num_images=num_each, captions_per_image=1, max_side=side)
            for side in SIDES
        ]
    else:
        sources = [data]
    pairs = []
    for source in sources:
        records = read_records(source, progress=False)
        _, firsts = np.unique(records.group, return_index=True)
        pairs += [
            (records.store.file_of(records.image_paths[row]), records.texts[row]) for row in firsts.tolist()
        ]
    order = np.random.default_rng(0).permutation(len(pairs))
    chosen = [pairs[row] for row in np.resize(order, num_images).tolist()]
    return Corpus(
        paths=[str(path) for path, _ in chosen],
        texts=[text for _, text in chosen],
        tokenizer=load_tokenizer("builtin", records=records),
        folder=folder,
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """All of the image, to SIDE x SIDE, as `Resize((224, 224))` does."""

    side: int = SIDE

    def target_sizes(self, height: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The square, wherever there is an image."""
        side = np.where(np.asarray(height) > 0, np.int32(self.side), np.int32(0))
        return side, side.copy()

    def kept(self, height: int, width: int) -> Region:
        """All of it."""
        return Region(0, 0, height, width)


def decode_with_pil(encoded: Any, transform: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    """As in the articles: PIL, and torchvision's first transforms."""
    return (transform or RESIZE)(Image.open(encoded).convert("RGB"))


RESIZE = transforms.Compose([transforms.Resize((SIDE, SIDE)), transforms.PILToTensor()])
CROP = transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.PILToTensor()])


def _resized(image: torch.Tensor) -> torch.Tensor:
    return v2.functional.resize(image, [SIDE, SIDE], antialias=True)


def decode_with_torchvision(
    encoded: Any, change: Callable[[torch.Tensor], torch.Tensor] = _resized
) -> torch.Tensor:
    """torchvision's own decoder, and its second transforms; of a path or (n,) uint8."""
    content = vision_io.read_file(encoded) if isinstance(encoded, str) else encoded
    return change(vision_io.decode_image(content, vision_io.ImageReadMode.RGB))


def decode_with_simplejpeg(path: str) -> torch.Tensor:
    """The decoder that mmlab uses, in a loader of others."""
    pixels = simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB")
    return _resized(torch.from_numpy(pixels).permute(2, 0, 1))


def stacked(samples: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[list[int]]]:
    """A batch of samples."""
    images, ids = zip(*samples, strict=True)
    return torch.stack(images), list(ids)
