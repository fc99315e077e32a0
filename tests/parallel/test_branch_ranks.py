"""A branch each on two processes: loss and gradient of one process, checkpoints of one, failures of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmlab.comparison.config import load_config
from mmlab.comparison.train import train
from mmlab.errors import OptionError
from mmlab.parallel.branch import BranchStrategy
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.runs.events import read_events
from mmlab.training.checkpoint.files import read_checkpoint
from tests.batches import make_batch
from tests.configs import BUDGET_RUN
from tests.parallel import ranks_branch
from tests.parallel.ranks_branch import SIZES, build, trainer_of
from tests.ranks import run_ranks

CONFIG = f"""{BUDGET_RUN}
objectives = ["contrastive", "matching"]
accumulation_steps = 2
eval_every = 3
[parallel]
strategy = "branch"
"""


def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    run_ranks(ranks_branch.main, 2)


def test_one_process_is_refused():
    with pytest.raises(OptionError, match=r"branch takes two ranks.*found 1; start with torchrun"):
        BranchStrategy(ParallelOptions(strategy="branch")).check(scales=False, splits=False, compiles=False)


def begin(path: Path, name: str) -> None:
    """The first epoch, in one process or as one of two ranks."""
    config = load_config(path, [f"name={name}", "trainer.num_epochs=1"])
    train(config, runs=path.parent, progress=False)


def test_a_run_on_two_ranks_is_that_of_one_process_and_goes_on_in_one(scenes: Path, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(scenes=scenes))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: more add in another order
    try:
        run_ranks(begin, 2, path, "apart", joins=False)
        begin(path, "together")
        for name in ("apart", "together"):
            config = load_config(path, [f"name={name}", "trainer.num_epochs=2"])
            result = train(config, runs=tmp_path, resume="auto", progress=False)
            assert result.num_epochs == 2
            assert result.resumed_from
    finally:
        torch.set_num_threads(before)
    found, expected = (
        read_checkpoint(sorted((tmp_path / name / "checkpoints").iterdir())[-1])
        for name in ("apart", "together")
    )
    assert found["progress"] == expected["progress"]
    assert all(torch.equal(found["model"][name], weight) for name, weight in expected["model"].items())
    both = []
    for rank in range(2):
        events, _ = read_events(tmp_path / "apart" / f"events-rank{rank}.jsonl")
        both.append([event.values["loss"] for event in events if event.kind == "step"])
    assert both[1]
    assert both[1] == both[0][: len(both[1])]


def test_in_one_process_the_strategy_changes_nothing():
    batches = [make_batch(SIZES)]
    branch, plain = (
        trainer_of(build(), **options) for options in ({"strategy": make_strategy("branch")}, {})
    )
    assert branch.train_step(batches)["loss"] == plain.train_step(batches)["loss"]
