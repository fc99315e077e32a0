"""Augmentation depends on (seed, epoch, record id) alone, keeps sizes, and draws what its options say."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from mmlab.data.augment import Augment, change
from mmlab.data.decode import decode_image
from mmlab.errors import OptionError
from mmlab.types import Square

EVERYTHING = Augment(
    crop_scale=(0.3, 1.0),
    flip_probability=0.5,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    num_operations=2,
)
IDS = [f"record-{number}" for number in range(40)]


def picture(height: int = 48, width: int = 64, seed: int = 0) -> torch.Tensor:
    """(3, H, W) uint8 noise in colours."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=draw)


def drawn(augment: Augment, number: int = 2000) -> list:
    return [augment.draw(seed=3, epoch=1, record_id=str(index)) for index in range(number)]


def test_the_key_decides_and_nothing_else() -> None:
    image = picture()
    before = torch.get_rng_state()
    there = {name: EVERYTHING(image, seed=0, epoch=2, record_id=name) for name in IDS}
    again = pickle.loads(pickle.dumps(EVERYTHING))
    with ThreadPoolExecutor(4) as pool:
        back = dict(
            pool.map(lambda name: (name, again(image, seed=0, epoch=2, record_id=name)), reversed(IDS))
        )
    assert all(torch.equal(there[name], back[name]) for name in IDS)
    assert torch.equal(torch.get_rng_state(), before)
    others = [(1, 2, IDS[0]), (0, 3, IDS[0]), (0, 2, IDS[1])]
    first = EVERYTHING.draw(seed=0, epoch=2, record_id=IDS[0])
    assert all(
        EVERYTHING.draw(seed=seed, epoch=epoch, record_id=name) != first for seed, epoch, name in others
    )
    assert not torch.equal(there[IDS[0]], EVERYTHING(image, seed=0, epoch=3, record_id=IDS[0]))


def test_every_process_and_version_draws_the_same() -> None:
    """Hashes of strings differ between processes, and must not matter: these were drawn by another one."""
    drawn = Augment(num_operations=3, hue=0.2).draw(seed=5, epoch=7, record_id="naïve/1.jpg")
    assert drawn.crops[0] == pytest.approx((0.9268380622676983, 0.9206991186098064), rel=1e-12)
    assert drawn.place == (0.049469246956877155, 0.6660288150622836)
    assert [name for name, _ in drawn.changes] == ["hue", "translate_x", "rotate", "equalize"]
    assert drawn.changes[0][1] == pytest.approx(-0.1128541864906087, rel=1e-12)


def test_an_option_does_not_change_what_the_others_draw() -> None:
    plain = Augment().draw(seed=0, epoch=0, record_id="a")
    more = EVERYTHING.draw(seed=0, epoch=0, record_id="a")
    assert plain.place == more.place
    assert [factor for _, factor in plain.crops] == [factor for _, factor in more.crops]


@given(height=st.integers(1, 60), width=st.integers(1, 60), number=st.integers(0, 10_000))
def test_size_and_type_are_kept(height: int, width: int, number: int) -> None:
    image = EVERYTHING(picture(height, width), seed=0, epoch=0, record_id=str(number))
    assert (image.shape, image.dtype) == ((3, height, width), torch.uint8)
    assert image.is_contiguous()


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    target=st.sampled_from([(224, 224), (96, 160), (160, 96)]),
    number=st.integers(0, 10_000),
)
def test_crops_lie_inside_and_are_not_stretched_beyond_the_ratio(height, width, target, number) -> None:
    choice = Augment(crop_scale=(0.2, 1.0)).draw(seed=0, epoch=0, record_id=str(number))
    top, left, rows, columns = choice.region(height, width, *target)
    assert 0 <= top < top + rows <= height
    assert 0 <= left < left + columns <= width
    if min(rows, columns) > 50:
        stretched = (columns / rows) / (target[1] / target[0])
        assert 3 / 4 * 0.97 < stretched < 4 / 3 * 1.03


def test_crops_are_distributed_as_torchvisions() -> None:
    """Share, proportions and place of the crops of a 480 x 640 image: quantiles, over 2,000 draws."""
    scale, ratio = (0.3, 1.0), (3 / 4, 4 / 3)
    ours = np.array([choice.region(480, 640, 224, 224) for choice in drawn(Augment(crop_scale=scale))])
    blank = torch.zeros(3, 480, 640)
    transform = v2.RandomResizedCrop(224, scale=scale, ratio=ratio)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [transform.make_params([blank]) for _ in range(len(ours))]
    theirs = np.array([[one["top"], one["left"], one["height"], one["width"]] for one in made])
    quantiles = np.linspace(0.05, 0.95, 19)

    def figures(regions: np.ndarray) -> list[np.ndarray]:
        top, left, rows, columns = regions.T.astype(float)
        return [
            rows * columns / 480 / 640,
            np.log(columns / rows),
            top / np.maximum(480 - rows, 1),
            left / np.maximum(640 - columns, 1),
        ]

    for mine, other in zip(figures(ours), figures(theirs), strict=True):
        assert np.abs(np.quantile(mine, quantiles) - np.quantile(other, quantiles)).max() < 0.06


def test_flips_and_factors_are_distributed_as_asked() -> None:
    choices = drawn(Augment(flip_probability=0.3, brightness=0.4, hue=0.1))
    assert np.mean([choice.flip for choice in choices]) == pytest.approx(0.3, abs=0.04)
    for name, low, high in (("brightness", 0.6, 1.4), ("hue", -0.1, 0.1)):
        values = np.array([dict(choice.changes)[name] for choice in choices])
        assert low <= values.min() < low + 0.02
        assert high - 0.02 < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03)
    first = [choice.changes[0][0] for choice in choices]
    assert first.count("hue") / len(first) == pytest.approx(0.5, abs=0.05)


def test_nothing_is_mirrored_unless_asked_for() -> None:
    assert not any(choice.flip for choice in drawn(Augment()))
    assert all(choice.flip for choice in drawn(Augment(flip_probability=1.0)))
    image = picture()
    only = Augment(crop_scale=None, flip_probability=1.0)
    assert torch.equal(only(image, seed=0, epoch=0, record_id="a"), image.flip(-1))


def test_rand_augment_is_torchvisions() -> None:
    """Every operation, at the strength and with the sign that torchvision gives it."""
    image, theirs = picture(), v2.RandAugment()
    names = {
        "identity": "Identity",
        "shear_x": "ShearX",
        "shear_y": "ShearY",
        "translate_x": "TranslateX",
        "translate_y": "TranslateY",
        "rotate": "Rotate",
        "brighter": "Brightness",
        "more_colour": "Color",
        "more_contrast": "Contrast",
        "sharper": "Sharpness",
        "posterize": "Posterize",
        "solarize": "Solarize",
        "autocontrast": "AutoContrast",
        "equalize": "Equalize",
    }
    seen = {}
    for choice in drawn(Augment(crop_scale=None, num_operations=1, magnitude=12), 400):
        ((name, amount),) = choice.changes
        magnitudes, signed = theirs._AUGMENTATION_SPACE[names[name]]
        strengths = magnitudes(31, 48, 64)
        strength = 0.0 if strengths is None else float(strengths[12])
        expected = theirs._apply_image_or_video_transform(
            image, names[name], -strength if amount < 0 else strength, v2.InterpolationMode.NEAREST, {}
        )
        assert signed or amount >= 0
        difference = (change(image, name, amount).int() - expected.int()).abs()
        assert (difference > 1).float().mean() < 0.01, name
        seen[name, amount < 0] = True
    assert len(seen) == 14 + 9  # nine have a sign


def test_decoding_a_crop_is_cropping_what_was_decoded(encoded_photo: bytes) -> None:
    """The region of the stored image is sharper, and shows the same part."""
    augment = Augment(crop_scale=(0.4, 0.9))
    choice = augment.draw(seed=0, epoch=0, record_id="a")
    region = choice.region(480, 480, 96, 96)
    direct = torch.from_numpy(decode_image(encoded_photo, Square(96), region).copy()).permute(2, 0, 1)
    assert torch.equal(augment.apply(direct, choice, cropped=True), direct)
    whole = torch.from_numpy(decode_image(encoded_photo, Square(96)).copy()).permute(2, 0, 1)
    assert (augment.apply(whole, choice).int() - direct.int()).abs().float().mean() < 6


@pytest.fixture
def encoded_photo() -> bytes:
    grain = np.random.default_rng(0).integers(0, 256, (15, 15, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(grain).resize((480, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, r"crop_scale must be \(least, largest\), above 0, up to 1,"),
        ({"crop_scale": (0.5, 1.2)}, "crop_scale must be"),
        (
            {"crop_ratio": (2.0, 1.0)},
            r"crop_ratio must be \(least, largest\), above 0, up to 1000000, found",
        ),
        ({"flip_probability": 1.5}, "flip_probability must be at most 1.0, found 1.5"),
        ({"hue": 0.6}, "hue must be at most 0.5"),
        ({"magnitude": 31}, "magnitude must be at most 30"),
        ({"num_operations": 1.5}, "num_operations must be a whole number, found 1.5"),
        ({"brightness": "a"}, "brightness must be a number, found 'a'"),
        ({"crop_scale": 0.5}, r"crop_scale must be \(least, largest\).* found 0.5"),
        ({"crop_scale": ()}, r"crop_scale must be \(least, largest\).* found \(\)"),
        ({"crop_ratio": None}, r"crop_ratio must be \(least, largest\).* found None"),
        ({"brightness": -0.1}, "brightness must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Augment(**options)
