"""Decoded pixels are Pillow's to a stated tolerance; regions, formats and damage are handled as promised."""

from __future__ import annotations

import io
import os
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from mmlab.data.conversations import decode
from mmlab.data.decode import decode_image
from mmlab.errors import DataError
from mmlab.types import Aspect, Region, Square

WHOLE = Aspect(100_000_000, 1)  # keeps every size of these tests


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Like a photograph: shapes of every size down to a few pixels, over smooth shading."""
    draw = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for cell in (128, 32, 8, 4):
        grain = draw.integers(0, 256, (height // cell + 2, width // cell + 2, 3), dtype=np.uint8)
        layer = Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(layer, np.float32) * cell**0.5
    total -= total.min()
    return Image.fromarray((total / total.max() * 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def difference(first, second) -> np.ndarray:
    return np.abs(np.asarray(first).astype(int) - np.asarray(second).astype(int))


# -- tolerance against Pillow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}]
)
def test_jpeg_at_full_size_is_what_pillow_decodes(options) -> None:
    encoded = encode(photo(203, 301), quality=90, **options)
    assert difference(decode_image(encoded, WHOLE), opened(encoded)).max() <= 1


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(20, 600),
    width=st.integers(20, 600),
    side=st.integers(8, 400),
    kind=st.sampled_from(["JPEG", "PNG"]),
)
def test_resizing_is_pillows_to_within_one_level_nearly_everywhere(
    height: int, width: int, side: int, kind: str
) -> None:
    """As long as nothing is reduced, that is below 2 megapixels.

    torch's weights have 15 bits and Pillow's 22: each of the two passes may round a value to the other side of a tie.
    """
    encoded = encode(photo(height, width), kind)
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    square = opened(encoded).crop((left, top, left + short, top + short))
    expected = square.resize((side, side), Image.Resampling.BILINEAR)
    resized = decode_image(encoded, Square(side))
    # torch has left the channels where they were: separating and joining them would take half as long as resizing
    assert resized.flags.c_contiguous
    found = difference(resized, expected)
    assert found.max() <= 2
    # both passes: about one value in ten million, more where the sides' ratio is a simple fraction and ties recur
    assert (found > 1).sum() <= 3 + found.size // 10_000
    assert found.mean() <= 0.1


@pytest.mark.parametrize(("height", "width"), [(1793, 2307), (2449, 1801)])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_reduced_decoding_stays_within_half_a_level_of_pillows(height, width, orientation) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = photo(height, width)
    encoded = encode(image, quality=90, exif=exif)
    turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}
    upright = opened(encoded) if orientation == 1 else opened(encoded).transpose(turns[orientation])
    (width, height), region = upright.size, Region(101, 53, 1651, 1607)
    whole = Aspect(224 * 224)
    for box, policy, chosen in (
        ((0, 0, width, height), whole, None),
        ((53, 101, 53 + 1607, 101 + 1651), Square(200), region),
    ):
        found = decode_image(encoded, policy, chosen)
        expected = upright.resize(found.shape[1::-1], Image.Resampling.BILINEAR, box=box)
        assert difference(found, expected).mean() <= 0.5
        assert difference(found, expected).max() <= 20


def test_what_is_less_than_eight_times_the_target_is_not_reduced() -> None:
    encoded = encode(photo(1599, 1700), quality=90)
    expected = opened(encoded).resize((224, 208), Image.Resampling.BILINEAR)
    found = decode_image(encoded, Aspect(216 * 216))
    assert found.shape == (208, 224, 3)
    assert difference(found, expected).max() <= 1


# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_is_cut_from_the_displayed_image(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(photo(120, 90), kind, exif=exif)
    whole = decode_image(encoded, WHOLE)
    region = Region(7, 31, 40, 50)
    cut = whole[7:47, 31:81]
    found = decode_image(encoded, Square(40), region)
    expected = Image.fromarray(cut).resize((40, 40), Image.Resampling.BILINEAR)
    assert difference(found, expected).max() <= 1


@pytest.mark.parametrize("region", [(0, 0, 21, 5), (0, 16, 5, 15), (-1, 0, 5, 5), (3, 3, 0, 4)])
def test_a_region_outside_the_image_is_refused(region) -> None:
    with pytest.raises(DataError, match=r"is not in an image of 20 x 30 pixels; was it replaced\?"):
        decode_image(encode(photo(20, 30)), Square(8), region)


# -- formats -----------------------------------------------------------------------------------------------------------


def test_grey_jpeg_has_three_equal_channels() -> None:
    encoded = encode(photo(50, 70).convert("L"), quality=95)
    pixels = decode_image(encoded, WHOLE)
    assert difference(pixels, opened(encoded)).max() <= 1
    assert (pixels == pixels[..., :1]).all()


def test_floating_point_pixels_are_refused() -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(file, format="TIFF")
    with pytest.raises(DataError, match="floating-point pixels"):
        decode_image(file.getvalue(), WHOLE)


def test_postscript_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (ghostscript := tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what Pillow found earlier
    for read in (lambda encoded: decode_image(encoded, WHOLE), decode):
        with pytest.raises(DataError, match="PostScript"):
            read(encode(photo(8, 8), "EPS"))
    assert not (tmp_path / "ran").exists()


def test_ycck_is_told_from_cmyk_by_adobes_marker() -> None:
    """There the same numbers are luma and chroma, of a grey that is inverted once more."""
    cmyk = encode(Image.new("CMYK", (16, 16), (155, 127, 127, 0)), quality=100)
    marker = cmyk.index(b"Adobe") + 11
    assert cmyk[marker] == 0
    ycck = cmyk[:marker] + b"\x02" + cmyk[marker + 1 :]
    assert difference(decode_image(cmyk, WHOLE)[8, 8], [100, 128, 128]).max() <= 2
    assert difference(decode_image(ycck, WHOLE)[8, 8], [155, 155, 155]).max() <= 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_counts(kind: str) -> None:
    frames = [Image.new("RGB", (12, 10), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decode_image(encoded, WHOLE).reshape(-1, 3).tolist() == [[255, 0, 0]] * 120


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_is_laid_over_white_before_resizing(kind: str) -> None:
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 20, 40))
    pixels = decode_image(encode(image, kind, **({"lossless": True} if kind == "WEBP" else {})), Square(10))
    assert pixels[5, 1].tolist() == [200, 0, 0]
    assert pixels[5, 8].tolist() == [255, 255, 255]


def test_a_jpeg_that_libjpeg_turbo_cannot_read_goes_through_pillow() -> None:
    """Here, one with stray bytes between its headers."""
    encoded = encode(photo(40, 60), quality=90)
    start = encoded.index(b"\xff\xda")
    stray = encoded[:start] + b"\x01\x02\x03" + encoded[start:]
    assert difference(decode_image(stray, WHOLE), decode_image(encoded, WHOLE)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_counts_wherever_it_stands_in_the_header(orientation: int) -> None:
    """Plain JPEGs are decoded without Pillow: none may be taken for one."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(photo(40, 60), quality=90, exif=exif)
    start = encoded.index(b"\xff\xe1")
    end = start + 2 + int.from_bytes(encoded[start + 2 : start + 4], "big")
    last = encoded.index(b"\xff\xda", end)
    moved = encoded[:start] + encoded[end:last] + encoded[start:end] + encoded[last:]
    comment = b"\xff\xfe\x00\x06\xff\xda\xff\xd9"  # looks like the end of the header
    for other in (moved, encoded[:2] + comment + encoded[2:], moved[:2] + comment + moved[2:]):
        assert np.array_equal(decode_image(other, WHOLE), decode_image(encoded, WHOLE))
    assert decode_image(moved, WHOLE).shape == ((40, 60, 3) if orientation < 5 else (60, 40, 3))


# -- damage ------------------------------------------------------------------------------------------------------------

KINDS = {
    "JPEG": {"quality": 90},
    "progressive JPEG": {"quality": 90, "progressive": True},
    "PNG": {},
    "WEBP": {"quality": 80},
    "GIF": {},
    "TIFF": {"compression": "tiff_lzw"},
    "BMP": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_off_anywhere_is_refused_or_whole(kind: str) -> None:
    encoded = encode(photo(61, 83), kind.split()[-1], **KINDS[kind])
    whole = decode_image(encoded, WHOLE)
    for length in np.linspace(0, len(encoded) - 1, 60).astype(int):
        try:
            pixels = decode_image(encoded[:length], WHOLE)
        except DataError:
            continue
        assert np.array_equal(pixels, whole), f"{kind} cut off after {length} of {len(encoded)} bytes"
    with pytest.raises(DataError, match=r"damaged or cut off|header cannot be read"):
        decode_image(encoded[: len(encoded) // 2], WHOLE)


def test_a_jpeg_whose_middle_is_missing_is_refused_though_pillow_shows_it() -> None:
    encoded = encode(photo(200, 300), quality=90)
    damaged = encoded[: len(encoded) // 2] + b"\xff\xd9"
    assert opened(damaged).size == (300, 200)
    with pytest.raises(
        DataError, match="JPEG is damaged or cut off: Corrupt JPEG data: premature end of data segment"
    ):
        decode_image(damaged, Square(64))


def bomb(kind: str, side: int) -> bytes:
    """A small file that claims side x side pixels."""
    encoded = encode(Image.new("RGB", (8, 8)), kind)
    if kind == "PNG":
        header = b"IHDR" + struct.pack(">II", side, side) + encoded[24:29]
        return encoded[:12] + header + struct.pack(">I", zlib.crc32(header)) + encoded[33:]
    start = encoded.index(b"\xff\xc0") + 5
    return encoded[:start] + struct.pack(">HH", side, side) + encoded[start + 4 :]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_decompression_bombs_are_refused_from_the_header(kind: str) -> None:
    with pytest.raises(DataError, match=r"Image size \(400000000 pixels\) exceeds limit of 178956970 pixels"):
        decode_image(bomb(kind, 20_000), Square(8))


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.serial
@pytest.mark.parametrize("policy", [WHOLE, Aspect(3000 * 3500)], ids=["decode", "decode and resize"])
def test_other_threads_run_while_one_decodes_or_resizes(policy: Aspect) -> None:
    encoded = encode(Image.fromarray(np.tile(np.asarray(photo(500, 500)), (8, 10, 1))), quality=90)
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    other.start()
    try:
        time.sleep(0.02)
        started = time.perf_counter()
        decode_image(encoded, policy)
        ended = time.perf_counter()
    finally:
        stop.set()
        other.join()
    margin = 0.2 * (ended - started)
    during = [moment for moment in ticks if started + margin < moment < ended - margin]
    assert len(during) >= 2  # with the lock held there would be none
