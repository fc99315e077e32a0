"""What only notebooks use: the scenes that they share are made once; and what a kernel shows otherwise than a terminal."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mmlab.data.readers import read_records
from mmlab.lab.notebook import scenes
from mmlab.runs.events import RunLog


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


def test_the_table_of_runs_is_plain_text_in_a_notebook_too(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=1.0)
        log.write("end", 1, status="done")
    code = f"from mmlab.runs.watch import summary, text_of\nprint(text_of(summary({str(tmp_path)!r}), width=110))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    (output,) = NotebookClient(notebook).execute().cells[0].outputs
    assert output.name == "stdout"
    assert " done " in output.text
