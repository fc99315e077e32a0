"""The examples of other trainers run as they are, on the bundled data, and mmlab follows what they write."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from mmlab.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # of TRL, Lightning, transformers and torch, about themselves
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("trainer", "trainer"),
        ("accelerate_loop", "accelerate"),
        ("lightning_module", "lightning"),
        ("trl_sft", "trl_sft"),
        ("vlm_trainer", "vlm_trainer"),
    ],
)
def test_an_example_trains_and_can_be_watched(
    name: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    capsys.readouterr()
    assert main(["watch", f"runs/{run}", "--once"]) == 0
    page = capsys.readouterr().out
    assert "done" in page
    assert "loss" in page
