"""Image policies: what size an image has when the model sees it, and how it gets there.

A policy answers from the stored size alone, so that planning knows every padded shape before a pixel is
decoded:

* `square(224)`: resize the short side, crop the centre to 224 x 224 (the articles' way; no image padding, but
  the borders go).
* `aspect(max_area, multiple=16)`: keep the proportions inside an area in pixels, sides rounded to a multiple
  (of the patch), never enlarged.

Decoding to that size is `mmlab.decode`'s affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mmlab.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATCH = 16  # pixels; the grid in which image waste is counted


class Region(NamedTuple):
    """A rectangle of an image, in pixels as displayed."""

    top: int
    left: int
    height: int
    width: int


class ImagePolicy(Protocol):
    """Maps stored sizes to the sizes that the model sees. Pure and picklable."""

    def target_sizes(
        self, height: NDArray[np.int32], width: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Height and width (N,) after the policy, in pixels; zero stays zero (no image)."""
        ...

    def kept(self, height: int, width: int) -> Region:
        """The part of an image of this size that is resized to the target size."""
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

    def kept(self, height: int, width: int) -> Region:
        """The square in the centre."""
        short = min(height, width)
        return Region((height - short) // 2, (width - short) // 2, short, short)


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

    def kept(self, height: int, width: int) -> Region:
        """All of it."""
        return Region(0, 0, height, width)


def processor_policy(processor: Any) -> ImagePolicy:
    """The policy that gives a model images of the sizes that its own `transformers` processor would.

    A height and width, or a centre crop, is `Square`; a shortest edge alone keeps proportions, and is `Aspect` of that
    edge's square, in cells of `size_divisor`, 16 unless given.

    Raises:
        OptionError: images that are not square, or a processor without image size.
    """
    images = getattr(processor, "image_processor", processor)
    crops = getattr(images, "do_center_crop", None)
    size = dict(getattr(images, "crop_size" if crops else "size", None) or {})
    height, width, edge = size.get("height"), size.get("width"), size.get("shortest_edge")
    if edge is not None:
        return Aspect(edge * edge, getattr(images, "size_divisor", None) or PATCH)
    if height is None or height != width:
        raise OptionError(
            f"{type(images).__name__} makes images of {size}, expected a square or a shortest edge; give image_policy"
        )
    return Square(height)


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
