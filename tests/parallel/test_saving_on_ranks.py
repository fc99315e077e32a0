"""Checkpoints that all ranks write: the same state on any ranks and in one process; damage and failures are found."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmlab.errors import DataError
from mmlab.training.checkpoint.files import read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints
from tests.parallel import ranks_saving
from tests.ranks import run_ranks
from tests.training.test_checkpoint import flip_a_bit, truncate
from tests.training.test_out_of_memory import make_trainer

SHARDS = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoints"
    run_ranks(ranks_saving.save, 2, folder)
    return folder


def copied(saved: Path, into: Path) -> Path:
    shutil.copytree(saved.parent, into, dirs_exist_ok=True)
    return into / saved.name


def expected(saved: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(saved.with_name(f"step-{step}.pt"), weights_only=True)


def test_four_ranks_read_what_two_have_written(saved):
    run_ranks(ranks_saving.load, 4, saved, 2)


def test_one_process_reads_what_two_have_written(saved):
    trainer, whole = make_trainer(), expected(saved, 2)
    path = Checkpoints(saved).restore(trainer)
    assert {file.name for file in path.iterdir()} == {"shards", "state.json", "manifest.json"}
    assert {file.name for file in (path / "shards").iterdir()} == set(SHARDS)
    assert trainer.step == 2
    state = read_checkpoint(path)
    plain = trainer.state_dict()
    for found in (state, plain):
        assert found["model"].keys() == whole["model"].keys()
        assert all(torch.equal(found["model"][name], tensor) for name, tensor in whole["model"].items())
    names = [name for group in state["optimizer"]["param_groups"] for name in group["param_names"]]
    for place, values in plain["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(value, whole["optimizer"][f"{names[place]}.{key}"])
            assert torch.equal(value, state["optimizer"]["state"][place][key])
    assert sum(map(len, plain["optimizer"]["state"].values())) == len(whole["optimizer"])


def test_shards_are_plain_safetensors_files_with_the_names_of_weights(saved):
    whole = expected(saved, 2)
    flat = {f"model.{name}": tensor for name, tensor in whole["model"].items()}
    flat |= {f"optimizer.state.{name}": tensor for name, tensor in whole["optimizer"].items()}
    sizes = Counter()
    for name in SHARDS:
        for key, tensor in load_file(saved / "000002-step-2" / "shards" / name).items():
            sizes[key] += tensor.numel()
    assert sizes == {name: tensor.numel() for name, tensor in flat.items()}


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", SHARDS)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_used(saved, tmp_path, damage, name):
    folder, trainer = copied(saved, tmp_path), make_trainer()
    damage(folder / "000002-step-2" / "shards" / name)
    with pytest.warns(
        RuntimeWarning, match=rf"000002-step-2 is damaged: shards/{name}.*checkpoint before it"
    ):
        assert Checkpoints(folder).restore(trainer) == folder / "000001-step-1"
    whole = expected(saved, 1)["model"]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trainer.model.state_dict().items())


def test_ranks_agree_on_what_is_damaged_and_go_on_bitwise(saved, tmp_path):
    folder = copied(saved, tmp_path)
    truncate(folder / "000002-step-2" / "shards" / SHARDS[1])
    run_ranks(ranks_saving.load, 2, folder, 1)


def test_a_rank_that_cannot_write_is_named_by_all_and_nothing_is_left(tmp_path):
    run_ranks(ranks_saving.fail, 2, tmp_path / "checkpoints")


def test_shards_of_another_model_are_refused(saved):
    other = make_trainer()
    other.model.text_encoder = torch.nn.Linear(2, 2)
    with pytest.raises(
        DataError, match=r"000002-step-2 is of another model: it has a weight text_encoder\S* of shape \("
    ):
        Checkpoints(saved).restore(other)
