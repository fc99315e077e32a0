"""A training run in a process of its own returns what it found, and stops where interrupts were ignored."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mmlab.comparison.background import find_run, start_train
from mmlab.comparison.config import load_config
from mmlab.comparison.train import TrainingResult
from mmlab.errors import DataError, RunError
from mmlab.training.checkpoint.keeping import Checkpoints
from tests.comparison.test_training import CONFIG, steps_of


@pytest.fixture
def config(tmp_path: Path, scenes: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(name="small", scenes=scenes))
    return path


def test_a_training_run_in_the_background_stops_with_a_checkpoint_and_goes_on(
    config: Path, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of `nohup make test &`; children inherit it
    try:
        run = start_train(load_config(config, ["trainer.num_epochs=1000"]), runs=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    events = tmp_path / "small" / "events-rank0.jsonl"
    while not events.exists() or b'"kind":"step"' not in events.read_bytes():
        assert run.state == "running", run.error
        time.sleep(0.05)
    assert find_run(tmp_path / "small") is run
    run.stop()
    assert run.state == "stopped"
    last_step = steps_of(tmp_path / "small")[-1][0]
    assert Checkpoints(tmp_path / "small" / "checkpoints").paths[-1].name.endswith(f"-step-{last_step}")
    with pytest.raises(RunError, match="started again with resume='auto' it goes on"):
        run.wait()

    found = start_train(load_config(config, ["trainer.num_epochs=1"]), runs=tmp_path, resume="auto").wait()
    assert isinstance(found, TrainingResult)
    assert found.status == "done"
    assert found.resumed_from is not None


def test_what_is_wrong_with_a_training_run_is_raised_by_wait(config: Path, tmp_path: Path) -> None:
    run = start_train(load_config(config, [f"data.path={tmp_path / 'nowhere'}"]), runs=tmp_path)
    with pytest.raises(DataError, match="nowhere"):
        run.wait()
    assert run.state == "failed"
