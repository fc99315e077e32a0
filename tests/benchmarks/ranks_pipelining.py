"""On two ranks: torch's pipeline of both branches, which the benchmark of branches compares with ours."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from torch import distributed

from mmlab.errors import OptionError
from mmlab.training.strategy import Strategy
from tests.batches import make_batch
from tests.parallel.ranks_branch import GOALS, build, gradients_of, trainer_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _branch_pipelining import PipelinedBranches


def main() -> None:
    rank = distributed.get_rank()
    whole = make_batch([(9, 32, 32), (4, 16, 32), (7, 32, 16), (3, 32, 32)] * 2, seed=7)
    parts = [whole.part(slice(start, start + 4)) for start in (0, 4)]
    trainer = trainer_of(build(), ["contrastive"], max_grad_norm=math.inf, strategy=Strategy())
    expected, values = gradients_of(trainer.model, trainer.optimizer, lambda: trainer.train_step(parts))
    for schedule in ("gpipe", "1f1b"):
        model = build()
        pipeline = PipelinedBranches(
            model, num_micro_batches=2, schedule=schedule, objectives={"contrastive": GOALS["contrastive"]}
        )
        loss = pipeline.step(whole)
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert found
        assert found.keys() <= expected.keys()
        largest = max(float((found[name] - expected[name]).abs().max()) for name in found)
        assert largest < 1e-6, (schedule, largest)
        assert loss is None if rank == 0 else math.isclose(loss, values["loss"], rel_tol=1e-5)
    with pytest.raises(OptionError, match="3 samples cannot be cut into 2 equal micro-batches"):
        pipeline.step(whole.part(slice(0, 3)))
