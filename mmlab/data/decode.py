"""Encoded bytes to RGB pixels of the size that the plan promised.

JPEG goes through libjpeg-turbo (`simplejpeg`), everything else, and CMYK, through Pillow. A photograph of 640 x 480
costs about 1.2 ms to decode and 0.3 ms to resize to 224 x 224 on one core, half of what Pillow takes. Both steps
release the interpreter's lock, so that threads decode side by side.

An image is resized with antialiasing, to within one level of what Pillow's bilinear resize gives. Only a JPEG of 2
megapixels or more, and of at least 8 times the target's size per side, is decoded at a quarter or an eighth of its size
first: that saves a quarter to a half and, on photographs, moves pixels by at most half a level on average (20 at most).
Decoding at half the size was measured to save nothing.

A region is cut out of the whole decoded image: the entropy code must be read in any case, and libjpeg-turbo's partial
decoding of random crops was measured to save a tenth of the decoding, which no binding with wheels offers.

Torch is loaded by the first resize, not by importing this module.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simplejpeg  # type: ignore[import-untyped]

from mmlab.errors import DataError
from mmlab.types import ImagePolicy, Region

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from PIL import Image

MAX_PIXELS = 178_956_970  # above this Pillow refuses to open an image, too
_REDUCTIONS = (8, 4)  # of JPEGs: DCT scales that pay, largest first
_REDUCED_FROM_PIXELS = 2_000_000  # smaller images show so much detail a pixel that the reduction shows
_LEAST_RATIO = 2  # sides of a reduced image, to those of the target
_EXIF_ORIENTATION = 0x0112


class _Turn(NamedTuple):
    """How stored pixels become displayed ones: swap the axes first, then flip."""

    swap: bool = False
    flip_rows: bool = False
    flip_columns: bool = False


_TURNS = {  # by EXIF orientation
    2: _Turn(False, False, True),
    3: _Turn(False, True, True),
    4: _Turn(False, True, False),
    5: _Turn(True, False, False),
    6: _Turn(True, False, True),
    7: _Turn(True, True, True),
    8: _Turn(True, True, False),
}


def decode_image(
    encoded: bytes, policy: ImagePolicy, region: Region | None = None, *, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Decode an image, put it upright, convert it to RGB, and bring it to the policy's size.

    Args:
        encoded: a file's content, of any format that Pillow reads; of several frames the first counts.
        policy: gives the size, from that of the whole image.
        region: (top, left, height, width) in displayed pixels to resize to that size, instead of what the policy keeps.
        max_pixels: an image with more is refused before it is decoded. A limit above the default needs
            `PIL.Image.MAX_IMAGE_PIXELS` raised as well.

    Returns:
        (h, w, 3) uint8; a view whose channel-first transpose is contiguous where the image was resized.

    Raises:
        DataError: not an image, damaged or cut off (nothing is filled in), too large, or smaller than `region`.
    """
    with _opened(encoded, max_pixels) as image:
        turn = _turn(image)
        height, width = displayed_size(image)
        target_height, target_width = _target(policy, height, width)
        region = policy.kept(height, width) if region is None else Region(*region)
        if not (0 <= region.top < region.top + region.height <= height) or not (
            0 <= region.left < region.left + region.width <= width
        ):
            raise DataError(
                f"{region} does not lie in an image of {height} x {width} pixels; was it replaced?"
            )
        stored_region = _stored(region, turn, height, width)
        stored_target = (target_width, target_height) if turn.swap else (target_height, target_width)
        pixels, reduction = _pixels(encoded, image, stored_region, stored_target)
    return _upright(_resized(pixels, stored_region, reduction, *stored_target), turn)


def resize_region(pixels: NDArray[np.uint8], region: Region, height: int, width: int) -> NDArray[np.uint8]:
    """Resize a region of decoded pixels as `decode_image` does: (H, W, 3) to (height, width, 3)."""
    return _resized(pixels, region, 1, height, width)


def decode_on_device(
    encoded: Sequence[bytes], policy: ImagePolicy, device: torch.device | str, *, max_pixels: int = MAX_PIXELS
) -> list[torch.Tensor]:
    """Decode and resize a batch on a CUDA device: JPEG through nvJPEG, other images on the CPU.

    nvJPEG rounds in its own way: pixels differ from those of `decode_image` by a few levels. Its speed is not yet
    measured (`benchmarks/gpu.py` does). torchvision 0.29 deprecates this decoder in favour of torchcodec's.

    Returns:
        (3, h, w) uint8 on `device` of each image, of the sizes that `decode_image` gives.

    Raises:
        DataError: as of `decode_image`, from headers.
        RuntimeError: damaged data, or a torchvision without nvJPEG.
    """
    import torch
    from torch.nn import functional as F
    from torchvision.io import ImageReadMode, decode_jpeg

    headers = [_header(content, max_pixels) for content in encoded]
    jpegs = [
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for content, (is_jpeg, _) in zip(encoded, headers, strict=True)
        if is_jpeg
    ]
    decoded = iter(decode_jpeg(jpegs, mode=ImageReadMode.RGB, device=device) if jpegs else [])
    images = []
    for content, (is_jpeg, turn) in zip(encoded, headers, strict=True):
        if not is_jpeg:
            pixels = decode_image(content, policy, max_pixels=max_pixels)
            images.append(torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(device))
            continue
        whole = next(decoded)
        whole = whole.transpose(1, 2) if turn.swap else whole
        whole = whole.flip([axis for axis, flips in ((1, turn.flip_rows), (2, turn.flip_columns)) if flips])
        height, width = whole.shape[1:]
        top, left, rows, columns = policy.kept(height, width)
        part = whole[None, :, top : top + rows, left : left + columns].float()
        sized = F.interpolate(part, _target(policy, height, width), mode="bilinear", antialias=True)
        images.append(sized[0].round().clamp(0, 255).to(torch.uint8))
    return images


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as displayed: EXIF orientations 5 to 8 swap the stored sides. Reads the header only."""
    width, height = image.size
    return (width, height) if _turn(image).swap else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to RGB; transparency is laid over white; 16-bit greys keep their range."""
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image, dtype=np.float64) / 257.0
        image = Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def _opened(encoded: bytes, max_pixels: int) -> Image.Image:
    """The image with its header read, or the reason why not."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(encoded))
    except Image.UnidentifiedImageError as error:
        raise DataError("not an image that Pillow can read") from error
    except Exception as error:  # readers of headers raise nearly anything on damaged files
        raise DataError(f"image header cannot be read: {error}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"image of {width} x {height} = {width * height:,} pixels is over the limit of {max_pixels:,}; "
            "make it smaller, or give a larger max_pixels"
        )
    return image


def _header(encoded: bytes, max_pixels: int) -> tuple[bool, _Turn]:
    with _opened(encoded, max_pixels) as image:
        return _is_plain_jpeg(image), _turn(image)


def _is_plain_jpeg(image: Image.Image) -> bool:
    return image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")


def _target(policy: ImagePolicy, height: int, width: int) -> tuple[int, int]:
    rows, columns = policy.target_sizes(np.array([height]), np.array([width]))
    return int(rows[0]), int(columns[0])


def _turn(image: Image.Image) -> _Turn:
    """What puts an unloaded image upright, by the EXIF (or XMP) orientation in its header.

    Pillow turns TIFF files itself. Its PNG reader would decode the image to look for EXIF behind the pixels, hence the
    base class's method: planning and decoding both heed only what stands before them.
    """
    from PIL import Image

    if image.format == "TIFF":
        return _Turn()
    orientation = Image.Image.getexif(image).get(_EXIF_ORIENTATION)
    return _TURNS.get(orientation, _Turn()) if isinstance(orientation, int) else _Turn()


def _stored(region: Region, turn: _Turn, height: int, width: int) -> Region:
    """Where a displayed region lies in the stored pixels of an image of this displayed size."""
    top, left, rows, columns = region
    if turn.flip_rows:
        top = height - top - rows
    if turn.flip_columns:
        left = width - left - columns
    return Region(left, top, columns, rows) if turn.swap else Region(top, left, rows, columns)


def _upright(pixels: NDArray[np.uint8], turn: _Turn) -> NDArray[np.uint8]:
    pixels = pixels.swapaxes(0, 1) if turn.swap else pixels
    return pixels[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]


def _pixels(
    encoded: bytes, image: Image.Image, region: Region, target: tuple[int, int]
) -> tuple[NDArray[np.uint8], int]:
    """All pixels as stored, (H, W, 3), and by how much their sides were reduced."""
    if _is_plain_jpeg(image) and _readable(encoded):
        ratio = min(region.height / target[0], region.width / target[1])
        width, height = image.size
        factors = _REDUCTIONS if width * height >= _REDUCED_FROM_PIXELS else ()
        reduction = next((factor for factor in factors if ratio >= factor * _LEAST_RATIO), 1)
        try:
            pixels = simplejpeg.decode_jpeg(
                encoded, "RGB", min_height=-(-height // reduction), min_width=-(-width // reduction)
            )
        except ValueError as error:  # any of libjpeg's warnings counts: Pillow would fill in grey
            raise DataError(f"JPEG is damaged or cut off: {error}") from error
        return pixels, reduction
    try:
        return np.array(to_rgb(image)), 1
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise DataError(f"{image.format} is damaged or cut off: {error}") from error


def _readable(encoded: bytes) -> bool:
    """Whether libjpeg-turbo knows this kind of JPEG."""
    try:
        simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        return False
    return True


def _resized(
    pixels: NDArray[np.uint8], region: Region, reduction: int, height: int, width: int
) -> NDArray[np.uint8]:
    """Resize a region, given in pixels before the reduction, with antialiasing."""
    top, left, rows, columns = region
    if reduction > 1:  # only Pillow resizes from between pixels
        from PIL import Image

        corners = np.array([left, top, left + columns, top + rows]) / reduction
        small = Image.fromarray(pixels).resize(
            (width, height), Image.Resampling.BILINEAR, box=tuple(corners.tolist())
        )
        return np.array(small)
    part = pixels[top : top + rows, left : left + columns]
    if (rows, columns) == (height, width):
        return np.ascontiguousarray(part)
    import torch
    from torch.nn import functional as F

    part = np.require(part, requirements=["C", "W"])  # torch takes neither flipped nor read-only arrays
    channels = torch.from_numpy(part).permute(2, 0, 1)[None]
    sized = F.interpolate(channels, (height, width), mode="bilinear", antialias=True)
    return sized[0].permute(1, 2, 0).numpy()
