"""Image sizes: read from headers once, remembered beside the images, read again when a file changes."""

from __future__ import annotations

import io
import json
import os
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmlab.data.readers import read_records, sidecar
from mmlab.data.readers.sidecar import image_sizes
from tests.data.sample_files import encoded, turned


@pytest.fixture
def pair(folder):
    folder.image("a.jpg", 40, 30)
    folder.image("b ü.PNG", 20, 10, "PNG")
    return folder.csv("data.csv", [["image", "text"], ["a.jpg", "x"], ["b ü.PNG", "y"]])


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The images whose headers were read, in order."""
    keys: list[str] = []
    measure = sidecar._size

    def noting(key, open_image):
        keys.append(Path(key).name)
        return measure(key, open_image)

    monkeypatch.setattr(sidecar, "_size", noting)
    return keys


def test_headers_are_read_once(pair, opened):
    first = read_records(pair)
    assert sorted(opened) == ["a.jpg", "b ü.PNG"]
    opened.clear()
    again = read_records(pair)
    assert opened == []
    assert (
        (again.height.tolist(), again.width.tolist())
        == (first.height.tolist(), first.width.tolist())
        == ([30, 10], [40, 20])
    )


def test_a_changed_file_is_read_again_and_no_other(pair, opened):
    read_records(pair)
    opened.clear()
    pair.with_name("a.jpg").write_bytes(encoded(64, 48))
    assert read_records(pair).width.tolist() == [64, 20]
    assert opened == ["a.jpg"]


def test_a_file_of_the_same_size_and_another_time_is_read_again(pair, opened):
    read_records(pair)
    opened.clear()
    image = pair.with_name("a.jpg")
    os.utime(image, ns=(0, image.stat().st_mtime_ns + 1))
    read_records(pair)
    assert opened == ["a.jpg"]


def test_a_data_set_moves_with_its_sidecar(pair, opened):
    read_records(pair)
    opened.clear()
    moved = pair.parent.rename(pair.parent.with_name("moved"))
    assert read_records(moved / pair.name).width.tolist() == [40, 20]
    assert opened == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "sizes": {"a.jpg": [1, 2, 3]}}',
        '{"version": 1, "sizes": {"a.jpg": 5}}',
        '{"version": 1, "sizes": {"a.jpg": [1, 2, 0, 40]}}',
        '{"version": 1, "sizes": {"a.jpg": [1, 2, 30, 1000000000000]}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_sidecar_is_rebuilt_with_a_warning(pair, content):
    sidecar = pair.with_name(".mmlab-sizes.json")
    sidecar.write_text(content)
    with pytest.warns(UserWarning, match="damaged and will be rebuilt"):
        assert read_records(pair).width.tolist() == [40, 20]
    assert read_records(pair).width.tolist() == [40, 20]
    assert len(json.loads(sidecar.read_text())["sizes"]) == 2


def test_a_pipe_in_place_of_the_sidecar_is_not_waited_for(pair):
    os.mkfifo(pair.with_name(".mmlab-sizes.json"))
    with pytest.warns(UserWarning, match="damaged and will be rebuilt .* not a regular file"):
        assert read_records(pair).width.tolist() == [40, 20]


def test_a_sidecar_of_another_version_is_replaced_in_silence(pair):
    sidecar = pair.with_name(".mmlab-sizes.json")
    sidecar.write_text('{"version": 0, "something": "else"}')
    assert read_records(pair).width.tolist() == [40, 20]
    assert json.loads(sidecar.read_text())["version"] == 1


def test_data_files_over_the_same_images_share_a_sidecar(pair, folder):
    read_records(pair)
    folder.image("c.jpg")
    read_records(folder.csv("other.csv", [["image", "text"], ["c.jpg", "z"]]))
    assert len(json.loads(pair.with_name(".mmlab-sizes.json").read_text())["sizes"]) == 3


def test_a_read_only_folder_keeps_its_sizes_in_the_users_cache(pair, opened, monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    pair.parent.chmod(0o555)
    read_records(pair)
    opened.clear()
    read_records(pair)
    pair.parent.chmod(0o755)
    assert opened == []
    assert not pair.with_name(".mmlab-sizes.json").exists()
    assert len(list((cache / "mmlab").glob("sizes-*.json"))) == 1


def test_sizes_that_cannot_be_kept_are_measured_each_time(pair, opened, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pair.parent.chmod(0o555)
    for _ in range(2):
        opened.clear()
        with pytest.warns(UserWarning, match="image sizes cannot be kept in .* for the next time: "):
            assert len(read_records(pair)) == 2
        assert len(opened) == 2
    pair.parent.chmod(0o755)


def test_no_draft_is_left_behind(pair):
    read_records(pair)
    assert {path.name for path in pair.parent.iterdir()} == {
        "a.jpg",
        "b ü.PNG",
        "data.csv",
        ".mmlab-sizes.json",
    }


def test_sizes_are_those_displayed(folder):
    folder.raw("a.jpg", turned(60, 20))
    records = read_records(folder.csv("data.csv", [["image", "text"], ["a.jpg", "x"]]))
    assert (records.height.tolist(), records.width.tolist()) == ([60], [20])


def test_enormous_images_are_refused_by_their_header():
    header = bytearray(encoded(16, 16, "PNG"))
    header[16:24] = (60_000).to_bytes(4) * 2  # claims 3.6 gigapixels
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4)
    with warnings.catch_warnings(action="ignore"):
        sizes = image_sizes({"x": None}, lambda _: io.BytesIO(header), progress=False)
    assert "could be decompression bomb" in str(sizes["x"])


def test_what_has_no_usable_pixels_is_refused_by_its_header():
    floats = io.BytesIO()
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(floats, "TIFF")
    files = {"a.eps": encoded(kind="EPS"), "b.tif": floats.getvalue()}
    found = image_sizes(dict.fromkeys(files), lambda key: io.BytesIO(files[key]), progress=False)
    assert str(found["a.eps"]).startswith("PostScript")
    assert str(found["b.tif"]).startswith("floating-point")


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", encoded()[:20], b"<svg/>", b"image,text\n"])
def test_what_is_no_image_is_said_to_be_none(content):
    assert image_sizes({"a.jpg": None}, lambda _: io.BytesIO(content), progress=False) == {
        "a.jpg": "not an image that Pillow can read"
    }
