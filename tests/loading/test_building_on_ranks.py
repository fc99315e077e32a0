"""ProcessGroup share a build: no image twice, bitwise what one process makes, and a killed rank costs its part alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from mmlab.cli.cache import verify_cache
from mmlab.data.synthetic import make_dataset
from mmlab.errors import RunError
from mmlab.loading.cache.build import build_cache, gather, join_outcomes
from tests.loading.building import contents, open_cached

NUM_IMAGES = 70


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seventy small images of two captions each."""
    out = tmp_path_factory.mktemp("many") / "scenes"
    return make_dataset(out, num_images=NUM_IMAGES, captions_per_image=2, max_side=64, progress=False)


def on_two_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=environment
    )


def test_the_command_on_two_ranks_makes_what_one_process_makes(many: Path, tmp_path: Path) -> None:
    command = ["cache", "build", tmp_path / "both", "--data", many, "--image", "square:32", "--json"]
    done = on_two_ranks("-m", "mmlab", *command)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["num_made"] == report["num_images"] == NUM_IMAGES
    assert report["made_by_rank"] == [NUM_IMAGES // 2, NUM_IMAGES // 2]
    build_cache(open_cached(many, tmp_path / "one"), progress=False)
    assert contents(tmp_path / "both") == contents(tmp_path / "one")


def test_a_killed_rank_costs_its_part_alone(many: Path, tmp_path: Path) -> None:
    done = on_two_ranks(Path(__file__).with_name("building.py"), many, tmp_path / "both", 7)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    num_kept = len(contents(tmp_path / "both"))
    assert 7 <= num_kept < NUM_IMAGES
    report = build_cache(open_cached(many, tmp_path / "both"), progress=False)
    assert report.num_made == NUM_IMAGES - num_kept
    assert verify_cache(tmp_path / "both").ok
    build_cache(open_cached(many, tmp_path / "one"), progress=False)
    assert contents(tmp_path / "both") == contents(tmp_path / "one")


def outcome(num_made: int) -> dict[str, Any]:
    return {"num_made": num_made, "num_left_out": 0, "bad_samples": [f"row {num_made}"], "problems": []}


def test_every_rank_has_the_same_report(many: Path, tmp_path: Path) -> None:
    cache, store = open_cached(many, tmp_path / "cache").cache, distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: gather(outcome(10 + rank), cache, store, rank, 2), range(2))
    assert first == second == [outcome(10), outcome(11)]
    report = join_outcomes(cache, first)
    assert (report.num_made, report.made_by_rank, report.bad_samples) == (21, (10, 11), ("row 10", "row 11"))
    assert "21 images made (10 + 11 by 2 ranks)" in str(report)


def test_a_silent_rank_is_not_waited_for_for_ever(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmlab.loading.cache.build._SILENCE_S", 0.1)
    cache = open_cached(many, tmp_path / "cache").cache
    with pytest.raises(RunError, match=r"rank 1 has not reported for 0.1 s; start the job again"):
        gather(outcome(0), cache, distributed.HashStore(), 0, 2)
