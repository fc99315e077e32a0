"""On two ranks: rank 1 runs out of memory at one operation after another.

Both ranks must then have the weights of the undisturbed run, which are those of one process with all samples.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from mmlab.errors import RunError
from mmlab.pricing.virtual_device import VirtualDevice
from tests.batches import make_batch
from tests.training.test_out_of_memory import STRIDE, make_trainer, relative, weights
from tests.training.test_trainer import PairDistance  # a loss of each sample by itself

SIZES = [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32), (5, 16, 64)]


def main() -> None:
    rank = int(torch.distributed.get_rank())
    objectives = {"distance": PairDistance()}
    mine = make_batch(SIZES[:2] if rank == 0 else SIZES[2:])

    def updated(fail_at: int | None) -> tuple[VirtualDevice, object]:
        device = VirtualDevice()
        trainer = make_trainer(device, objectives=objectives, parallel="reduce")
        trainer.train_step([mine])
        device.num_operations, device.fail_at = 0, fail_at if rank == 1 else None
        trainer.train_step([mine])
        return device, trainer

    updated(None)
    device, trainer = updated(None)
    expected, start = weights(trainer), weights(make_trainer(objectives=objectives, parallel="reduce"))
    count = torch.tensor(device.num_operations)
    distributed.broadcast(count, src=1)
    for fail_at in range(int(count) % STRIDE, int(count), STRIDE):
        device, trainer = updated(fail_at)
        assert device.num_failures <= rank, fail_at
        assert relative(weights(trainer) - start, expected - start) < 0.05, fail_at

    device = VirtualDevice()
    trainer = make_trainer(device, objectives=objectives, parallel="reduce")
    device.limit_bytes = device.current_bytes + 50_000 if rank == 1 else None
    with pytest.raises(RunError, match="does not fit" if rank == 1 else "rank 1 failed to do step 0"):
        trainer.train_step([make_batch(SIZES[2:3])])
