"""On several ranks: with weights shared out, steps are those of one process with all samples."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from mmlab.errors import OptionError, RunError
from mmlab.runs.meters import LiveBytes
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Batch
from tests.batches import merge
from tests.parallel.ranks_data_parallel import WINDOWS, alone, by_weight, largest, window
from tests.training.test_out_of_memory import make_trainer
from tests.training.test_out_of_memory import window as micro_batches
from tests.training.test_trainer import PairDistance


class Matched:
    """The fusion's opinion of marked samples; all go through it, as under fsdp they must."""

    def count(self, batch: Batch) -> int:
        return len(batch) if batch.weights is not None else 0

    def __call__(self, output, batch: Batch):
        rows = torch.arange(len(batch))
        return torch.nn.functional.softplus(output.match(rows, rows)).sum() * (batch.weights is not None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(**options):
    return make_trainer(parallel="fsdp", **options)


def norm_of(tensors) -> float:
    return float(torch.cat([whole(tensor).detach().flatten().double() for tensor in tensors]).norm())


def same_steps(rank: int, world_size: int) -> None:
    goals = {"distance": PairDistance(), "matched": Matched()}
    every = [batch for other in range(world_size) for batch in window(other)]
    limits = {"image": 1e-3, "fusion": 1e-4}
    for dtype, precision, tolerance in (
        (torch.float64, "fp32", 1e-12),
        (torch.float32, "fp32", 1e-6),
        (torch.float32, "bf16", 3e-2),
    ):
        options = {"objectives": goals, "dtype": dtype, "precision": precision, "max_grad_norm": limits}
        trainer, single = sharded(**options, checkpointing=dtype == torch.float32), alone(**options)
        assert sum(not isinstance(weight, DTensor) for weight in trainer.parameters) == 1  # the temperature
        own, all_of_it = (LiveBytes().add(*each.parameters).current_bytes for each in (trainer, single))
        assert own < 1.2 * all_of_it / world_size
        # after a step Adam has made much of rounding where a gradient is near zero
        for bound in (tolerance, min(0.1, 1e3 * tolerance)):
            found, values = by_weight(trainer, window(rank))
            expected, figures = by_weight(single, every)
            for name, one in expected.items():
                assert (one is None) == (found[name] is None), name
            apart = [whole(found[name]) - one for name, one in expected.items() if one is not None]
            difference = largest(
                norm_of(apart) / norm_of(one for one in expected.values() if one is not None)
            )
            assert difference <= bound, (dtype, precision, difference)
            for key in ("grad_norm", "image_grad_norm", "fusion_grad_norm", "loss"):
                assert math.isclose(values[key], figures[key], rel_tol=max(10 * tolerance, 1e-5)), key
            if rank == 0:
                most = max(float(each.abs().max()) for each in apart)
                print(f"sharded {world_size} ranks {dtype} {precision}: {difference:.1e}, {most:.1e}")
        pairs = zip(trainer.parameters, single.parameters, strict=True)
        apart = [whole(weight) - other for weight, other in pairs]
        assert largest(norm_of(apart) / norm_of(single.parameters)) < max(1e-3, tolerance)
    evaluation(trainer, single)


def evaluation(trainer, single) -> None:
    """between two steps, of weights that are shared out."""
    found, expected = (one.evaluate(micro_batches()) for one in (trainer, single))
    assert math.isclose(found["loss"], expected["loss"], rel_tol=1e-2)
    assert not any(math.isnan(value) for value in found.values() if isinstance(value, float))


def all_negatives(rank: int, world_size: int) -> None:
    goals = {"contrastive": Contrastive(all_ranks=True)}
    windows = [
        [dataclasses.replace(batch, weights=None) for batch in window(other)] for other in range(world_size)
    ]
    numbers = [[each[place] for each in windows if place < len(each)] for place in range(3)]
    options = {
        "dtype": torch.float64,
        "max_grad_norm": math.inf,
    }  # a limit is compared in the norm's own precision
    trainer = sharded(objectives=goals, **options)
    single = alone(objectives={"contrastive": Contrastive()}, **options)
    found, _ = by_weight(trainer, windows[rank])
    expected, _ = by_weight(single, [merge(parts) for parts in numbers if parts])
    apart = [whole(found[name]) - one for name, one in expected.items() if one is not None]
    difference = largest(norm_of(apart) / norm_of(one for one in expected.values() if one is not None))
    assert difference <= 1e-12, difference


def refused() -> None:
    for options, message in (
        ({"on_out_of_memory": "split"}, "use on_out_of_memory='auto'"),
        ({"precision": "fp16"}, "fsdp has no loss scale"),
        ({"compile": True}, "use compile=False"),
    ):
        with pytest.raises(OptionError, match=message):
            make_trainer(parallel="fsdp", **options)


class Broken:
    """Fails on every rank, so that none waits for another."""

    def count(self, batch: Batch) -> int:
        return len(batch)

    def __call__(self, output, batch: Batch):
        raise KeyError("broken")


def main() -> None:
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    assert len(WINDOWS) >= world_size
    refused()
    same_steps(rank, world_size)
    all_negatives(rank, world_size)
    with pytest.raises(RunError, match=r"failed where the ranks gather weights.*broken"):
        sharded(objectives={"broken": Broken()}).train_step(window(rank))
