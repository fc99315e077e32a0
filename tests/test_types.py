"""Image policies plan what decoding gives; decoding handles every mode and orientation."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmlab.data.decode import decode_image, displayed_size
from mmlab.errors import DataError, OptionError
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.options import TrainOptions
from mmlab.types import PATCH, Aspect, SampleSizes, Square, aspect, parse_image_policy, square

LARGE = Aspect(10_000_000, 1)  # keeps every size of these tests


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def planned(policy, height: int, width: int) -> tuple[int, int]:
    rows, cols = policy.target_sizes(np.array([height], np.int32), np.array([width], np.int32))
    return int(rows[0]), int(cols[0])


def quadrants(height: int = 64, width: int = 96) -> np.ndarray:
    """(H, W, 3): red, green above; blue, black below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2, 0] = 255
    pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, : width // 2, 2] = 255
    return pixels


# -- policies ------------------------------------------------------------------------------------------------------


@given(
    height=st.integers(1, 20_000),
    width=st.integers(1, 20_000),
    side=st.integers(4, 800),
    multiple=st.sampled_from([1, 7, 16, 32]),
)
def test_aspect_keeps_to_its_area_multiple_and_proportions(height, width, side, multiple):
    policy = Aspect(max(side, multiple) ** 2, multiple)
    rows, cols = planned(policy, height, width)
    assert rows % multiple == cols % multiple == 0
    assert min(rows, cols) >= multiple
    assert rows * cols <= policy.max_area
    assert rows <= max(multiple, height + multiple / 2)  # not enlarged beyond rounding
    assert cols <= max(multiple, width + multiple / 2)
    has_room = policy.max_area >= (8 * multiple) ** 2 and min(height, width) >= 8 * multiple
    if has_room and max(height, width) <= 4 * min(height, width):
        assert abs(np.log(rows / cols * width / height)) < 0.35


def test_policies_leave_missing_images_missing():
    for policy in (square(224), aspect(128**2)):
        assert planned(policy, 0, 0) == (0, 0)


def test_policies_are_read_from_their_short_form_and_write_it():
    for text in ("square:224", "aspect:128:16", "aspect:160:32"):
        assert str(parse_image_policy(text)) == text
    assert parse_image_policy(" aspect:128 ") == Aspect(128**2, PATCH)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "square",
        "square:",
        "square:-3",
        "square:10:2",
        "crop:224",
        "aspect:1.5",
        "aspect:8:8:8",
        "square:99999",
        224,
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises(OptionError, match=r"is not square:SIDE or aspect:SIDE\[:MULTIPLE\]"):
        parse_image_policy(text)


def test_impossible_sizes_are_refused():
    with pytest.raises(OptionError, match="square image side must be at least 1, found 0"):
        parse_image_policy("square:0")
    with pytest.raises(OptionError, match="cannot hold one cell of 16 x 16 pixels; give at least 256"):
        parse_image_policy("aspect:15")
    with pytest.raises(OptionError, match="multiple must be at least 1"):
        parse_image_policy("aspect:15:0")


# -- planned size == decoded size ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    orientation=st.integers(1, 8),
    kind=st.sampled_from(["JPEG", "PNG", "WEBP"]),
    policy=st.sampled_from([Square(32), Square(224), Aspect(32**2), Aspect(224**2), Aspect(100**2, 7)]),
)
def test_decoding_gives_the_planned_size(height, width, orientation, kind, policy):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.new("RGB", (width, height)), kind, exif=exif)
    with Image.open(io.BytesIO(encoded)) as image:
        shown = displayed_size(image)
    assert shown == ((width, height) if orientation >= 5 else (height, width))
    assert decode_image(encoded, policy).shape == (*planned(policy, *shown), 3)


def test_square_takes_the_centre():
    pixels = np.zeros((40, 100, 3), np.uint8)
    pixels[:, 30:70] = 200
    assert decode_image(encode(Image.fromarray(pixels)), Square(40)).min() == 200


# -- orientation -----------------------------------------------------------------------------------------------------

# the corner colours that a viewer shows, clockwise from the upper left, for each orientation of `quadrants()`
SHOWN = {
    1: "rgkb", 2: "grbk", 3: "kbrg", 4: "bkgr", 5: "rbkg", 6: "brgk", 7: "kgrb", 8: "gkbr"
}  # fmt: skip


def corners(pixels: np.ndarray) -> str:
    height, width = pixels.shape[:2]
    near, low, far = 4, height - 5, width - 5
    return "".join(
        "rgb"[int(pixel.argmax())] if pixel.max() > 128 else "k"
        for pixel in (pixels[near, near], pixels[near, far], pixels[low, far], pixels[low, near])
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_displayed_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"tiffinfo": {274: orientation}} if kind == "TIFF" else {"exif": exif}
    encoded = encode(Image.fromarray(quadrants()), kind, **options)
    with Image.open(io.BytesIO(encoded)) as image:
        assert displayed_size(image) == ((96, 64) if orientation >= 5 else (64, 96))
    assert corners(decode_image(encoded, LARGE)) == SHOWN[orientation]


@pytest.mark.parametrize(("value", "kind"), [(0, 3), (9, 3), (4608, 3), (6, 2), (6, 7), (6, 11)])
def test_a_senseless_orientation_is_none(value, kind):
    """A number out of range; text, bytes or a fraction where a number belongs."""
    exif = Image.Exif()
    exif[0x0112] = value
    whole = exif.tobytes()
    damaged = whole.replace(struct.pack(">HHI", 0x0112, 3, 1), struct.pack(">HHI", 0x0112, kind, 1))
    assert (damaged != whole) == (kind != 3)
    encoded = encode(Image.fromarray(quadrants()), "JPEG", exif=damaged)
    with Image.open(io.BytesIO(encoded)) as image:
        assert displayed_size(image) == (64, 96)
    assert decode_image(encoded, LARGE).shape == (64, 96, 3)


def test_the_size_of_a_png_is_read_without_decoding_it():
    content = encode(Image.new("RGB", (30, 20)))
    cut = content[: content.index(b"IDAT") + 4]
    with Image.open(io.BytesIO(cut)) as image:
        assert displayed_size(image) == (20, 30)


# -- modes -------------------------------------------------------------------------------------------------------------


def flat(mode: str, colour, **info) -> Image.Image:
    image = Image.new(mode, (8, 8), colour)
    image.info.update(info)
    return image


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (encode(flat("RGB", (10, 20, 30))), (10, 20, 30)),
        (encode(flat("L", 77)), (77, 77, 77)),
        (encode(flat("1", 1)), (255, 255, 255)),
        (encode(flat("RGBA", (200, 0, 0, 0))), (255, 255, 255)),
        (encode(flat("RGBA", (200, 0, 0, 255))), (200, 0, 0)),
        (encode(flat("RGBA", (0, 0, 0, 128))), (127, 127, 127)),
        (encode(flat("LA", (0, 0))), (255, 255, 255)),
        (encode(flat("RGB", (10, 20, 30)), transparency=(10, 20, 30)), (255, 255, 255)),
        (encode(flat("RGB", (10, 20, 30)), "JPEG", quality=100), (10, 20, 30)),
        (encode(flat("CMYK", (0, 255, 255, 0)), "JPEG", quality=100), (254, 0, 0)),
        (encode(flat("CMYK", (0, 0, 0, 255)), "TIFF"), (0, 0, 0)),
        (encode(flat("RGB", (10, 20, 30)), "GIF"), (10, 20, 30)),
        (encode(flat("RGB", (10, 20, 30)), "BMP"), (10, 20, 30)),
        (encode(flat("I;16", 0)), (0, 0, 0)),
        (encode(flat("I;16", 65535)), (255, 255, 255)),
        (encode(flat("I;16", 257 * 100)), (100, 100, 100)),
        (encode(flat("I;16", 257 * 100), "TIFF"), (100, 100, 100)),
    ],
)
def test_every_mode_becomes_rgb(encoded, expected):
    pixels = decode_image(encoded, LARGE)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (8, 8, 3))
    assert np.abs(pixels.astype(int) - expected).max() <= 2


def test_a_palette_with_a_transparent_entry_is_laid_over_white():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 4, 8))
    pixels = decode_image(encode(image, transparency=0), LARGE)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 7].tolist() == [0, 0, 255]
    partly = decode_image(encode(image, transparency=bytes([255, 0])), LARGE)
    assert partly[0, 0].tolist() == [255, 0, 0]
    assert partly[0, 7].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an image",
        encode(Image.new("RGB", (64, 64)))[:60],
        encode(Image.new("RGB", (64, 64)), "JPEG")[:400],
    ],
)
def test_what_is_no_whole_image_raises(content):
    with pytest.raises(DataError, match=r"not an image|cut off|header cannot be read"):
        decode_image(content, Square(16))


def test_no_rows_of_sizes_can_be_taken():
    assert len(SampleSizes(num_tokens=[3], height=[16], width=[16], group=[0]).take([])) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TrainOptions(accumulation_steps=None),
            "accumulation_steps must be a whole number, found None",
        ),
        (lambda: TrainOptions(lr="auto"), "lr must be a number, found 'auto'"),
        (
            lambda: make_scheduler("random", batch_size="auto"),
            "batch_size must be a whole number, found 'auto'",
        ),
        (lambda: make_scheduler("budget", max_batch_size=None), "max_batch_size must be a whole number"),
    ],
)
def test_none_and_auto_stand_for_a_default_only_where_there_is_one(make, message) -> None:
    assert TrainOptions(total_steps=None).total_steps is None
    with pytest.raises(OptionError, match=message):
        make()
