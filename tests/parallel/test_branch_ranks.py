"""A branch each on two processes or more: loss and gradient of one process, checkpoints of one, failures of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmlab.comparison.config import load_config
from mmlab.comparison.train import train, train_on
from mmlab.errors import OptionError
from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.parallel.branches.branch_ranks import BranchRanks
from mmlab.runs.events import read_events
from mmlab.training.checkpoint.files import read_checkpoint
from mmlab.training.fusion_trainer import FusionTrainer
from tests.configs import TINY_MODEL
from tests.parallel import ranks_sharing_images, two_ranks_of_branches
from tests.parallel.test_branches import build
from tests.ranks import run_ranks

CONFIG = (
    """
[data]
path = "{scenes}"
image = "aspect:32"
num_workers = 0
"""
    + TINY_MODEL
    + """[scheduler]
name = "budget"
budget = 400
[trainer]
objectives = ["contrastive", "matching"]
accumulation_steps = 2
eval_every = 3
device = "cpu"
[parallel]
strategy = "branch"
"""
)


def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    run_ranks(two_ranks_of_branches.main, 2)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_that_share_the_images_have_the_gradient_of_one_process(num_ranks: int):
    run_ranks(ranks_sharing_images.main, num_ranks)


def test_a_run_on_three_ranks_follows_that_of_one_process(scenes: Path, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(scenes=scenes))
    for name, begin, options in (
        ("shared", train_on, {"num_processes": 3}),
        ("alone", train, {"progress": False}),
    ):
        begin(load_config(path, [f"name={name}", "trainer.num_epochs=1"]), runs=tmp_path, **options)
    losses = []
    for name in ("shared", "alone"):
        events, _ = read_events(tmp_path / name / "events-rank0.jsonl")
        losses.append([event.values["loss"] for event in events if event.kind == "step"])
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_one_process_is_refused():
    with pytest.raises(OptionError, match=r"branches take two ranks.*found 1; start with torchrun"):
        BranchRanks(build())


def test_a_run_on_two_ranks_is_that_of_one_process_and_goes_on_in_one(scenes: Path, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(scenes=scenes))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: more add in another order
    try:
        for name, begin in (("apart", train_on), ("together", train)):
            options = {"num_processes": 2} if begin is train_on else {"progress": False}
            begin(load_config(path, [f"name={name}", "trainer.num_epochs=1"]), runs=tmp_path, **options)
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


def test_in_one_process_the_branches_run_side_by_side():
    trainer = FusionTrainer(build(), device="cpu", parallel="branch")
    assert isinstance(trainer.model, BranchParallel)
    assert FusionTrainer(trainer.model, device="cpu", parallel="branch").model is trainer.model
