"""Complexity: more to see means more bits, each image is decoded once, a changed one again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from mmlab.data import complexity
from mmlab.data.complexity import gradient_entropy, image_complexity
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.errors import DataError


def picture(path: Path, num_boxes: int, *, side: int = 256, **options: object) -> Path:
    """A picture of so many boxes of random grey."""
    rng = np.random.default_rng(num_boxes)
    pixels = np.full((side, side, 3), 128, np.uint8)
    for top, left, grey in rng.integers(0, side, (num_boxes, 3)):
        pixels[top : top + 40, left : left + 40] = grey % 256
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Records:
    paths = [picture(tmp_path / f"{number}.png", number) for number in (0, 5, 40)]
    return read_records([*paths, paths[2]], ["flat", "few", "many", "many again"], progress=False)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The images that were decoded, in order."""
    names: list[str] = []
    measure = complexity._measure

    def noting(records: Records, path: str) -> object:
        names.append(Path(path).name)
        return measure(records, path)

    monkeypatch.setattr(complexity, "_measure", noting)
    return names


def test_more_to_see_is_more_bits(pictures: Records) -> None:
    flat, few, many, again = image_complexity(pictures)
    assert flat == 0 < few < many == again


def test_each_image_is_decoded_once_and_a_changed_one_again(pictures: Records, decoded: list[str]) -> None:
    first = image_complexity(pictures)
    assert sorted(decoded) == ["0.png", "40.png", "5.png"]
    decoded.clear()
    assert np.array_equal(image_complexity(pictures), first)
    assert decoded == []
    picture(Path(str(pictures.image_paths[0])), 20)
    assert image_complexity(pictures)[0] > 0
    assert decoded == ["0.png"]


def test_it_hardly_depends_on_resolution_and_format(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.jpg"]
    picture(paths[0], 40)
    with Image.open(paths[0]) as image:
        image.resize((1024, 1024)).save(paths[1])
        image.save(paths[2], quality=90)
    bits = image_complexity(read_records(paths, ["x"] * 3, progress=False))
    assert bits == pytest.approx(bits.mean(), rel=0.1)


def test_a_record_without_image_has_none(pictures: Records, tmp_path: Path) -> None:
    records = read_records(
        [pictures.image_paths[1], None], ["x", "y"], allow_missing_modality=True, progress=False
    )
    assert np.isnan(image_complexity(records)).tolist() == [False, True]


def test_an_image_that_is_cut_off_is_named(pictures: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(pictures.image_paths[2]))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"40\.png: cannot be decoded"):
        image_complexity(pictures)
    monkeypatch.setattr(complexity, "to_rgb", Mock(side_effect=RuntimeError("damaged")))  # as AVIF's decoder
    with pytest.raises(DataError, match="cannot be decoded: damaged"):
        image_complexity(pictures)


def test_entropy_of_known_distributions() -> None:
    ramp = np.repeat(np.arange(0, 200, 20, dtype=np.uint8)[:, None], 10, axis=1)
    assert gradient_entropy(ramp) == 0  # one gradient everywhere
    bent = np.concatenate([ramp, np.full((10, 10), ramp[-1, 0] + 20, np.uint8)])
    assert 0 < gradient_entropy(bent) <= 0.5 * np.log2(3)
