"""On two ranks: gradients of compiled code, reduced, are those of one process that compiles nothing."""

from __future__ import annotations

import torch
from torch import distributed

from tests.parallel.ranks_data_parallel import (
    Matched,
    alone,
    by_weight,
    every_rank_has_the_same_weights,
    largest,
    window,
)
from tests.training.test_out_of_memory import make_trainer
from tests.training.test_trainer import PairDistance


def same_gradient(rank: int, world_size: int) -> None:
    """Unequal batches and windows, in which some weights have no part."""
    options = {"objectives": {"distance": PairDistance(), "matched": Matched()}, "dtype": torch.float64}
    trainer = make_trainer(compile="aot_eager", **options)
    single = alone(**options)
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
    assert trainer._call.num_variants > 0  # it was compiled
    assert trainer.strategy.is_armed  # and overlapped
    every_rank_has_the_same_weights(trainer)
    if rank == 0:
        print(f"compiled, {world_size} ranks: {difference:.1e}")


def main() -> None:
    same_gradient(distributed.get_rank(), distributed.get_world_size())
