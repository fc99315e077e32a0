"""Image policies: what size an image has when the model sees it, and how it gets there.

A policy answers from the stored size alone, so that planning knows every padded shape before a pixel is
decoded:

* `square(224)`: resize the short side, crop the centre to 224 x 224 (the articles' way; no image padding, but
  the borders go).
* `aspect(max_area, multiple=16)`: keep the proportions inside an area in pixels, sides rounded to a multiple
  (of the patch), never enlarged.

Decoding is here too (`decode`): any format that Pillow reads, EXIF orientation applied, converted to RGB.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mmlab.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

_EXIF_ORIENTATION = 0x0112
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation -> PIL.Image.Transpose
_QUARTER_TURNS = (2, 4, 5, 6)  # of PIL.Image.Transpose: these swap the sides
PATCH = 16  # pixels; the grid in which image waste is counted


class ImagePolicy(Protocol):
    """Maps stored sizes to the sizes that the model sees. Pure and picklable."""

    def target_sizes(
        self, height: NDArray[np.int32], width: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Height and width (N,) after the policy, in pixels; zero stays zero (no image)."""
        ...

    def apply(self, pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        """(H, W, 3) to the target size that `target_sizes` gave, (height, width, 3)."""
        ...


@dataclass(frozen=True, slots=True)
class Square:
    """Resize the short side to `side` and crop the centre.

    Raises:
        OptionError: `side` below 1.
    """

    side: int = 224

    def __post_init__(self) -> None:
        if self.side < 1:
            raise OptionError(f"square image side must be at least 1 pixel, found {self.side}")

    def __str__(self) -> str:
        return f"square:{self.side}"

    def target_sizes(
        self, height: NDArray[np.int32], width: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`side` x `side` wherever there is an image."""
        side = np.where(np.asarray(height) > 0, np.int32(self.side), np.int32(0))
        return side, side.copy()

    def apply(self, pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        """Centre crop to a square, then one antialiased resize."""
        short = min(pixels.shape[:2])
        top, left = (pixels.shape[0] - short) // 2, (pixels.shape[1] - short) // 2
        return _resize(pixels[top : top + short, left : left + short], height, width)


@dataclass(frozen=True, slots=True)
class Aspect:
    """Keep the proportions within `max_area` pixels; sides are multiples of `multiple`; small images are not
    enlarged.

    Raises:
        OptionError: an area that cannot hold one `multiple` x `multiple` cell.
    """

    max_area: int = 224 * 224
    multiple: int = PATCH

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise OptionError(f"multiple must be at least 1 pixel, found {self.multiple}")
        if self.max_area < self.multiple**2:
            raise OptionError(
                f"max_area {self.max_area} cannot hold one cell of {self.multiple} x {self.multiple} pixels; "
                f"give at least {self.multiple**2}"
            )

    def __str__(self) -> str:
        return f"aspect:{round(self.max_area**0.5)}:{self.multiple}"

    def target_sizes(
        self, height: NDArray[np.int32], width: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Scaled to the area, each side rounded to a multiple (at least one), the long side cut to fit the area."""
        stored_h, stored_w = np.asarray(height, dtype=np.float64), np.asarray(width, dtype=np.float64)
        scale = np.minimum(1.0, np.sqrt(self.max_area / np.maximum(stored_h * stored_w, 1.0)))
        cells = self.max_area // self.multiple**2
        rows = np.maximum(1, np.rint(stored_h * scale / self.multiple)).astype(np.int32)
        cols = np.maximum(1, np.rint(stored_w * scale / self.multiple)).astype(np.int32)
        tall = rows > cols
        rows = np.where(tall, np.minimum(rows, np.maximum(1, cells // cols)), rows)
        cols = np.where(~tall, np.minimum(cols, np.maximum(1, cells // rows)), cols)
        there = stored_h > 0
        unit = np.int32(self.multiple)
        return np.where(there, rows * unit, 0).astype(np.int32), np.where(there, cols * unit, 0).astype(
            np.int32
        )

    def apply(self, pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
        """One antialiased resize to the target size."""
        return _resize(pixels, height, width)


square, aspect = Square, Aspect  # the names by which users and the command line call them


def parse_image_policy(text: str) -> ImagePolicy:
    """Read a policy from its short form: `square:SIDE` or `aspect:SIDE[:MULTIPLE]`, with max_area = SIDE x
    SIDE.

    >>> parse_image_policy("aspect:128")
    Aspect(max_area=16384, multiple=16)

    Raises:
        OptionError: another form, or an impossible size.
    """
    match = re.fullmatch(r"(square|aspect):(\d+)(?::(\d+))?", text.strip())
    if match is None or (match[1] == "square" and match[3]):
        raise OptionError(
            f"image policy {text!r} is not square:SIDE or aspect:SIDE[:MULTIPLE], for example aspect:224"
        )
    if match[1] == "square":
        return Square(int(match[2]))
    return Aspect(int(match[2]) ** 2, int(match[3] or PATCH))


def decode(encoded: bytes, policy: ImagePolicy) -> NDArray[np.uint8]:
    """Decode an image, put it upright, convert it to RGB, and bring it to the policy's size.

    Large JPEGs are decoded at a reduced DCT scale where that still leaves at least twice the target's size
    per side (Pillow's `draft`), then resized with antialiasing.

    Returns:
        (h, w, 3) uint8

    Raises:
        OSError, ValueError: the bytes are not an image that Pillow can read.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        height, width = displayed_size(image)
        target_h, target_w = (
            int(side[0]) for side in policy.target_sizes(np.array([height]), np.array([width]))
        )
        turn = _turn(image)
        lies = turn in _QUARTER_TURNS
        image.draft("RGB", (2 * target_h, 2 * target_w) if lies else (2 * target_w, 2 * target_h))
        pixels = np.asarray(to_rgb(image if turn is None else image.transpose(turn)))
    return policy.apply(pixels, target_h, target_w)


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as displayed: EXIF orientations 5 to 8 swap the stored sides. Reads the header only."""
    width, height = image.size
    return (width, height) if _turn(image) in _QUARTER_TURNS else (height, width)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What puts an unloaded image upright, by the EXIF (or XMP) orientation in its header; None where it is upright.

    Pillow turns TIFF files itself. Its PNG reader would decode the image to look for EXIF behind the pixels, hence the
    base class's method: planning and decoding both heed only what stands before them.
    """
    from PIL import Image

    if image.format == "TIFF":
        return None
    orientation = Image.Image.getexif(image).get(_EXIF_ORIENTATION)
    return Image.Transpose(_TURNS[orientation]) if orientation in _TURNS else None


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


def _resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return np.ascontiguousarray(pixels)
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(resized)
