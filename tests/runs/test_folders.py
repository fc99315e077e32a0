"""What an earlier run left is moved aside, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

from mmlab.runs.folders import fresh_folder


def test_a_number_is_never_used_again_while_a_later_one_is_there(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        (fresh_folder(tmp_path, ["log*.txt"]) / "log.txt").write_text(text)
    (tmp_path / "previous-1" / "log.txt").unlink()
    (tmp_path / "previous-1").rmdir()
    (tmp_path / "previous-mine").mkdir()
    fresh_folder(tmp_path, ["log*.txt"])
    kept = {path.parent.name: path.read_text() for path in tmp_path.glob("*/log.txt")}
    assert kept == {"previous-2": "second", "previous-3": "third"}
