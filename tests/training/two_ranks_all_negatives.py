"""On two ranks: a contrastive loss over both has one process's gradient with the joined batches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import distributed

from mmlab.errors import RunError
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.types import Batch
from tests.batches import make_batch, merge
from tests.training.test_out_of_memory import gradient, make_trainer, relative, weights

SIZES = [
    [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 0, 0), (5, 16, 64)],  # rank 0: one text without an image
    [(7, 48, 48), (0, 32, 16), (2, 32, 16)],  # rank 1: fewer, one image without a text
    [(3, 16, 32), (4, 32, 32)],
    [(5, 32, 32), (2, 16, 16)],  # captions of one image: their negatives are all on the other rank
    [(6, 16, 16), (3, 16, 16), (2, 16, 32)],  # rank 0 has a third micro-batch, rank 1 none
]
GROUPS = [[10, 11, 12, 13, -1], [11, 21, -1], [30, 31], [30, 30], [40, 41, 40]]  # 11 and 30 are on both ranks


def micro_batch(number: int) -> Batch:
    batch = make_batch(SIZES[number], seed=number)
    sample_weights = torch.linspace(0.5, 1.5, len(batch))
    return dataclasses.replace(batch, groups=torch.tensor(GROUPS[number]), weights=sample_weights)


def joined(*batches: Batch) -> Batch:
    assert all(batch.weights is not None for batch in batches)
    return dataclasses.replace(merge(list(batches)), weights=torch.cat([batch.weights for batch in batches]))


WINDOWS = [[micro_batch(0), micro_batch(2), micro_batch(4)], [micro_batch(1), micro_batch(3)]]
JOINED = [joined(micro_batch(0), micro_batch(1)), joined(micro_batch(2), micro_batch(3)), micro_batch(4)]


def same_gradient(rank: int) -> None:
    """Both ranks' gradient against one process's, whose trainer knows no other rank."""
    cases = [
        ({}, torch.float64, 1e-12, False),
        ({}, torch.float64, 1e-12, True),  # rank 1 alone runs out of memory, and both do it again
        ({}, torch.float32, 1e-6, True),
        ({"num_negatives": 7}, torch.float64, 1e-12, False),
    ]
    for options, dtype, tolerance, cut in cases:
        goal = Contrastive(all_ranks=True, **options)
        device = VirtualDevice(fail_at=200) if cut and rank == 1 else None
        trainer = make_trainer(device, objectives={"contrastive": goal}, dtype=dtype)
        found, values = gradient(trainer, WINDOWS[rank])
        assert values["num_parts"] == (2 if cut and rank == 1 else 1)
        alone = make_trainer(objectives={"contrastive": Contrastive(**options)}, dtype=dtype)
        alone.ranks.rank, alone.ranks.world_size = 0, 1
        expected, whole = gradient(alone, JOINED)
        difference = relative(found, expected)
        assert difference <= tolerance, (options, dtype, difference)
        assert math.isclose(values["contrastive_loss"], whole["contrastive_loss"], rel_tol=1e-6)
        print(f"difference {rank} {dtype} parts {values['num_parts']}: {difference:.2e}")


def one_micro_batch_differs_from_local_negatives(rank: int) -> None:
    both, local = (
        gradient(make_trainer(objectives={"contrastive": Contrastive(all_ranks=wide)}), [WINDOWS[rank][0]])[0]
        for wide in (True, False)
    )
    assert relative(local, both) > 0.01


def goes_on_whichever_operation_fails(rank: int) -> None:
    """Beside objectives of one rank's own, and under fp16's scaler."""
    objectives = {
        "contrastive": Contrastive(all_ranks=True),
        "matching": Matching(),
    }

    def updated(fail_at: int | None, precision: str) -> tuple[VirtualDevice, object]:
        device = VirtualDevice()
        # any operation may fail here, also one of the reduction's own, which asks for no memory
        trainer = make_trainer(device, objectives=objectives, precision=precision, parallel="reduce")
        trainer.precision.scaler._init_scale = 64.0
        device.num_operations, device.fail_at = 0, fail_at if rank == 1 else None
        trainer.train_step(WINDOWS[rank])
        return device, trainer

    for precision, num_failures in (("fp32", 4), ("fp16", 1)):
        updated(None, precision)
        device, trainer = updated(None, precision)
        start, expected = weights(make_trainer(objectives=objectives)), weights(trainer)
        count = torch.tensor(device.num_operations)
        distributed.broadcast(count, src=1)
        for fail_at in range(int(count) // (2 * num_failures), int(count), int(count) // num_failures):
            device, trainer = updated(fail_at, precision)
            assert device.num_failures == rank, fail_at
            assert relative(weights(trainer) - start, expected - start) < 0.05, fail_at


class Broken:
    """An objective that fails on one rank, when it counts or when it is computed."""

    def __init__(self, where: str, rank: int):
        self.where = where if rank == 1 else ""

    def count(self, batch):
        if self.where == "count":
            raise KeyError("broken")
        return len(batch)

    def __call__(self, output, batch):
        if self.where == "loss":
            raise KeyError("broken")
        return output.image_embedding.sum()


def all_raise_when_one_gives_up(rank: int) -> None:
    for where in ("count", "loss"):
        goals = {"contrastive": Contrastive(all_ranks=True), "broken": Broken(where, rank)}
        trainer = make_trainer(objectives=goals)
        before = weights(trainer)
        error, message = (KeyError, "broken") if rank == 1 else (RunError, "rank 1 could not do step 0")
        with pytest.raises(error, match=message):
            trainer.train_step(WINDOWS[rank])
        assert (weights(trainer) == before).all()

    device = VirtualDevice()
    trainer = make_trainer(device, objectives={"contrastive": Contrastive(all_ranks=True)})
    device.limit_bytes = device.current_bytes + 50_000 if rank == 1 else None
    message = "does not fit into memory by itself" if rank == 1 else "rank 1 could not do step 0"
    with pytest.raises(RunError, match=message):
        trainer.train_step([micro_batch(0)] if rank == 0 else [make_batch([(3, 48, 32)])])


def main() -> None:
    rank = distributed.get_rank()
    same_gradient(rank)
    one_micro_batch_differs_from_local_negatives(rank)
    goes_on_whichever_operation_fails(rank)
    all_raise_when_one_gives_up(rank)
