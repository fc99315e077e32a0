"""Ray Data builds bitwise what one process builds; without Ray the error says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmlab.cli.main import main
from mmlab.errors import OptionError
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.on_ray import build_cache_on_ray
from tests.loading.building import contents, open_cached


def by_ray(data: Path, folder: Path) -> dict:
    """The report of a build by two actors, in a process of its own: Ray leaves children and warnings behind."""
    pytest.importorskip("ray", reason="needs the extra ray: pip install 'mmlab[ray]'")
    options = ["--data", str(data), "--image", "square:32", "--engine", "ray", "--threads", "2", "--json"]
    command = [sys.executable, "-m", "mmlab", "cache", "build", str(folder), *options]
    for _ in range(4):  # on a busy machine Ray may miss the 30 s that it gives itself to start
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if "Ray did not start" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_ray_makes_what_one_process_makes(scenes: Path, tmp_path: Path) -> None:
    report = by_ray(scenes, tmp_path / "ray")
    assert report["num_made"] == sum(report["made_by_rank"]) == 24
    build_cache(open_cached(scenes, tmp_path / "one"), progress=False)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert by_ray(scenes, tmp_path / "ray")["num_made"] == 0


def test_without_ray_the_command_says_what_to_install(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as the import system marks what is not there
    assert main(["cache", "build", str(tmp_path / "cache"), "--data", str(scenes), "--engine", "ray"]) == 2
    captured = capsys.readouterr()
    assert "mmlab: error: engine 'ray' needs Ray" in captured.err
    assert "pip install 'mmlab[ray]'" in captured.err
    assert captured.out == ""


def test_ray_is_not_started_by_every_rank(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="start it once, without torchrun"):
        build_cache_on_ray(open_cached(scenes, tmp_path / "cache"))
