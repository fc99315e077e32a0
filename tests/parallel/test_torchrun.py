"""Strategies by `torchrun -m mmlab train`, as users start it; `ddp` is in test_faults.py, with a rank that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mmlab.runs.events import read_events
from tests.configs import BUDGET_RUN


@pytest.mark.parametrize("strategy", ["fsdp", "branch"])
def test_two_ranks_train_and_save(strategy: str, scenes: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"name = 'small'\n{BUDGET_RUN}num_epochs = 1\n".format(scenes=scenes))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "mmlab", "train", str(config), "--runs", str(tmp_path)]
    command += ["--set", f"parallel.strategy={strategy}"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, printed = started.communicate(timeout=200)
        assert started.returncode == 0, printed
    finally:
        started.terminate()  # torchrun ends its ranks too
        started.wait(60)
    losses = []
    for rank in range(2):
        events, _ = read_events(tmp_path / "small" / f"events-rank{rank}.jsonl")
        assert events[-1].kind == "end"
        assert events[-1].values["status"] == "done"
        losses.append([event.values["loss"] for event in events if event.kind == "step"])
    assert losses[0]
    assert losses[0] == losses[1], "a step's loss is that of all samples"
    [checkpoint] = (tmp_path / "small" / "checkpoints").iterdir()
    assert (checkpoint / "shards").exists() == (strategy == "fsdp")
