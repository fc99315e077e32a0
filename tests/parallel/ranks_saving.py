"""Called on several ranks: what they share out all of them save, and any number of ranks reads."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import distributed

from mmlab.errors import RunError
from mmlab.runs.meters import LiveBytes
from mmlab.training.checkpoint.keeping import Checkpoints
from tests.parallel.ranks_data_parallel import window
from tests.parallel.ranks_sharded import sharded, whole
from tests.training.test_out_of_memory import make_trainer

LITTLE_BYTES = 20_000  # of a disk that is nearly full


def whole_state(trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Weights by name, and of each the optimizer's state; all of it on every rank."""
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    state = {
        f"{names[weight]}.{key}": value
        for weight, values in trainer.optimizer.state.items()
        for key, value in values.items()
    }
    parts = {"model": trainer.model.state_dict(), "optimizer": state}
    return {part: {name: whole(each) for name, each in found.items()} for part, found in parts.items()}


def num_bytes(state: dict[str, dict[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())


def is_same(found, expected) -> bool:
    return all(
        found[part].keys() == expected[part].keys()
        and all(torch.equal(found[part][name], tensor) for name, tensor in expected[part].items())
        for part in expected
    )


def save(folder: Path) -> None:
    """Two checkpoints, and beside each the whole state as one file."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    trainer, checkpoints = sharded(), Checkpoints(folder)
    for _ in range(3):
        trainer.train_step(window(rank))
        everything = whole_state(trainer)
        if rank == 0:
            torch.save(everything, folder.with_name(f"step-{trainer.step}.pt"))
        if trainer.step == 3:  # only to be gone on to
            return
        state, limit_bytes = trainer.state_dict(), num_bytes(everything) / world_size
        with LiveBytes().add(trainer.model, trainer.optimizer) as live:
            before_bytes = live.current_bytes
            assert before_bytes < 1.2 * limit_bytes
            checkpoints.save(state, ranks=trainer.strategy)
        assert live.peak_bytes - before_bytes < limit_bytes


def load(folder: Path, step: int) -> None:
    """The newest, which is to be of the step given."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    expected = torch.load(folder.with_name(f"step-{step}.pt"), weights_only=True)
    trainer, events = sharded(), []
    checkpoints = Checkpoints(folder, emit=events.append)
    with LiveBytes().add(trainer.model) as live:
        before_bytes = live.current_bytes
        assert checkpoints.restore(trainer) == folder / f"{step:06d}-step-{step}"
    assert live.peak_bytes - before_bytes < 1.5 * num_bytes(expected) / world_size
    assert len(events) == 2 - step  # of those that are damaged
    assert trainer.step == step
    assert is_same(whole_state(trainer), expected)
    plain = make_trainer(parallel="ddp")
    checkpoints.restore(plain)
    assert is_same(whole_state(plain), expected)
    if world_size == 2:  # as it was saved: bitwise the same run
        trainer.train_step(window(rank))
        following = torch.load(folder.with_name(f"step-{step + 1}.pt"), weights_only=True)
        assert is_same(whole_state(trainer), following)


def fail(folder: Path) -> None:
    """Where first one rank, then the other, cannot write."""
    rank = distributed.get_rank()
    trainer, checkpoints = sharded(), Checkpoints(folder)
    trainer.train_step(window(rank))
    checkpoints.save(trainer.state_dict(), ranks=trainer.strategy)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(folder.rglob("*"))

    def nothing_is_left() -> bool:
        """Asked once all have given up, of rank 0, without which nobody begins anew."""
        distributed.barrier()
        return rank > 0 or sorted(folder.rglob("*")) == before

    for failed_ranks in (0, 1):
        if rank == failed_ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE_BYTES, limits[1]))
        with pytest.raises(
            RunError, match=rf"^rank {failed_ranks} could not write its shares.*File too large"
        ):
            checkpoints.save(trainer.state_dict(), ranks=trainer.strategy)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert nothing_is_left()
    state = trainer.state_dict()
    state["progress"]["epoch"] = object()  # which rank 0 alone writes
    with pytest.raises(RunError, match=r"^rank 0 failed to save a checkpoint: TypeError.*serializable"):
        checkpoints.save(state, ranks=trainer.strategy)
    assert nothing_is_left()
    checkpoints.save(trainer.state_dict(), ranks=trainer.strategy)
    assert checkpoints.newest() == folder / "000002-step-1"
