"""ProcessGroup share a build: no image twice, bitwise what one process makes, and a killed rank costs its part alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from mmlab.cli.cache import verify_cache
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.data.synthetic import make_dataset
from mmlab.errors import RunError
from mmlab.loading.cache.build import Blocks, build_cache
from mmlab.parallel.shared_work import SharedWork
from tests.loading.building import contents, open_cached

NUM_IMAGES = 70  # five blocks


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy small images of two captions each."""
    out = tmp_path_factory.mktemp("many") / "scenes"
    return make_dataset(
        out, num_images=NUM_IMAGES, captions_per_image=2, max_side=64, num_workers=1, progress=False
    )


def on_two_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=environment
    )


def assert_same_images(found: Path, expected: Path) -> None:
    """The same records bitwise, no image twice; a text that several images share may be there once a rank."""
    one, other = contents(found), contents(expected)
    assert one.keys() == other.keys()
    for digest, records in one.items():
        assert set(records) == set(other[digest])
        assert len(records) == 1 or records[0][0][0] == 1, "an image is there twice"


def test_the_command_on_two_ranks_makes_what_one_process_makes(many: Path, tmp_path: Path) -> None:
    command = ["cache", "build", tmp_path / "both", "--data", many, "--image", "square:32", "--json"]
    done = on_two_ranks("-m", "mmlab", *command)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["num_made"] == sum(report["made_by_rank"]) == NUM_IMAGES
    assert len(report["made_by_rank"]) == 2
    assert report["num_samples"] == 2 * NUM_IMAGES
    build_cache(open_cached(many, tmp_path / "one"), progress=False)
    assert_same_images(tmp_path / "both", tmp_path / "one")


def test_a_killed_rank_costs_its_part_alone(many: Path, tmp_path: Path) -> None:
    done = on_two_ranks(Path(__file__).with_name("building.py"), many, tmp_path / "both", 7)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    num_kept = sum(shape[0] == 3 for records in contents(tmp_path / "both").values() for shape, _ in records)
    assert num_kept >= 4  # rank 1's four images of two captions, and what rank 0 had made
    report = build_cache(open_cached(many, tmp_path / "both"), progress=False)
    assert report.num_made == NUM_IMAGES - num_kept
    assert verify_cache(tmp_path / "both", progress=False).ok
    build_cache(open_cached(many, tmp_path / "one"), progress=False)
    assert_same_images(tmp_path / "both", tmp_path / "one")


def two_ranks(**options: Any) -> list[SharedWork]:
    store = distributed.HashStore()
    return [SharedWork(store, rank, 2, **options) for rank in range(2)]


def test_each_rank_has_a_stretch_of_its_own_and_then_helps() -> None:
    one, other = (work.blocks(9) for work in two_ranks())
    assert [next(one), next(other), next(one), next(other)] == [0, 4, 1, 5]
    assert list(other) == [6, 7, 8, 2, 3]  # its own, then what the first has left
    assert list(one) == []


def in_two_threads(works: list[SharedWork], datasets: list[MultimodalDataset]) -> list[Any]:
    """What `build_cache` gives or raises on each rank, as two processes would call it."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = build_cache(datasets[rank], num_threads=2, work=works[rank], progress=False)
        except RunError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


def test_every_rank_has_the_same_report(many: Path, tmp_path: Path) -> None:
    datasets = [open_cached(many, tmp_path / "both") for _ in range(2)]
    broken = next(path for path in datasets[0].records.image_paths if path is not None)
    content = Path(broken).read_bytes()
    Path(broken).write_bytes(b"no image")
    try:
        reports = in_two_threads(two_ranks(), datasets)
    finally:
        Path(broken).write_bytes(content)
    assert reports[0] == reports[1]
    assert sum(reports[0].made_by_rank) == reports[0].num_made == NUM_IMAGES - 1
    assert [Path(broken).name in reason for reason in reports[0].bad_samples] == [True, True]  # both captions
    assert "by 2 ranks)" in str(reports[0])


def test_a_rank_that_gives_up_is_named_by_the_others(many: Path, tmp_path: Path) -> None:
    datasets = [open_cached(many, tmp_path / "both") for _ in range(2)]

    def broken(row: int) -> object:
        raise RunError("the disk is on fire")

    datasets[1].read = broken  # type: ignore[method-assign, assignment]
    found = in_two_threads(two_ranks(), datasets)
    assert str(found[0]) == "rank 1 has given up its part: RunError: the disk is on fire"
    assert str(found[1]) == "the disk is on fire"


def test_a_silent_rank_is_not_waited_for_for_ever() -> None:
    works = two_ranks(silence_s=0.2)
    with pytest.raises(RunError, match=r"rank 1 has told nothing for 0.2 s; start the job again"):
        works[0].gather({})


def test_rows_of_one_image_are_in_one_block(records: Records) -> None:
    mixed = records.select(list(range(0, len(records), 2)) + list(range(1, len(records), 2)))
    blocks = Blocks(mixed)
    rows = [blocks.rows(number) for number in range(len(blocks))]
    assert sorted(row for block in rows for row in block) == list(range(len(mixed)))
    images = [{mixed.image_paths[row] for row in block} for block in rows]
    assert len(images) == 2
    assert not images[0] & images[1]
