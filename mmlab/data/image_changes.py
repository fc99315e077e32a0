"""The changes of images that `mmlab.data.augment` draws, by torchvision: uint8 in, the same size and type out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from mmlab.types import Region


def crop(image: torch.Tensor, region: Region) -> torch.Tensor:
    """Enlarge a region to the size of the image (..., h, w)."""
    return F.resized_crop(image, *region, size=list(image.shape[-2:]), antialias=True)


def flip(image: torch.Tensor) -> torch.Tensor:
    """Mirror left and right."""
    return F.horizontal_flip(image)


def _shear(image: torch.Tensor, *slopes: float) -> torch.Tensor:
    degrees = np.degrees(np.arctan(slopes)).tolist()
    return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=degrees, center=[0.0, 0.0])


def _shift(image: torch.Tensor, across: float, down: float) -> torch.Tensor:
    pixels = [int(across * image.shape[-1]), int(down * image.shape[-2])]
    return F.affine(image, angle=0.0, translate=pixels, scale=1.0, shear=[0.0, 0.0])


CHANGES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": F.adjust_hue,
    "identity": lambda image, amount: image,
    "shear_x": lambda image, amount: _shear(image, amount, 0.0),
    "shear_y": lambda image, amount: _shear(image, 0.0, amount),
    "translate_x": lambda image, amount: _shift(image, amount, 0.0),
    "translate_y": lambda image, amount: _shift(image, 0.0, amount),
    "rotate": F.rotate,
    "brighter": lambda image, amount: F.adjust_brightness(image, 1 + amount),
    "more_colour": lambda image, amount: F.adjust_saturation(image, 1 + amount),
    "more_contrast": lambda image, amount: F.adjust_contrast(image, 1 + amount),
    "sharper": lambda image, amount: F.adjust_sharpness(image, 1 + amount),
    "posterize": lambda image, amount: F.posterize(image, 8 - round(amount)),
    "solarize": lambda image, amount: F.solarize(image, 255 * (1 - amount)),
    "autocontrast": lambda image, amount: F.autocontrast(image),
    "equalize": lambda image, amount: F.equalize(image),
}
