"""What only notebooks use: the scenes that they share are made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmlab.data.readers import read_records
from mmlab.lab.notebook import scenes


def test_the_scenes_are_made_once_and_have_a_held_out_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("MMLAB_SMOKE", "1")
    folder = scenes()
    made = (folder / "captions.json").stat()
    records = read_records(scenes(), progress=False)
    assert (folder / "captions.json").stat().st_mtime_ns == made.st_mtime_ns
    assert folder.resolve() == tmp_path / "runs/scenes-60"
    assert {split: records.splits.count(split) for split in ("train", "val")} == {"train": 270, "val": 30}
