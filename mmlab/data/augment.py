"""Random changes of decoded images: crops, flips, colours, RandAugment.

What is drawn depends on (seed, epoch, record id) alone, never on a global generator: the number of workers, the
backend, the order of samples and resuming do not matter. Everything works on uint8 and keeps the image's size, so plans and
caches stay right.

Images are changed one by one, also those of one batch: on padded batches colours would mix with the padding.
Costs 0.03 ms per image to draw and, at 224 x 224 on one core, 0.5 to 1 ms to crop, 0.5 ms for brightness,
contrast or saturation, 7 ms for hue, up to 2 ms for a RandAugment step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import BOUNDS, OptionError, check_numbers
from mmlab.types import Region

if TYPE_CHECKING:
    import torch

_NUM_ATTEMPTS = 10  # to find a crop that fits, as torchvision has it

_COLOURS = ("brightness", "contrast", "saturation", "hue")
# RandAugment's operations: the amount at full strength, whether its sign is drawn, and the change, by torchvision's
# functions, which take seconds to import
_OPERATIONS: dict[str, tuple[float, bool, Callable[[Any, torch.Tensor, float], torch.Tensor]]] = {
    "identity": (0.0, False, lambda F, image, amount: image),
    "shear_x": (0.3, True, lambda F, image, amount: _move(F, image, (0, 0), (amount, 0))),
    "shear_y": (0.3, True, lambda F, image, amount: _move(F, image, (0, 0), (0, amount))),
    "translate_x": (150 / 331, True, lambda F, image, amount: _move(F, image, (amount, 0), (0, 0))),
    "translate_y": (150 / 331, True, lambda F, image, amount: _move(F, image, (0, amount), (0, 0))),
    "rotate": (30.0, True, lambda F, image, amount: F.rotate(image, amount)),
    "brighter": (0.9, True, lambda F, image, amount: F.adjust_brightness(image, 1 + amount)),
    "more_colour": (0.9, True, lambda F, image, amount: F.adjust_saturation(image, 1 + amount)),
    "more_contrast": (0.9, True, lambda F, image, amount: F.adjust_contrast(image, 1 + amount)),
    "sharper": (0.9, True, lambda F, image, amount: F.adjust_sharpness(image, 1 + amount)),
    "posterize": (4.0, False, lambda F, image, amount: F.posterize(image, 8 - round(amount))),
    "solarize": (1.0, False, lambda F, image, amount: F.solarize(image, 255 * (1 - amount))),
    "autocontrast": (0.0, False, lambda F, image, amount: F.autocontrast(image)),
    "equalize": (0.0, False, lambda F, image, amount: F.equalize(image)),
}
_NAMES = tuple(_OPERATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was drawn for one sample."""

    # of each attempt, in order: share of the area, and factor on the aspect ratio
    crops: tuple[tuple[float, float], ...]
    place: tuple[float, float]  # of the crop: 0 is top and left, 1 is bottom and right
    flip: bool
    changes: tuple[tuple[str, float], ...]  # name and amount, in order

    @property
    def is_crop(self) -> bool:
        """Whether nothing changes once the image is cropped."""
        return not (self.flip or self.changes)

    def region(self, height: int, width: int, target_height: int, target_width: int) -> Region | None:
        """The part of a displayed image of height x width pixels to resize to the target size; None without crops.

        Its aspect ratio is the target's times the drawn factor, so nothing is stretched by more than that.
        """
        if not self.crops:
            return None
        for share, factor in self.crops:
            ratio = factor * target_width / target_height
            rows = round((share * height * width / ratio) ** 0.5)
            columns = round((share * height * width * ratio) ** 0.5)
            if 0 < rows <= height and 0 < columns <= width:
                down, across = self.place
                top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
                return Region(top, left, rows, columns)
        rows, columns = max(1, min(height, round(width / ratio))), max(1, min(width, round(height * ratio)))
        return Region((height - rows) // 2, (width - columns) // 2, rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Random changes of a sample's image, determined by (seed, epoch, record id). Picklable; thread-safe.

    Example: `PlannedLoader(dataset, scheduler, augment=Augment(brightness=0.4, contrast=0.4))`

    Args:
        crop_scale: least and largest share of the image's area that a random-resized crop keeps; None for no
            crop.
        crop_ratio: least and largest factor between a crop's aspect ratio and the target's.
        flip_probability: of a horizontal flip, which makes captions with "left" or "right", and writing in
            the image, wrong.
        brightness, contrast, saturation: factors are drawn from 1 - value to 1 + value; the order of these
            changes is random.
        hue: shift of the colour circle, drawn from -value to value, at most 0.5 (half the circle).
        num_operations: number of RandAugment's operations on each image; some rotate, shear or translate it.
        magnitude: their strength, 0 to 30.

    Raises:
        OptionError: a value out of range.

    Source: crops as in Szegedy et al. 2015 (arXiv:1409.4842) with the scale of Radford et al. 2021
    (arXiv:2103.00020); RandAugment, Cubuk et al. 2020 (arXiv:1909.13719), with torchvision's operations.
    """

    crop_scale: tuple[float, float] | None = (0.9, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    num_operations: int = 0
    magnitude: int = 9

    def __post_init__(self) -> None:
        for name, highest in (("crop_scale", 1), ("crop_ratio", 10**6)):
            given = getattr(self, name)
            pair = (1, 1) if given is None and name == "crop_scale" else given
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and 0 < pair[0] <= pair[1] <= highest):
                raise OptionError(f"{name} must be (least, largest), above 0, up to {highest}, found {given}")
        check_numbers(self)

    def draw(self, *, seed: int, epoch: int, record_id: str) -> Drawn:
        """Draw a sample's changes for an epoch. Options that are off do not change what others draw."""
        key = blake2b(f"{seed}/{epoch}/{record_id}".encode(), digest_size=16).digest()
        uniform = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        crops = uniform.random((_NUM_ATTEMPTS, 2))
        down, across, flip = uniform.random(3)
        order, factors = uniform.permutation(len(_COLOURS)), uniform.uniform(-1, 1, len(_COLOURS))
        changes = []
        for index in order:
            name = _COLOURS[index]
            if value := getattr(self, name):
                amount = value * factors[index]
                changes.append((name, float(amount) if name == "hue" else max(0.0, 1.0 + float(amount))))
        for _ in range(self.num_operations):
            name = _NAMES[uniform.integers(len(_NAMES))]
            strongest, is_signed, _ = _OPERATIONS[name]
            sign = -1.0 if uniform.random() < 0.5 and is_signed else 1.0
            changes.append((name, sign * strongest * self.magnitude / BOUNDS["magnitude"][1]))
        if self.crop_scale is not None:  # uniform in the area and in the logarithm of the aspect ratio
            low, high = np.array([self.crop_scale, np.log(self.crop_ratio)]).T
            crops = low + crops * (high - low)
            crops[:, 1] = np.exp(crops[:, 1])
        return Drawn(
            crops=() if self.crop_scale is None else tuple(map(tuple, crops.tolist())),
            place=(float(down), float(across)),
            flip=bool(flip < self.flip_probability),
            changes=tuple(changes),
        )

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor:
        """Draw and apply; (3, h, w) uint8 in and out."""
        return self.apply(image, self.draw(seed=seed, epoch=epoch, record_id=record_id))

    def apply(self, image: torch.Tensor, drawn: Drawn, *, cropped: bool = False) -> torch.Tensor:
        """Change an image (3, h, w) uint8, or several alike (N, 3, h, w), as drawn.

        Args:
            cropped: the image was already decoded from `drawn.region` (`decode_image(..., region=...)`),
                which is sharper than cropping it afterwards, but not possible with a cached image.
        """
        from torchvision.transforms.v2 import functional as F

        height, width = image.shape[-2:]
        region = None if cropped else drawn.region(height, width, height, width)
        if region is not None:
            image = F.resized_crop(image, *region, size=[height, width], antialias=True)
        if drawn.flip:
            image = F.horizontal_flip(image)
        for name, amount in drawn.changes:
            image = change(image, name, amount)
        return image.contiguous()


def change(image: torch.Tensor, name: str, amount: float) -> torch.Tensor:
    """Apply one colour change or one of RandAugment's operations: uint8 in, the same size and type out."""
    from torchvision.transforms.v2 import functional as F

    if name in _COLOURS:
        return getattr(F, f"adjust_{name}")(image, amount)
    return _OPERATIONS[name][2](F, image, amount)


def _move(F: Any, image: torch.Tensor, shift: Sequence[float], slopes: Sequence[float]) -> torch.Tensor:
    """Shift by shares of the width and the height, and shear about the top left corner."""
    pixels = [int(shift[0] * image.shape[-1]), int(shift[1] * image.shape[-2])]
    degrees = np.degrees(np.arctan(slopes)).tolist()
    return F.affine(image, angle=0.0, translate=pixels, scale=1.0, shear=degrees, center=[0.0, 0.0])
