"""Encoded bytes to RGB pixels of the size that the plan promised.

JPEG goes through libjpeg-turbo (`simplejpeg`), everything else, and CMYK, through Pillow. A photograph of 640 x 480
is resized to 224 x 224 in a tenth of the time that decoding takes (3 ms on one core of an AMD EPYC); both take half
as long as in Pillow. Both steps release the interpreter's lock, so threads decode side by side.

An image is resized with antialiasing, first along rows, then along columns; each pass uses integer weights
and rounds to 8 bits, as Pillow does. torch's weights have 15 bits, Pillow's 22, so either pass may round a
value near a tie the other way: 15 values in 10,000 differ from Pillow's by one level (COCO's photographs at
224 x 224; none to 43, by their size), and one in ten million, where both passes do, by two (one in 10,000
where the ratio of the sides is a simple fraction, so that ties recur). JPEGs decode to the same bits as in
Pillow, with the versions in `constraints.txt`. Only a JPEG of 2 megapixels or more, and of at least 8 times
the target's size per side, is first decoded at a quarter or an eighth of its size. This saves a quarter to
a half of the time and, on photographs, moves pixels by at most half a level on average (20 at most).
Decoding at half the size, and libjpeg-turbo's partial decoding of crops, were measured to save little or
nothing.

Importing this module does not load torch; the first resize does.
"""

from __future__ import annotations

import io
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import Image

from mmlab.errors import DataError
from mmlab.types import ImagePolicy, Region

_REDUCTIONS = (8, 4)  # DCT scales worth using for JPEGs, largest first
# a reduction would be visible in smaller images, which show more detail per pixel
_REDUCED_FROM_PIXELS = 2_000_000
_LEAST_RATIO = 2  # least ratio of a reduced image's sides to the target's
_EXIF_ORIENTATION = 0x0112  # 5 to 8 swap the axes, before the flips
# JPEG markers: of a segment that may state an orientation (EXIF, XMP), and of the scan, which ends the header
_APP1, _SCAN = 0xE1, 0xDA
_FLIPS_ROWS, _FLIPS_COLUMNS = (3, 4, 7, 8), (2, 3, 6, 7)


def decode_image(
    encoded: bytes, policy: ImagePolicy, region: Region | None = None, planned: tuple[int, ...] = ()
) -> NDArray[np.uint8]:
    """Decode an image, put it upright, convert it to RGB, and bring it to the policy's size.

    Args:
        encoded: the content of a file of any format that Pillow reads; only the first of several frames is
            used.
        policy: gives the target size, from the size of the whole image.
        region: the part to resize, (top, left, height, width) in displayed pixels; None takes what the policy
            keeps.
        planned: height and width that the whole image had when its size was planned.

    Returns:
        (h, w, 3) uint8.

    Raises:
        DataError: not an image, damaged or cut off (nothing is filled in), smaller than `region`, with more pixels
            than Pillow opens (twice `PIL.Image.MAX_IMAGE_PIXELS`), or replaced by one whose target is not the planned
            one.
    """
    plain: Any = _plain_jpeg(encoded)
    with nullcontext() if plain is not None else opened(io.BytesIO(encoded)) as image:
        orientation = 1 if image is None else orientation_of(image)
        height, width = plain.shape[:2] if image is None else displayed_size(image)
        target = _target(policy, height, width)  # type: ignore[arg-type]  # hashable, by its protocol
        if planned and target != _target(policy, *planned):  # type: ignore[arg-type]
            was = f"{planned[0]} x {planned[1]} when the records were read"
            raise DataError(f"it was replaced: found {height} x {width} pixels, {was}")
        region = policy.kept(height, width) if region is None else Region(*region)
        top, left, rows, columns = region
        if not (0 <= top < top + rows <= height and 0 <= left < left + columns <= width):
            raise DataError(f"{region} is not in an image of {height} x {width} pixels; was it replaced?")
        ratio = min(region.height / target[0], region.width / target[1])
        pixels, reduction = (plain, 1) if image is None else _pixels(encoded, image, ratio)
    upright = as_displayed(pixels, orientation)
    if reduction > 1:
        # a reduced image extends up to a pixel beyond the stored bottom and right edges; where these are now
        # top and left, the content is shifted in by as much
        down = (upright.shape[0] - height / reduction) * (orientation in _FLIPS_ROWS)
        across = (upright.shape[1] - width / reduction) * (orientation in _FLIPS_COLUMNS)
        top, left = top / reduction + down, left / reduction + across
        box = left, top, left + columns / reduction, top + rows / reduction
        size = target[1], target[0]
        return np.array(Image.fromarray(upright).resize(size, Image.Resampling.BILINEAR, box=box))
    return _resized(upright[top : top + rows, left : left + columns], *target)


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as displayed: EXIF orientations 5 to 8 swap the stored sides. Reads the header only."""
    width, height = image.size
    return (width, height) if orientation_of(image) >= 5 else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to RGB; transparency is laid over white; 16-bit greys keep their range."""
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image, dtype=np.float64) / 257.0
        image = Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def opened(file: BinaryIO) -> Image.Image:
    """Open an image and read its header; a DataError says why that failed.

    PostScript is refused: Pillow would let Ghostscript run it.
    """
    try:
        image = Image.open(file)
    except Image.UnidentifiedImageError as error:
        raise DataError("not an image that Pillow can read") from error
    except Exception as error:  # readers of headers raise nearly anything on damaged files
        raise DataError(f"image header cannot be read: {error}") from error
    if image.format == "EPS":
        raise DataError("PostScript, a program that is not run; save it as PNG")
    if image.mode == "F":
        raise DataError("floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    return image


def orientation_of(image: Image.Image) -> int:
    """The EXIF (or XMP) orientation in an unloaded image's header, 1 (upright) to 8.

    Pillow rotates TIFF files itself. Its PNG reader would decode the image to look for EXIF after the pixels,
    so the base class's method is called: planning and decoding both use only EXIF that comes before the
    pixels.
    """
    found = 1 if image.format == "TIFF" else Image.Image.getexif(image).get(_EXIF_ORIENTATION)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _plain_jpeg(encoded: bytes) -> NDArray[np.uint8] | None:
    """All pixels of an intact JPEG that needs no rotation and no reduction; None for any other image.

    Pillow takes 25 to 40 us for the header alone, most of it holding the interpreter's lock; this takes 4.
    """
    place = 2
    with suppress(ValueError, IndexError):  # not a JPEG, damaged, or unknown to libjpeg-turbo
        while (kind := encoded[place + 1]) != _SCAN:
            if encoded[place] != 0xFF or kind == _APP1:
                return None
            place += 2 + int.from_bytes(encoded[place + 2 : place + 4], "big")
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        if colours in ("YCbCr", "Gray", "RGB") and height * width < _REDUCED_FROM_PIXELS:
            return simplejpeg.decode_jpeg(encoded, "RGB")
    return None


@lru_cache(maxsize=4096)
def _target(policy: Any, height: int, width: int) -> tuple[int, ...]:
    """Height and width after the policy. Cached: numpy holds the interpreter's lock for 7 us per size."""
    return tuple(int(side[0]) for side in policy.target_sizes(np.array([height]), np.array([width])))


def as_displayed(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """A view of the stored pixels as displayed: swap the axes first, then flip."""
    pixels = pixels.swapaxes(0, 1) if orientation >= 5 else pixels
    return pixels[:: -1 if orientation in _FLIPS_ROWS else 1, :: -1 if orientation in _FLIPS_COLUMNS else 1]


def _pixels(encoded: bytes, image: Image.Image, ratio: float) -> tuple[NDArray[np.uint8], int]:
    """All stored pixels (H, W, 3), reduced if the target is `ratio` times smaller, and by what factor."""
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L") and _readable(encoded):
        width, height = image.size
        factors = _REDUCTIONS if width * height >= _REDUCED_FROM_PIXELS else ()
        reduction = next((factor for factor in factors if ratio >= factor * _LEAST_RATIO), 1)
        try:
            pixels = simplejpeg.decode_jpeg(
                encoded, "RGB", min_height=-(-height // reduction), min_width=-(-width // reduction)
            )
        except ValueError as error:  # even a warning of libjpeg counts: Pillow would fill the gap with grey
            raise DataError(f"JPEG is damaged or cut off: {error}") from error
        return pixels, reduction
    try:
        return np.array(to_rgb(image)), 1
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise DataError(f"{image.format} is damaged or cut off: {error}") from error


def _readable(encoded: bytes) -> bool:
    """Whether libjpeg-turbo knows this kind of JPEG."""
    with suppress(ValueError):
        return bool(simplejpeg.decode_jpeg_header(encoded))
    return False


def _resized(part: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize with antialiasing."""
    # torch takes neither flipped nor read-only arrays; numpy calls a flipped row of one pixel contiguous
    part = part.copy() if min(part.strides) < 0 else np.require(part, requirements=["C", "W"])
    if part.shape[:2] == (height, width):
        return part
    import torch
    from torch.nn import functional as F

    # torch must see one image in channels-last order: it then neither separates the channels nor joins them. numpy moves
    # the axes, as each torch operation releases the interpreter's lock and waits to get it back.
    pixels = torch.from_numpy(part.reshape(1, *part.shape).transpose(0, 3, 1, 2))
    sized = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return sized.numpy()[0].transpose(1, 2, 0)
