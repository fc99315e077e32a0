"""On two ranks: gradients of compiled code, reduced, are those of one process that compiles nothing.

The encoders are of a layer each, since every variant is compiled on both ranks; the model around them is the usual one.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters

from mmlab.model.fusion_model import FusionModel
from mmlab.parallel.strategies import make_strategy
from mmlab.training.loop import FusionTrainer
from mmlab.training.strategy import Strategy
from tests.parallel.ranks_data_parallel import (
    Matched,
    by_weight,
    every_rank_has_the_same_weights,
    largest,
    window,
)
from tests.training.test_trainer import PairDistance


class Rows(nn.Module):
    """An image encoder: rows of pixels, by their mean colours."""

    dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, self.dim)

    def forward(self, pixels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(pixels.mean(3).transpose(1, 2)).tanh(), mask.any(2)


class Words(nn.Module):
    """A text encoder: tokens by themselves."""

    dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(50, self.dim))
        self.layer = nn.Linear(self.dim, self.dim)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.layer(self.embedding[ids]).tanh()


def make_trainer(strategy: Strategy, **options) -> FusionTrainer:
    torch.manual_seed(0)
    model = FusionModel(Rows(), Words(), embed_dim=16, hidden_dim=32, num_heads=2).double()
    objectives = {"distance": PairDistance(), "matched": Matched()}
    return FusionTrainer(model, device="cpu", objectives=objectives, strategy=strategy, **options)


def same_gradient(rank: int, world_size: int) -> None:
    """Unequal batches and windows, in which some weights have no part."""
    trainer = make_trainer(make_strategy("ddp"), compile="aot_eager")
    single = make_trainer(Strategy())
    every = [batch for other in range(world_size) for batch in window(other)]
    for _ in range(2):  # buckets are ordered anew after the first
        found, values = by_weight(trainer, window(rank))
        expected, whole = by_weight(single, every)
        for name, one in expected.items():
            assert (one is None) == (found[name] is None), name
        names = [name for name, one in expected.items() if one is not None]
        norm, apart = (
            torch.cat([tensor.flatten() for tensor in tensors]).norm()
            for tensors in (
                [expected[name] for name in names],
                [found[name] - expected[name] for name in names],
            )
        )
        difference = largest(float(apart / norm))
        assert difference <= 1e-12, difference
        assert abs(values["loss"] - whole["loss"]) <= 1e-12 * abs(whole["loss"])
    assert counters["stats"]["unique_graphs"] > 0  # it was compiled
    assert trainer.strategy.reduction_started  # and overlapped
    every_rank_has_the_same_weights(trainer)
    if rank == 0:
        print(f"compiled, {world_size} ranks: {difference:.1e}")


def main() -> None:
    same_gradient(distributed.get_rank(), distributed.get_world_size())
