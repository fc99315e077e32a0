"""A data set with a cache gives bitwise what it gives without; augmentation comes after it."""

from __future__ import annotations

import errno
import io
import tarfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmlab.cli.cache import cache_info
from mmlab.cli.main import main
from mmlab.data.augment import Augment
from mmlab.data.collate import Sample
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.data.text import load_tokenizer
from mmlab.errors import OptionError
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import Aspect, Square


@pytest.fixture
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))


def with_cache(dataset: MultimodalDataset, folder: Path, **options: int) -> MultimodalDataset:
    cached = MultimodalDataset(
        dataset.records,
        tokenizer=dataset.tokenizer,
        image_policy=dataset.image_policy,
        max_tokens=dataset.max_tokens,
    )
    cached.cache = SampleCache(folder, key=cache_key(cached), **options)  # type: ignore[arg-type]
    return cached


def test_a_cache_of_other_images_or_another_size_is_refused(
    dataset: MultimodalDataset, tmp_path: Path
) -> None:
    for other in (
        MultimodalDataset(dataset.records.select([1, 0]), image_policy=dataset.image_policy),
        MultimodalDataset(dataset.records, image_policy=Square(32)),
    ):
        cache = with_cache(other, tmp_path / str(other.image_policy)).cache
        with pytest.raises(OptionError, match="this cache is of other images or another size"):
            dataset.cache = cache
        with pytest.raises(OptionError, match="this cache is of other images or another size"):
            PlannedLoader(dataset, make_scheduler("random", batch_size=2), cache=cache)


def same(first: Sample, second: Sample) -> bool:
    assert first.keys() == second.keys()
    assert isinstance(first["image"], torch.Tensor)
    return all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


def test_a_hit_is_bitwise_a_miss_and_what_no_cache_gives(dataset: MultimodalDataset, tmp_path: Path) -> None:
    cached = with_cache(dataset, tmp_path / "cache")
    assert cached.cache is not None
    for _ in range(2):
        assert all(same(cached[row], dataset[row]) for row in range(len(dataset)))
    stats = cached.cache.stats()
    num_images = len(set(dataset.records.image_paths))
    assert stats.num_misses == num_images
    assert stats.num_hits == 2 * len(dataset) - num_images


def test_what_the_data_set_gives_may_be_written_to(dataset: MultimodalDataset, tmp_path: Path) -> None:
    cached = with_cache(dataset, tmp_path / "cache")
    for _ in range(2):
        image = cached[0]["image"]
        assert image is not None
        image.zero_()
    assert same(cached[0], dataset[0])


@dataclass
class Noted:
    """Notes which threads come by, and may hold each for a while."""

    pause_s: float = 0.0
    names: set[str] = field(default_factory=set)

    def __call__(self, image: torch.Tensor, **_: object) -> torch.Tensor:
        self.names.add(threading.current_thread().name.rstrip("_0123456789"))
        time.sleep(self.pause_s)
        return image


def test_quick_samples_are_left_to_one_thread(dataset: MultimodalDataset, tmp_path: Path) -> None:
    cached = with_cache(dataset, tmp_path / "cache")
    slow, quick = Noted(0.001), Noted()
    for augment, num_epochs in ((slow, 2), (quick, 50)):  # a busy machine may make any sample slow, not all
        loader = PlannedLoader(cached, make_scheduler("budget", budget=200), num_workers=2, augment=augment)
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            assert sum(len(batch) for batch in loader) == len(dataset)
    assert slow.names == {"mmlab-load"}
    assert quick.names == {"mmlab-load", "mmlab-collate"}


def test_batches_are_bitwise_the_same_cold_warm_and_without(
    dataset: MultimodalDataset, tmp_path: Path
) -> None:
    cached = with_cache(dataset, tmp_path / "cache")
    scheduler = make_scheduler("random", batch_size=8)
    for _ in range(2):
        pairs = zip(
            PlannedLoader(dataset, scheduler, num_workers=2, backend="threads"),
            PlannedLoader(cached, scheduler, num_workers=2, backend="threads"),
            strict=True,
        )
        for plain, batch in pairs:
            assert torch.equal(plain.pixel_values, batch.pixel_values)
            assert torch.equal(plain.input_ids, batch.input_ids)


def brightness(dataset: MultimodalDataset, *, seed: int, epochs: range) -> np.ndarray:
    """Mean level (epochs, rows) of augmented images."""
    augment = Augment(crop_scale=(0.3, 1.0), flip_probability=0.5, brightness=0.5)
    levels = []
    for epoch in epochs:
        samples = (dataset[row] for row in range(len(dataset)))
        images = (
            augment(sample["image"], seed=seed, epoch=epoch, record_id=sample["id"])
            for sample in samples
            if sample["image"] is not None
        )
        levels.append([image.float().mean().item() for image in images])
    return np.array(levels)


def test_epochs_differ_with_the_cache_as_without_in_the_same_distribution(
    dataset: MultimodalDataset, tmp_path: Path
) -> None:
    cached = with_cache(dataset, tmp_path / "cache")
    off, on = brightness(dataset, seed=1, epochs=range(6)), brightness(cached, seed=1, epochs=range(6))
    assert np.array_equal(off, on)  # the same draws, the same images
    assert (np.abs(on[0] - on[1]) > 0.5).mean() > 0.9  # epochs differ
    other = brightness(cached, seed=2, epochs=range(6))
    levels = np.sort(np.concatenate((off.ravel(), other.ravel())))
    shares = [
        np.searchsorted(np.sort(part.ravel()), levels, side="right") / part.size for part in (off, other)
    ]
    distance = np.abs(shares[0] - shares[1]).max()  # Kolmogorov and Smirnov's
    assert distance < 1.63 * np.sqrt(
        2 / off.size
    )  # one in a hundred pairs of equal distributions is further apart
    spread_off, spread_on = off.std(axis=0).mean(), other.std(axis=0).mean()  # of one image over the epochs
    assert spread_on == pytest.approx(spread_off, rel=0.2)


def test_building_goes_on_where_it_stopped(dataset: MultimodalDataset, tmp_path: Path) -> None:
    part = with_cache(dataset, tmp_path / "cache")
    for row in range(10):
        part[row]
    cached = with_cache(dataset, tmp_path / "cache")
    num_images = len(set(dataset.records.image_paths))
    num_there = len(set(dataset.records.image_paths[:10]))
    report = build_cache(cached, num_threads=3, progress=False)
    assert report.num_made == num_images - num_there
    assert report.bad_samples == ()
    again = build_cache(cached, progress=False)
    assert (again.num_made, again.num_images) == (0, num_images)
    assert all(same(cached[row], dataset[row]) for row in range(len(dataset)))
    info = cache_info(tmp_path / "cache").document
    assert (info["num_images"], info["num_slots"]) == (num_images, num_images)


def test_building_names_what_it_could_not_make(tmp_path: Path) -> None:
    for name in ("good.png", "bad.png"):
        Image.new("RGB", (20, 20)).save(tmp_path / name)
    dataset = MultimodalDataset([tmp_path / "good.png", tmp_path / "bad.png"], ["one", "two"])
    with pytest.raises(OptionError, match=r"no cache to fill: set dataset\.cache"):
        build_cache(dataset)
    cached = with_cache(dataset, tmp_path / "cache")
    (tmp_path / "bad.png").write_bytes(b"not an image any more")
    with pytest.raises(OptionError, match="num_threads must be at least 1, found 0"):
        build_cache(cached, num_threads=0)
    report = build_cache(cached, progress=False)
    assert report.num_made == 1
    assert [("bad.png" in reason) for reason in report.bad_samples] == [True]


def test_building_within_a_limit_says_what_found_no_room(dataset: MultimodalDataset, tmp_path: Path) -> None:
    cached = with_cache(dataset, tmp_path / "cache", limit_bytes=100_000)
    report = build_cache(cached, num_threads=1, progress=False)
    assert report.num_left_out > 0
    assert report.cache_bytes <= 100_000
    assert f"{report.num_left_out} did not fit" in str(report)
    assert report.ok
    with pytest.warns(UserWarning, match="nothing more is cached"):
        cached.cache._fail(OSError(errno.ENOSPC, "No space left on device"))
    report = build_cache(cached, progress=False)
    assert not report.ok
    assert f"cannot write to the cache {tmp_path / 'cache'}: No space left on device" in str(report)


@pytest.mark.filterwarnings("ignore:.* texts were cut to 12 tokens:UserWarning")
def test_a_change_of_policy_says_so_and_another_tokenizer_changes_nothing(
    dataset: MultimodalDataset, tmp_path: Path
) -> None:
    build_cache(with_cache(dataset, tmp_path / "cache"), progress=False)
    words = load_tokenizer(records=dataset.records, vocab_size=200)
    other = MultimodalDataset(
        dataset.records, image_policy=dataset.image_policy, tokenizer=words, max_tokens=12
    )
    cached = with_cache(other, tmp_path / "cache")  # images do not depend on how texts are tokenised
    assert build_cache(cached, progress=False).num_made == 0
    assert len(cached[0]["input_ids"]) <= 12
    first = cached
    dataset = MultimodalDataset(dataset.records, image_policy=Aspect(64 * 64 + 1, 16))  # the same short name
    assert str(dataset.image_policy) == str(Aspect(64 * 64, 16))
    with pytest.warns(
        UserWarning, match=r"image policy Aspect\(max_area=4096, .*\) -> Aspect\(max_area=4097"
    ):
        with_cache(dataset, tmp_path / "cache")
    report = build_cache(first, progress=False)  # it has its file open
    assert not report.ok
    assert "another process removed it, to keep other images there" in str(report)


def test_a_policy_must_show_its_settings(dataset: MultimodalDataset) -> None:
    class Secret:
        pass

    vars(dataset)["image_policy"] = Secret()
    with pytest.raises(OptionError, match="cannot be part of a cache's key: give its class a __repr__"):
        cache_key(dataset)


def test_images_in_tar_shards_are_recognised_by_the_shard(tmp_path: Path) -> None:
    def write(level: int) -> None:
        with tarfile.open(tmp_path / "shard.tar", "w") as tar:
            picture = io.BytesIO()
            Image.new("RGB", (20, 20), (level, 0, 0)).save(picture, "PNG")
            for name, content in (("0.png", picture.getvalue()), ("0.txt", b"a field")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    def level(dataset: MultimodalDataset) -> int:
        image = dataset[0]["image"]
        assert image is not None
        return int(image[0, 0, 0])

    write(10)
    dataset = MultimodalDataset(read_records(tmp_path / "shard.tar", progress=False), image_policy=Square(16))
    cached = with_cache(dataset, tmp_path / "cache")
    assert [level(cached), level(cached)] == [10, 10]
    write(200)
    assert level(cached) == 200


def test_a_store_that_names_no_files_is_read_and_hashed(dataset: MultimodalDataset, tmp_path: Path) -> None:
    class Bytes:
        def read(self, image_path: str) -> bytes:
            return Path(image_path).read_bytes()

    vars(dataset)["records"] = replace(dataset.records, store=Bytes())
    cached = with_cache(dataset, tmp_path / "cache")
    assert cached.cache is not None
    for _ in range(2):
        assert same(cached[0], dataset[0])
    assert cached.cache.stats().num_hits == 1


def test_the_command_line_builds_and_clears(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "cache")
    build = ["cache", "build", folder, "--data", str(scenes), "--image", "square:32", "--threads", "1"]
    for expected in ("24 images made and 0 found of 24", "0 images made and 24 found of 24"):
        assert main(build) == 0
        assert expected in capsys.readouterr().out
    assert main(["cache", "info", folder]) == 0
    assert "24 images of 24 in 1 files" in (shown := capsys.readouterr().out)
    assert "image policy Square(side=32)" in shown
    assert main(["cache", "clear", folder]) == 0
    assert main(["cache", "info", folder]) == 2
