"""On two ranks: a contrastive loss over both has one process's gradient with the joined batches."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from torch import distributed

from mmlab.errors import OptionError
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.strategy import CollectiveFailed, Strategy
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
    warnings.simplefilter("error", FutureWarning)
    for options, dtype, tolerance in (
        ({}, torch.float64, 1e-12),
        ({}, torch.float32, 1e-6),
        ({"num_negatives": 7}, torch.float64, 1e-12),
    ):
        goal = Contrastive(all_ranks=True, **options)
        found, values = gradient(make_trainer(objectives={"contrastive": goal}, dtype=dtype), WINDOWS[rank])
        alone = make_trainer(
            objectives={"contrastive": Contrastive(**options)}, dtype=dtype, strategy=Strategy()
        )
        expected, whole = gradient(alone, JOINED)
        difference = relative(found, expected)
        assert difference <= tolerance, (options, dtype, difference)
        assert math.isclose(values["contrastive_loss"], whole["contrastive_loss"], rel_tol=1e-6)
        print(f"difference {rank} {dtype}: {difference:.2e}")


def one_micro_batch_differs_from_local_negatives(rank: int) -> None:
    both, local = (
        gradient(make_trainer(objectives={"contrastive": Contrastive(all_ranks=wide)}), [WINDOWS[rank][0]])[0]
        for wide in (True, False)
    )
    assert relative(local, both) > 0.01


def without_a_negative_on_any_rank_the_step_is_skipped(rank: int) -> None:
    trainer = make_trainer(objectives={"contrastive": Contrastive(all_ranks=True)})
    before, batch = weights(trainer), micro_batch(rank)
    values = trainer.train_step([dataclasses.replace(batch, groups=torch.zeros_like(batch.groups))])
    assert values["skipped"]
    assert math.isnan(values["loss"])
    assert (weights(trainer) == before).all(), "weight decay alone would change them"


class Broken:
    """An objective that fails on every rank, so that none waits for another."""

    def count(self, batch):
        return len(batch)

    def __call__(self, output, batch):
        raise KeyError("broken")


def a_failure_ends_the_run(rank: int) -> None:
    with pytest.raises(OptionError, match=r"negatives from all ranks.*use on_out_of_memory='auto'"):
        make_trainer(objectives={"contrastive": Contrastive(all_ranks=True)}, on_out_of_memory="split")
    goals = {"contrastive": Contrastive(all_ranks=True), "broken": Broken()}
    trainer = make_trainer(objectives=goals)
    before = weights(trainer)
    with pytest.raises(CollectiveFailed, match=f"rank {rank} failed where the ranks gather .*broken"):
        trainer.train_step(WINDOWS[rank])
    assert (weights(trainer) == before).all()


def main() -> None:
    rank = distributed.get_rank()
    same_gradient(rank)
    one_micro_batch_differs_from_local_negatives(rank)
    without_a_negative_on_any_rank_the_step_is_skipped(rank)
    a_failure_ends_the_run(rank)
