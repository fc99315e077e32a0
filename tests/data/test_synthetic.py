"""The made data set: deterministic, whole or absent, true to its captions, and shaped like real data."""

import hashlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from mmlab.cli.main import main
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.data.synthetic.captions import write_captions
from mmlab.data.synthetic.painting import paint
from mmlab.data.synthetic.scenes import TABLES, Scene, draw_size, make_scene
from mmlab.data.text import estimate_num_tokens
from mmlab.errors import OptionError

DATA = Path(__file__).parents[2] / "data"


def digests(folder: Path) -> dict[str, str]:
    """A checksum of every file in a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_bytes_follow_from_the_seed(tmp_path: Path) -> None:
    for name in "ab":
        make_dataset(tmp_path / name, num_images=20, max_side=64, progress=False)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 21


def test_a_small_data_set_is_the_beginning_of_a_large_one(tmp_path: Path) -> None:
    made = {}
    for num_images in (10, 20):
        path = make_dataset(tmp_path / str(num_images), num_images=num_images, max_side=64, progress=False)
        made[num_images] = read_records(path, progress=False)
    small, large = digests(tmp_path / "10"), digests(tmp_path / "20")
    assert all(large[name] == small[name] for name in small if name.endswith(".jpg"))
    assert made[20].texts[:50] == made[10].texts
    assert made[20].splits[:50] == made[10].splits


def test_seeds_give_different_data() -> None:
    assert write_captions(make_scene(0, 0)) != write_captions(make_scene(1, 0))
    assert write_captions(make_scene(0, 0)) == write_captions(make_scene(0, 0))


def test_the_reader_finds_splits_sizes_and_groups(tmp_path: Path) -> None:
    make_dataset(
        tmp_path / "set", num_images=40, max_side=64, captions_per_image=3, val_fraction=0.25, progress=False
    )
    records = read_records(tmp_path / "set", progress=False)
    assert len(records) == 120
    assert Counter(records.splits) == {"train": 90, "val": 30}
    assert set(Counter(records.group.tolist()).values()) == {3}
    for record in records[::10]:
        with Image.open(record.image_path) as image:
            assert image.size == (record.width, record.height)


@pytest.mark.parametrize("kind", ["file", "folder with a file"])
def test_an_occupied_target_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "set"
    kept = out if kind == "file" else out / "kept.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(OptionError, match="exists and is not an empty folder"):
        make_dataset(out, num_images=2, max_side=32, progress=False)
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "set").symlink_to(tmp_path / "gone")
    with pytest.raises(OptionError, match="set exists and is not an empty folder"):
        make_dataset(tmp_path / "set", num_images=2, max_side=32, progress=False)


def test_an_empty_folder_is_a_fine_target(tmp_path: Path) -> None:
    assert make_dataset(tmp_path, num_images=2, max_side=32, progress=False).parent == tmp_path
    assert len(list((tmp_path / "images").iterdir())) == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_images", 0),
        ("captions_per_image", 0),
        ("max_side", 8),
        ("val_fraction", float("nan")),
    ],
)
def test_a_number_out_of_range_is_named(tmp_path: Path, option: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{option} must be at least .*found {value:g}"):
        make_dataset(tmp_path / "set", progress=False, **{option: value})
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from mmlab.data.synthetic import make_dataset; "
        "make_dataset(sys.argv[1], num_images=10**4)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "set")], stderr=subprocess.PIPE)
    try:
        give_up_s = time.monotonic() + 60
        while not list(tmp_path.rglob("*.jpg")) and time.monotonic() < give_up_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())


def test_image_sizes_follow_coco() -> None:
    rng = Random(0)
    sizes = [draw_size(rng) for _ in range(5000)]
    share = {size: count / len(sizes) for size, count in Counter(sizes).items()}
    assert share[640, 480] == pytest.approx(0.212, abs=0.02)
    assert share[480, 640] == pytest.approx(0.067, abs=0.015)
    assert sum(width >= height for width, height in sizes) / len(sizes) == pytest.approx(0.754, abs=0.02)
    assert np.mean([max(size) == 640 for size in sizes]) == pytest.approx(0.819, abs=0.03)
    assert np.mean(sizes, axis=0) == pytest.approx([574, 484], abs=8)
    assert max(max(size) for size in sizes) == 640


def test_caption_lengths_follow_coco() -> None:
    lengths = [
        estimate_num_tokens(text) for index in range(1000) for text in write_captions(make_scene(1, index))
    ]
    assert np.mean(lengths) == pytest.approx(13.4, abs=0.4)
    assert np.std(lengths) == pytest.approx(2.6, abs=0.4)
    assert min(lengths) >= 8
    assert 30 <= max(lengths) <= 60


def test_captions_are_true_of_their_own_picture_and_of_hardly_any_other() -> None:
    scenes = [make_scene(2, index) for index in range(120)]
    num_only = 0
    for scene in scenes:
        for text in write_captions(scene):
            matching = [other for other in scenes if is_true(text, other)]
            assert scene in matching, f"{text!r} is not true of {scene}"
            num_only += len(matching) == 1
    assert num_only / (5 * len(scenes)) > 0.95


def is_true(text: str, scene: Scene) -> bool:
    """Whether a sentence names only groups that the scene has, and its own ground, backdrop and light."""
    sizes = {word: size for size, entry in TABLES["sizes"].items() for word in entry["words"] if word}
    patterns = {word: name for name, entry in TABLES["patterns"].items() for word in entry["words"] if word}
    shapes = {word: shape for shape, words in TABLES["shapes"].items() for word in words}
    counts = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4}
    named = re.findall(
        rf"\b(an?|two|three|four) (?:({'|'.join(sizes)}) )?(?:({'|'.join(patterns)}) )?"
        rf"({'|'.join(TABLES['colours'])}) (ball|cube|box|block|cone|cylinder|ring|star|heart|cross)(?:e?s)?\b",
        text.lower(),
    )
    assert named, f"{text!r} names no object"
    for count, size, pattern, colour, shape in named:
        if not any(
            (group.count, group.colour, group.shape) == (counts[count], colour, shapes.get(shape, shape))
            and sizes.get(size, group.size) == group.size
            and patterns.get(pattern, group.pattern) == group.pattern
            for group in scene.groups
        ):
            return False
    for kind, value in (("grounds", scene.ground), ("backdrops", scene.backdrop), ("lights", scene.light)):
        entries = TABLES[kind].items()
        said = {name for name, entry in entries if any(f" {words}" in text for words in entry["words"])}
        if said and value not in said:
            return False
    return True


def test_rows_stand_from_left_to_right_and_depths_from_front_to_back() -> None:
    for scene in (make_scene(3, index) for index in range(200)):
        middles = [np.mean([place.x for place in places]) for places in scene.places]
        feet = [max(place.foot for place in places) for places in scene.places]
        if scene.arrangement == "row":
            assert middles == sorted(middles)
        else:
            assert feet[0] == max(feet)
            top = min(place.foot - place.diameter for place in scene.places[0])
            for place in (place for places in scene.places[1:] for place in places):
                assert place.foot - 0.6 * place.diameter < top, "hidden behind the front group"
        for place in (place for places in scene.places for place in places):
            assert -0.05 * scene.width < place.x - place.diameter / 2
            assert place.x + place.diameter / 2 < 1.05 * scene.width
            assert scene.horizon * scene.height < place.foot < scene.height


def test_pictures_take_as_many_bytes_as_photographs(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "set", num_images=12, progress=False)
    records = read_records(path, progress=False)
    num_bytes = sum(file.stat().st_size for file in path.parent.glob("images/*.jpg"))
    num_pixels = int(np.sum(records.height.astype(int) * records.width)) / 5
    assert 0.26 < num_bytes / num_pixels < 0.38  # photographs of COCO at JPEG quality 90: 0.32


@pytest.mark.parametrize("max_side", [32, 1100])
def test_any_size_can_be_painted(max_side: int) -> None:
    for index in range(200 if max_side < 100 else 3):
        scene = make_scene(4, index, max_side)
        assert paint(scene).shape == (scene.height, scene.width, 3)


def test_the_bundled_sample_is_what_its_command_makes(tmp_path: Path) -> None:
    readme = (DATA / "README.md").read_text()
    command = re.search(r"^mmlab (data make) data/sample (.*)$", readme, re.MULTILINE)
    assert command is not None
    made, kept = tmp_path / "sample", DATA / "sample"
    assert main([*command[1].split(), str(made), *shlex.split(command[2])]) == 0
    assert (made / "captions.json").read_text() == (kept / "captions.json").read_text()
    names = sorted(file.name for file in kept.glob("images/*.jpg"))
    assert names == sorted(file.name for file in made.glob("images/*.jpg"))
    for name in names:
        with Image.open(made / "images" / name) as new, Image.open(kept / "images" / name) as old:
            assert new.size == old.size
            difference = np.abs(np.asarray(new, dtype=int) - np.asarray(old, dtype=int))
        assert difference.mean() < 1, name  # of 255; JPEG encoders of other versions round otherwise


def test_the_bundled_data_stay_small() -> None:
    files = [DATA / "README.md", DATA / "sample/captions.json", *DATA.glob("sample/images/*.jpg")]
    assert sum(file.stat().st_size for file in files) <= 3_000_000
