"""Whatever happens to a cache, it gives a row's own arrays or nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mmlab.cli.cache import cache_info, clear_cache, verify_cache
from mmlab.errors import DataError, OptionError
from mmlab.loading.cache.key import CacheKey
from mmlab.loading.cache.store import SampleCache
from tests.loading.cached_arrays import arrays, is_right, make_key, take

NUM_ROWS = 60


@pytest.fixture
def key(tmp_path: Path) -> CacheKey:
    return make_key(tmp_path / "files", NUM_ROWS)


def fill(folder: Path, key: CacheKey, **options: int) -> SampleCache:
    cache = SampleCache(folder, key=key, **options)  # type: ignore[arg-type]
    assert not any(take(cache, row) for row in range(len(key.records)))
    return cache


def test_gives_back_what_was_put_also_after_reopening_and_pickling(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    reopened = SampleCache(tmp_path / "cache", key=key)
    pickled = pickle.loads(pickle.dumps(cache))
    cache.close()
    for reader in (cache, reopened, pickled):
        assert all(is_right(key, row, reader.get(row)) for row in range(NUM_ROWS))
    stats = reopened.stats()
    assert (stats.num_hits, stats.num_misses, stats.hit_ratio) == (NUM_ROWS, 0, 1.0)
    assert stats.read_bytes == cache.stats().written_bytes < stats.cache_bytes
    assert verify_cache(tmp_path / "cache", progress=False).ok
    assert cache_info(tmp_path / "cache").unused_bytes == 0


def test_many_rows_are_found_in_sorted_columns(
    tmp_path: Path, key: CacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmlab.loading.cache.store._MAX_RECENT", 10)
    fill(tmp_path / "cache", key, limit_bytes=1 << 20).close()
    reopened = SampleCache(tmp_path / "cache", key=key)
    assert all(is_right(key, row, reopened.get(row)) for row in range(NUM_ROWS))
    assert len(reopened._recent) <= 10


def test_one_image_with_several_texts_is_kept_once(tmp_path: Path, key: CacheKey) -> None:
    records = key.records
    one_image = CacheKey(
        records=records.select([0, 1]),
        image_settings=key.image_settings,
        text_settings=key.text_settings,
    )
    one_image.records.image_paths[1] = one_image.records.image_paths[0]
    cache = SampleCache(tmp_path / "cache", key=one_image)
    assert cache.get(0) is None
    pixels, token_ids = arrays(key, 0)
    cache.put(0, pixels, token_ids)
    found = cache.get(1)
    assert found is not None
    assert np.array_equal(found[0], pixels)
    assert found[1] is None
    cache.put(1, pixels, token_ids[:1])
    found = cache.get(1)
    assert found is not None
    assert np.array_equal(found[1], token_ids[:1])
    info = cache_info(tmp_path / "cache")
    assert (info.num_images, info.num_texts) == (1, 2)


def test_an_image_that_changes_is_made_again_even_with_its_old_size_and_time(
    tmp_path: Path, key: CacheKey
) -> None:
    cache = fill(tmp_path / "cache", key)
    path = Path(key.records.image_paths[0] or "")
    before = path.stat()
    time.sleep(0.02)  # the clock of file systems ticks every 10 ms at worst
    path.write_bytes(b"\xff" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert cache.get(0) is None


def test_an_image_that_changes_while_it_is_decoded_is_not_mistaken_for_the_new_one(
    tmp_path: Path, key: CacheKey
) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    assert cache.get(0) is None
    time.sleep(0.02)
    Path(key.records.image_paths[0] or "").write_bytes(b"new content")
    cache.put(0, *arrays(key, 0))
    assert cache.get(0) is None


def test_verified_content_is_recognised_wherever_it_lies(tmp_path: Path) -> None:
    key = make_key(tmp_path / "files", 10, verify_content=True)
    fill(tmp_path / "cache", key)
    shutil.copytree(tmp_path / "files", tmp_path / "moved")
    moved = SampleCache(tmp_path / "cache", key=make_key(tmp_path / "moved", 10, verify_content=True))
    assert all(is_right(key, row, moved.get(row)) for row in range(10))
    (tmp_path / "moved" / "0.bin").write_bytes(b"other")
    assert moved.get(0) is None


def test_a_row_without_its_file_is_a_miss(tmp_path: Path, key: CacheKey) -> None:
    cache = fill(tmp_path / "cache", key)
    Path(key.records.image_paths[0] or "").unlink()
    assert cache.get(0) is None


def test_other_image_settings_remove_what_no_longer_holds_and_say_why(tmp_path: Path, key: CacheKey) -> None:
    fill(tmp_path / "cache", key)
    changed = make_key(tmp_path / "files", NUM_ROWS, image_settings={"image policy": "64"})
    with pytest.warns(UserWarning, match=r"images of the cache .* are made again: image policy 32 -> 64$"):
        cache = SampleCache(tmp_path / "cache", key=changed)
    assert cache.stats().cache_bytes == 0
    assert cache.get(0) is None
    SampleCache(tmp_path / "cache", key=changed)  # says it once


def test_another_tokenizer_keeps_the_images(tmp_path: Path, key: CacheKey) -> None:
    fill(tmp_path / "cache", key)
    changed = make_key(tmp_path / "files", NUM_ROWS, text_settings={"tokenizer": "letters"})
    with pytest.warns(
        UserWarning, match=r"token ids .* made again: tokenizer words -> letters; images are kept"
    ):
        cache = SampleCache(tmp_path / "cache", key=changed)
    found = cache.get(0)
    assert found is not None
    assert np.array_equal(found[0], arrays(key, 0)[0])
    assert found[1] is None


def test_the_limit_holds_and_what_is_in_use_stays(tmp_path: Path, key: CacheKey) -> None:
    whole_bytes = fill(tmp_path / "whole", key).stats().cache_bytes
    limit_bytes = whole_bytes // 2
    cache = fill(tmp_path / "cache", key, limit_bytes=limit_bytes)
    first = {row for row in range(NUM_ROWS) if cache.get(row) is not None}
    assert 0.8 * limit_bytes < cache.stats().cache_bytes <= limit_bytes
    for _ in range(2):  # a data set that does not fit keeps what it has, instead of chasing itself
        assert {row for row in range(NUM_ROWS) if take(cache, row)} == first
    assert 0.4 < len(first) / NUM_ROWS < 0.6
    assert cache.stats().num_left_out > 0


def test_the_least_recently_used_shards_make_room(tmp_path: Path) -> None:
    old, new = make_key(tmp_path / "old", 40), make_key(tmp_path / "new", 40)
    limit_bytes = 100_000
    cache = fill(tmp_path / "cache", old, limit_bytes=limit_bytes)
    kept = [row for row in range(40) if is_right(old, row, cache.get(row))]
    time.sleep(0.02)
    again = SampleCache(tmp_path / "cache", key=old, limit_bytes=limit_bytes)
    used = kept[-4:]
    assert all(again.get(row) is not None for row in used)
    time.sleep(0.02)
    later = SampleCache(tmp_path / "cache", key=new, limit_bytes=limit_bytes)
    for row in range(12):
        take(later, row)
    assert later.stats().cache_bytes <= limit_bytes
    left = {row for row in kept if SampleCache(tmp_path / "cache", key=old).get(row) is not None}
    assert set(used) < left < set(kept)


def test_evicted_shards_are_misses_for_who_has_them_open(tmp_path: Path, key: CacheKey) -> None:
    fill(tmp_path / "cache", key).close()
    reader = SampleCache(tmp_path / "cache", key=key)
    assert is_right(key, 0, reader.get(0))
    clear_cache(tmp_path / "cache")
    assert is_right(key, 0, reader.get(0))  # the file lives on as long as it is mapped
    reader.close()
    assert reader.get(0) is None
    assert reader.stats().num_damaged == 0


def test_threads_share_a_cache(tmp_path: Path, key: CacheKey) -> None:
    cache = SampleCache(tmp_path / "cache", key=key)
    rows = np.random.default_rng(0).integers(0, NUM_ROWS, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        hits = list(pool.map(lambda row: take(cache, row), rows))
    assert all(is_right(key, row, cache.get(row)) for row in set(rows))
    info = cache_info(tmp_path / "cache")
    assert info.num_shards == 1
    assert info.num_images == sum(key.records.image_paths[row] is not None for row in set(rows))
    assert sum(hits) >= len(rows) - 8 * NUM_ROWS


def test_a_forked_process_writes_shards_of_its_own(tmp_path: Path, key: CacheKey) -> None:
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
    both = SampleCache(tmp_path / "cache", key=key)
    assert all(is_right(key, row, both.get(row)) for row in range(NUM_ROWS))
    assert cache_info(tmp_path / "cache").num_shards == 2


def test_strange_folders_and_limits_are_refused(tmp_path: Path, key: CacheKey) -> None:
    with pytest.raises(OptionError, match=r"is no cache: it has files; name an empty folder"):
        SampleCache(tmp_path, key=key)
    with pytest.raises(OptionError, match="limit_bytes must be at least 16, found 15"):
        SampleCache(tmp_path / "cache", key=key, limit_bytes=15)
    for look in (cache_info, verify_cache, clear_cache):
        with pytest.raises(DataError, match="no cache is there"):
            look(tmp_path / "nowhere")


def test_clear_removes_all_but_the_folder(tmp_path: Path, key: CacheKey) -> None:
    cache_bytes = fill(tmp_path / "cache", key).stats().cache_bytes
    assert clear_cache(tmp_path / "cache") == {"num_shards": 1, "num_bytes": cache_bytes}
    assert list((tmp_path / "cache").iterdir()) == []


def test_unreadable_settings_cost_nothing(tmp_path: Path, key: CacheKey) -> None:
    fill(tmp_path / "cache", key)
    (tmp_path / "cache" / "key.json").write_text("{", encoding="utf-8")
    assert is_right(key, 0, SampleCache(tmp_path / "cache", key=key).get(0))
    assert json.loads((tmp_path / "cache" / "key.json").read_text("utf-8"))["images"] == key.image_settings
