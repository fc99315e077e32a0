"""Flipped bytes, cut files, killed builders and full disks cost a rebuild of that part: no wrong pixel, no hang."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmlab.loading.cache
from mmlab.cli.cache import cache_info, verify_cache
from mmlab.cli.main import main
from mmlab.errors import DataError
from mmlab.loading.cache.key import CacheKey
from mmlab.loading.cache.store import SampleCache
from tests.loading import cached_arrays
from tests.loading.cached_arrays import is_right, make_key, take

NUM_ROWS = 40
ROOM = Path(mmlab.loading.cache.__file__).parent
BUILDER = Path(cached_arrays.__file__)
IN_A_NEW_NAMESPACE = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CacheKey]:
    """A complete cache."""
    root = tmp_path_factory.mktemp("sound")
    key = make_key(root / "files", NUM_ROWS)
    cache = SampleCache(root / "cache", key=key)
    for row in range(NUM_ROWS):
        take(cache, row)
    return root / "cache", key


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_found_and_mended(
    data: st.DataObject, sound: tuple[Path, CacheKey], tmp_path_factory: pytest.TempPathFactory
) -> None:
    original, key = sound
    folder = tmp_path_factory.mktemp("damaged") / "cache"
    shutil.copytree(original, folder)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    front_and_table = st.integers(0, 8192)  # much is there in little space
    place = data.draw(st.one_of(front_and_table, st.integers(0, len(content) - 1)), "place")
    match data.draw(st.sampled_from(["flip", "zero", "cut", "append"]), "kind"):
        case "flip":
            content[place] ^= data.draw(st.integers(1, 255), "bits")
        case "zero":
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        case "cut":
            del content[place:]
        case "append":
            content += data.draw(st.binary(min_size=1, max_size=200), "more")
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verify_cache(folder)  # may find anything, and fails at nothing
        cache = SampleCache(folder, key=key)
        for row in range(NUM_ROWS):
            take(cache, row)  # a hit that is wrong raises
        assert all(is_right(row, cache.get(row)) for row in range(NUM_ROWS))
        reopened = SampleCache(folder, key=key)
        assert all(take(reopened, row) for row in range(NUM_ROWS))
    assert verify_cache(folder).ok


def test_damage_is_told_once_and_verify_lists_it(
    sound: tuple[Path, CacheKey], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound[0], folder)
    assert main(["cache", "verify", str(folder)]) == 0
    cache = SampleCache(folder, key=sound[1])
    start = int(cache._layout.starts[0])  # type: ignore[union-attr]
    content = bytearray(cache.path.read_bytes())
    content[start:] = bytes(byte ^ 1 for byte in content[start:])
    cache.path.write_bytes(content)
    with pytest.warns(
        UserWarning, match=r"damaged cache: .*\.slots: the checksum .*mmlab cache verify"
    ) as caught:
        assert [cache.get(row) for row in range(10)] == [None] * 10
    assert len(caught) == 1
    assert cache.stats().num_damaged == 10
    capsys.readouterr()
    assert main(["cache", "verify", str(folder), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damage"]) == NUM_ROWS


def test_a_damaged_front_is_named_and_mended_by_opening_the_cache(
    sound: tuple[Path, CacheKey], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound[0], folder)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert "its front is damaged" in str(verify_cache(folder))
    with pytest.raises(DataError, match="its front is damaged"):
        cache_info(folder)
    cache = SampleCache(folder, key=sound[1])
    assert all(is_right(row, cache.get(row)) for row in range(NUM_ROWS))
    assert verify_cache(folder).ok


def test_a_file_cut_short_while_it_is_open_is_a_miss(sound: tuple[Path, CacheKey], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound[0], folder)
    cache = SampleCache(folder, key=sound[1])
    assert all(is_right(row, cache.get(row)) for row in range(NUM_ROWS))
    with cache.path.open("r+b") as file:
        file.truncate(int(cache._layout.starts[0]) + 100)  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="the checksum of slot 0 does not fit"):
        assert cache.get(0) is None
    for row in reversed(range(NUM_ROWS)):  # the first one makes the file long again; `take` checks the pixels
        take(cache, row)


def test_a_byte_that_flips_under_a_reader_is_found_by_a_later_read_and_by_verify(
    sound: tuple[Path, CacheKey], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound[0], folder)
    cache = SampleCache(folder, key=sound[1])
    assert is_right(0, cache.get(0))
    start = int(cache._layout.starts[0])  # type: ignore[union-attr]
    with cache.path.open("r+b") as file:
        file.seek(start)
        (first,) = file.read(1)
        file.seek(start)
        file.write(bytes([first ^ 1]))
    assert not verify_cache(folder).ok
    with pytest.warns(UserWarning, match="the checksum of slot 0 does not fit"):
        assert SampleCache(folder, key=sound[1]).get(0) is None  # it has not verified the image before
    with pytest.warns(UserWarning, match="the checksum of slot 0 does not fit"):
        found = [cache.get(0) is None for _ in range(64)]
    assert found.index(True) == 63


def start_builder(files: Path, folder: Path, num_rows: int, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(BUILDER), str(files), str(folder), str(num_rows), str(pause_s)]
    builder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "ready\n"
    return builder


def test_builders_killed_at_any_moment_leave_nothing_wrong(tmp_path: Path) -> None:
    num_rows = 2000
    key = make_key(tmp_path / "files", num_rows)
    random = np.random.default_rng(0)
    found = 0
    for _ in range(6):
        with start_builder(tmp_path / "files", tmp_path / "cache", num_rows, 2e-4) as builder:
            time.sleep(random.uniform(0, 0.05))
            builder.kill()
        cache = SampleCache(tmp_path / "cache", key=key)
        rows = [row for row in range(num_rows) if cache.get(row) is not None]
        assert all(is_right(row, cache.get(row)) for row in rows)
        assert len(rows) >= found  # what was there is not made again
        found = len(rows)
    assert 0 < found < num_rows
    assert verify_cache(tmp_path / "cache").ok
    cache = SampleCache(tmp_path / "cache", key=key)
    assert sum(take(cache, row) for row in range(num_rows)) == found


class Interrupt:
    """Raises KeyboardInterrupt where Python itself would: in the nth call that the cache's code enters or has done."""

    def __init__(self, number: int) -> None:
        self.calls_left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and Path(frame.f_code.co_filename).parent == ROOM:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise KeyboardInterrupt


def test_an_interrupt_at_any_call_leaves_nothing_wrong(tmp_path: Path) -> None:
    num_rows = 12
    key = make_key(tmp_path / "files", num_rows)
    profiling = sys.getprofile()
    for number in range(1, 1000):
        cache = SampleCache(tmp_path / str(number), key=key)
        interrupted = False
        for row in range(3):  # the first opens the file, the others go on
            sys.setprofile(Interrupt(number))
            try:
                take(cache, row)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(profiling)
        if not interrupted:
            break
        for reader in (cache, SampleCache(cache.folder, key=key)):
            for row in range(num_rows):
                take(reader, row)
            assert all(is_right(row, reader.get(row)) for row in range(num_rows))
            assert reader.stats().num_damaged == 0
        assert verify_cache(cache.folder).ok
    assert number > 20


def test_two_builders_and_a_reader_at_once(tmp_path: Path) -> None:
    num_rows = 150
    key = make_key(tmp_path / "files", num_rows)
    builders = [start_builder(tmp_path / "files", tmp_path / "cache", num_rows, 0.001) for _ in range(2)]
    cache = SampleCache(tmp_path / "cache", key=key)
    num_found = 0
    while any(builder.poll() is None for builder in builders):
        rows = [row for row in range(num_rows) if cache.get(row) is not None]
        assert all(is_right(row, cache.get(row)) for row in rows)
        assert len(rows) >= num_found
        num_found = len(rows)
    for builder in builders:
        report = json.loads(builder.communicate()[0])
        assert report["warnings"] == []
        assert report["num_hits"] >= num_rows
    assert all(is_right(row, cache.get(row)) for row in range(num_rows))
    assert verify_cache(tmp_path / "cache").ok


def may_mount() -> bool:
    return (
        subprocess.run(
            [*IN_A_NEW_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.parametrize("full_before", [False, True])
def test_on_a_full_disk_caching_stops_with_one_warning(tmp_path: Path, full_before: bool) -> None:
    if not may_mount():
        pytest.skip("needs leave to mount a tmpfs in a namespace of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    make_key(tmp_path / "files", 200)
    script = (
        f"mount -t tmpfs -o size=256k tmpfs {disk} && "
        + (f"(head -c 1M /dev/zero > {disk}/filler || true) && " if full_before else "")
        + f"{sys.executable} {BUILDER} {tmp_path / 'files'} {disk / 'cache'} 200 0"
    )
    done = subprocess.run(
        [*IN_A_NEW_NAMESPACE, "sh", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    check_stopped(done.stdout, "No space left on device", least_bytes=0 if full_before else 150_000)


def test_where_files_may_not_grow_caching_stops_with_one_warning(tmp_path: Path) -> None:
    make_key(tmp_path / "files", 200)

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = [sys.executable, str(BUILDER), str(tmp_path / "files"), str(tmp_path / "cache"), "200", "0"]
    done = run_limited(command, limit_files)
    check_stopped(done.stdout, "File too large", least_bytes=0)
    assert verify_cache(tmp_path / "cache").ok


def run_limited(command: list[str], limit: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False)
    assert done.returncode == 0, done.stderr
    return done


def check_stopped(output: str, why: str, least_bytes: int) -> None:
    report = json.loads(output.splitlines()[-1])
    assert len(report["warnings"]) == 1
    assert why in report["warnings"][0]
    assert report["num_left_out"] > 0
    assert report["cache_bytes"] >= least_bytes
    assert (report["num_hits"] > 0) == (least_bytes > 0)
