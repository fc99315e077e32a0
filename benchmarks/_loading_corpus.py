"""The images that every loader loads, and the ways to decode one: RGB, 224 x 224 with antialiasing, uint8."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a collection's photographs are like, where that decides how fast they load."""

    sides: tuple[tuple[int, int], ...]  # (width, height), each as often as it stands here
    qualities: tuple[int, int]  # of JPEG, the lowest and the highest
    subsampling: int  # of the colours, as Pillow counts it: 0 is 4:4:4, 2 is 4:2:0
    mean_bytes: int  # of a file; the grain is chosen so that it comes out
    num_files: int  # different ones; a corpus repeats them
    softness: float  # pixels to the finest detail: cameras resolve less than they store


KINDS = {
    "imagenet": Kind(
        sides=((500, 375),) * 5 + ((375, 500),) * 2 + ((500, 333),) * 3 + ((400, 300), (640, 480), (333, 500)),
        qualities=(90, 95), subsampling=2, mean_bytes=110_000, num_files=800, softness=1.0,
    ),
    "coco": Kind(
        sides=((640, 427),) * 4 + ((640, 480),) * 5 + ((480, 640),) * 3 + ((427, 640), (500, 375)),
        qualities=(94, 97), subsampling=0, mean_bytes=164_000, num_files=400, softness=1.4,
    ),
    "camera": Kind(
        sides=((4000, 3000),) * 3 + ((3000, 4000),),
        qualities=(90, 95), subsampling=2, mean_bytes=4_000_000, num_files=12, softness=2.5,
    ),
}  # fmt: skip


def make_corpus(folder: Path, num_images: int, kind: str, photos: Path | None = None) -> Corpus:
    """So many images of a kind, or those below the folder `photos`, again and again; each has one caption.

    Kinds are those of `KINDS`, made here, and "scenes": what `mmlab.make_dataset` draws, 100 kB on average.
    """
    if photos is not None:
        paths = sorted(path for path in photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    elif kind == "scenes":
        num_each = -(-num_images // len(SIDES))
        for side in SIDES:
            make_dataset(folder / str(side), num_images=num_each, captions_per_image=1, max_side=side)
        paths = sorted(folder.rglob("*.jpg"))
    else:
        paths = make_photos(folder / kind, KINDS[kind], min(num_images, KINDS[kind].num_files))
    if not paths:
        raise SystemExit(f"{photos}: no JPEG files are there")
    chosen = np.resize(np.random.default_rng(0).permutation(len(paths)), num_images)
    texts = [
        f"a photograph of scene {row} with {row % 7} people and a {row % 5} m wall"
        for row in range(num_images)
    ]
    names = [str(paths[place]) for place in chosen]
    return Corpus(
        paths=names,
        texts=texts,
        tokenizer=load_tokenizer(records=read_records(names, texts, progress=False)),
        folder=folder,
    )


def make_photos(folder: Path, kind: Kind, num_files: int) -> list[Path]:
    """Photograph-like JPEG files: parts of one picture whose detail falls with frequency as nature's does.

    The picture has shapes of all sizes with sharp edges, in front of each other (dead leaves), a 1/f texture, and grain.
    """
    random = np.random.default_rng(1)
    longest = max(max(sides) for sides in kind.sides)
    side = max(1600, longest)
    canvas = np.asarray(Image.fromarray(_canvas(random, round(side / kind.softness))).resize((side, side)))

    def files(number: int, grain: float) -> bytes:
        draw = np.random.default_rng(number)
        width, height = kind.sides[number % len(kind.sides)]
        top, left = (
            draw.integers(0, canvas.shape[0] - height + 1),
            draw.integers(0, canvas.shape[1] - width + 1),
        )
        part = canvas[top : top + height, left : left + width][:, :: draw.choice([-1, 1])].astype(np.float32)
        noise = draw.standard_normal((height, width, 1), np.float32)
        image = Image.fromarray(np.clip(part + grain * noise, 0, 255).astype(np.uint8))
        encoded = io.BytesIO()
        quality = int(draw.integers(kind.qualities[0], kind.qualities[1] + 1))
        image.save(encoded, "JPEG", quality=quality, subsampling=kind.subsampling)
        return encoded.getvalue()

    probe, low, high = range(max(2, 3_000_000 // (longest * longest))), 0.0, 40.0
    for _ in range(6):  # more grain, larger files
        middle = (low + high) / 2
        too_large = np.mean([len(files(number, middle)) for number in probe]) > kind.mean_bytes
        low, high = (low, middle) if too_large else (middle, high)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:04}.jpg" for number in range(num_files)]
    for number, path in enumerate(paths):
        path.write_bytes(files(number, middle))
    return paths


def _canvas(random: np.random.Generator, side: int) -> NDArray[np.uint8]:
    """(side, side, 3) uint8."""
    picture = Image.new("RGB", (side, side), (110, 115, 120))
    pen = ImageDraw.Draw(picture)
    # areas all together as much at every size: radii fall as r ** -3, the large ones first
    radii = np.sort(4 * (1 - random.random(side * side // 400) * (1 - (4 / (side / 3)) ** 2)) ** -0.5)[::-1]
    for radius in radii:
        x, y, wide, level = *random.uniform(0, side, 2), random.uniform(0.4, 1), random.uniform(20, 235)
        box = (x - radius, y - wide * radius, x + radius, y + wide * radius)
        colour = tuple(np.clip(level + random.normal(0, 18, 3), 0, 255).astype(int).tolist())
        (pen.ellipse if random.random() < 0.6 else pen.rectangle)(box, fill=colour)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    waves = np.fft.rfft2(random.standard_normal((side, side))) / frequency
    texture = np.fft.irfft2(waves, (side, side))
    return np.clip(np.asarray(picture) + 14 * (texture / texture.std())[..., None], 0, 255).astype(np.uint8)


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
