"""What only notebooks use: the scenes that they share are made once; and what a kernel shows otherwise than a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from mmlab.data.readers import read_records
from mmlab.lab.notebook import device_of_ranks, scenes
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


def test_the_ranks_of_a_notebook_do_not_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus, device in enumerate(("cpu", "cpu", "auto")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        assert device_of_ranks(2) == device
    cells = json.loads((Path(__file__).parents[2] / "notebooks/06_parallel.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    starting = [source for source in code if "train_on(" in source or "bench_parallel(" in source]
    assert len(starting) == 4
    assert all("device" in source or "{**changes" in source for source in starting)


def test_the_table_of_runs_is_plain_text_in_a_notebook_too(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=1.0)
        log.write("end", 1, status="done")
    code = f"from mmlab.runs.watch import summary, text_of\nprint(text_of(summary({str(tmp_path)!r}), width=110))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    (output,) = NotebookClient(notebook).execute().cells[0].outputs
    assert output.name == "stdout"
    assert " done " in output.text
