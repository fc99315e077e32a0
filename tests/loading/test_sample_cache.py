"""Whatever happens to a cache, it gives a row's own pixels or nothing."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mmlab.cli.cache import cache_info, clear_cache, verify_cache
from mmlab.errors import DataError, OptionError
from mmlab.loading.cache.key import CacheKey, cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.types import Square
from tests.loading.cached_arrays import SIDE, Prepared, is_right, make_key, pixels_of, take

NUM_ROWS = 60


@pytest.fixture
def key(tmp_path: Path) -> CacheKey:
    return make_key(tmp_path / "files", NUM_ROWS)


def fill(folder: Path, key: CacheKey, **options: int) -> SampleCache:
    cache = SampleCache(folder, key=key, **options)  # type: ignore[arg-type]
    assert not any(take(cache, row) for row in range(len(key.records)))
    return cache


def image(key: CacheKey, row: int) -> Path:
    path = key.records.image_paths[row]
    assert path is not None
    return Path(path)


def test_gives_back_what_was_put_also_after_reopening_and_pickling(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    reopened = SampleCache(tmp_path / "cache", key=key)
    pickled = pickle.loads(pickle.dumps(cache))
    cache.close()
    for reader in (cache, reopened, pickled):
        assert all(is_right(row, reader.get(row)) for row in range(NUM_ROWS))
    stats = reopened.stats()
    assert (stats.num_hits, stats.num_misses) == (NUM_ROWS, 0)
    assert stats.cache_bytes >= NUM_ROWS * 3 * SIDE * SIDE
    assert verify_cache(tmp_path / "cache").ok


def test_pixels_are_read_into_the_memory_that_is_given_where_it_fits(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    batch = np.empty((2, 3, SIDE, SIDE), np.uint8)
    found = cache.get(5, out=batch[1])
    assert found is not None
    assert np.shares_memory(found, batch)
    assert is_right(5, batch[1])
    larger = cache.get(5, out=np.empty((3, SIDE, SIDE + 1), np.uint8))
    assert is_right(5, larger)


def test_an_image_that_changes_is_made_again_even_with_its_old_size_and_time(
    tmp_path: Path, key: CacheKey
) -> None:
    cache = fill(tmp_path / "cache", key)
    path = image(key, 0)
    before = path.stat()
    time.sleep(0.02)  # the clock of file systems ticks every 10 ms at worst
    path.write_bytes(b"\xff" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert cache.get(0) is None
    cache.put(0, pixels_of(77))  # its slot is taken again
    assert is_right(77, cache.get(0))
    assert verify_cache(tmp_path / "cache").ok


def test_an_image_that_changes_while_it_is_decoded_is_not_mistaken_for_the_new_one(
    tmp_path: Path, key: CacheKey
) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    assert cache.get(0) is None
    with ThreadPoolExecutor(1) as other:  # where an epoch has a sample twice, two threads may decode it
        other.submit(lambda: (cache.get(0), cache.put(0, pixels_of(0)))).result()
    time.sleep(0.02)
    image(key, 0).write_bytes(b"new content")
    cache.put(0, pixels_of(0))
    assert cache.get(0) is None


def test_pixels_of_another_size_than_planned_are_left_out(tmp_path: Path, key: CacheKey) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    cache.put(0, pixels_of(0, side=2 * SIDE))
    assert cache.get(0) is None
    assert cache.stats().num_left_out == 1


def test_a_row_without_its_file_is_a_miss(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    image(key, 0).unlink()
    assert cache.get(0) is None


def test_other_settings_remove_what_no_longer_holds_and_say_why(tmp_path: Path, key: CacheKey) -> None:
    fill(tmp_path / "cache", key)
    changed = make_key(tmp_path / "files", NUM_ROWS, side=64)
    message = (
        r"images of the cache .* will be decoded again: image policy Square\(side=32\) -> Square\(side=64\)$"
    )
    with pytest.warns(UserWarning, match=message):
        cache = SampleCache(tmp_path / "cache", key=changed)
    assert cache.get(0) is None
    assert len(list((tmp_path / "cache").iterdir())) == 1
    SampleCache(tmp_path / "cache", key=changed)  # says it once


def test_a_cache_depends_on_what_makes_pixels_and_not_on_the_version_of_python_or_mmlab(
    key: CacheKey,
) -> None:
    settings = {"cache format", "image policy", "decoding code"}
    assert key.settings.keys() == settings | {"pillow", "simplejpeg", "torch", "torchvision"}


def test_other_images_have_a_file_of_their_own(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    other = fill(tmp_path / "cache", make_key(tmp_path / "others", 10))
    assert all(is_right(row, cache.get(row)) for row in range(NUM_ROWS))
    assert all(is_right(row, other.get(row)) for row in range(10))
    info = cache_info(tmp_path / "cache").document
    assert (info["num_files"], info["num_images"], info["num_slots"]) == (2, NUM_ROWS + 10, NUM_ROWS + 10)


def test_however_the_same_images_are_divided_they_share_a_file(tmp_path: Path, key: CacheKey) -> None:
    def divided(first: list[int]) -> list[SampleCache]:
        rest = sorted(set(range(NUM_ROWS)) - set(first))
        parts = [Prepared(key.records.select(rows), Square(SIDE)) for rows in (first, rest)]
        return [SampleCache(tmp_path / "cache", key=cache_key(part, among=parts)) for part in parts]

    rows = [3, 4, 9]
    for cache, taken in zip(divided(rows), (rows, sorted(set(range(NUM_ROWS)) - set(rows))), strict=True):
        for place, row in enumerate(taken):
            assert cache.get(place) is None
            cache.put(place, pixels_of(row))
    for cache, taken in zip(divided([5]), ([5], sorted(set(range(NUM_ROWS)) - {5})), strict=True):
        assert all(is_right(row, cache.get(place)) for place, row in enumerate(taken))


def test_a_limit_keeps_the_same_part_in_every_epoch(tmp_path: Path, key: CacheKey) -> None:
    whole_bytes = fill(tmp_path / "whole", key).stats().cache_bytes
    cache = fill(tmp_path / "cache", key, limit_bytes=whole_bytes // 2)
    kept = {row for row in range(NUM_ROWS) if cache.get(row) is not None}
    assert 0.8 * whole_bytes / 2 < cache.stats().cache_bytes <= whole_bytes // 2
    assert 0.4 < len(kept) / NUM_ROWS < 0.6
    again = SampleCache(tmp_path / "cache", key=key, limit_bytes=whole_bytes // 2)
    for _ in range(2):
        assert {row for row in range(NUM_ROWS) if take(again, row)} == kept
    assert again.stats().num_left_out == 2 * (NUM_ROWS - len(kept))


def test_a_limit_may_change(tmp_path: Path, key: CacheKey) -> None:
    whole_bytes = fill(tmp_path / "cache", key).stats().cache_bytes
    smaller = SampleCache(tmp_path / "cache", key=key, limit_bytes=whole_bytes // 2)
    assert smaller.stats().cache_bytes <= whole_bytes // 2
    num_kept = sum(smaller.get(row) is not None for row in range(NUM_ROWS))
    assert 0 < num_kept < NUM_ROWS
    larger = SampleCache(tmp_path / "cache", key=key)
    assert sum(take(larger, row) for row in range(NUM_ROWS)) == num_kept
    assert larger.stats().num_damaged == 0
    assert all(is_right(row, larger.get(row)) for row in range(NUM_ROWS))


def test_under_a_limit_files_of_other_images_make_room(tmp_path: Path) -> None:
    old, newer, new = (make_key(tmp_path / name, 20) for name in ("old", "newer", "new"))
    one_bytes = fill(tmp_path / "whole", old).path.stat().st_size
    fill(tmp_path / "cache", old)
    time.sleep(0.02)
    fill(tmp_path / "cache", newer)
    cache = fill(tmp_path / "cache", new, limit_bytes=2 * one_bytes)
    assert all(is_right(row, cache.get(row)) for row in range(20))
    assert cache.stats().cache_bytes <= 2 * one_bytes
    left = SampleCache(tmp_path / "cache", key=newer)
    assert all(is_right(row, left.get(row)) for row in range(20))  # the least recently used one went
    assert cache_info(tmp_path / "cache").document["num_files"] == 2


def test_who_has_a_removed_file_open_goes_on_with_it(tmp_path: Path, key: CacheKey) -> None:
    reader = fill(tmp_path / "cache", key)
    clear_cache(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert is_right(0, reader.get(0))
    reader.close()
    assert reader.get(0) is None
    assert reader.stats().num_damaged == 0


def test_threads_share_a_cache(tmp_path: Path, key: CacheKey) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    rows = np.random.default_rng(0).integers(0, NUM_ROWS, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        hits = list(pool.map(lambda row: take(cache, row), rows))
    assert all(is_right(row, cache.get(row)) for row in set(rows))
    assert cache_info(tmp_path / "cache").document["num_images"] == len(set(rows))
    assert sum(hits) >= len(rows) - 8 * NUM_ROWS


def test_a_forked_process_writes_to_the_same_file(tmp_path: Path, key: CacheKey) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    take(cache, 0)
    with cache._lock:  # held by some thread of the parent for ever, as far as the child can see
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for row in range(1, NUM_ROWS, 2):
                    take(cache, row)
                status = 0
            finally:
                os._exit(status)
    for row in range(2, NUM_ROWS, 2):
        take(cache, row)
    assert os.waitpid(child, 0)[1] == 0
    assert all(is_right(row, cache.get(row)) for row in range(NUM_ROWS))


def test_strange_folders_and_limits_are_refused(tmp_path: Path, key: CacheKey) -> None:
    with pytest.raises(OptionError, match=r"is no cache: it has files; name an empty folder"):
        SampleCache(tmp_path, key=key)
    with pytest.raises(OptionError, match="limit_bytes must be at least 1, found 0"):
        SampleCache(tmp_path / "cache", key=key, limit_bytes=0)
    for look in (cache_info, verify_cache, clear_cache):
        with pytest.raises(DataError, match="no cache is there"):
            look(tmp_path / "nowhere")


def test_clear_removes_all_but_the_folder(tmp_path: Path, key: CacheKey) -> None:
    cache_bytes = fill(tmp_path / "cache", key).stats().cache_bytes
    assert clear_cache(tmp_path / "cache").document == {"num_files": 1, "num_bytes": cache_bytes}
    assert list((tmp_path / "cache").iterdir()) == []
