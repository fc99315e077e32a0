"""Every scheduler covers every sample once, and its plan drives a torch DataLoader."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from mmlab.schedule import SCHEDULERS, make_scheduler
from mmlab.types import SampleSizes


@pytest.fixture
def sizes() -> SampleSizes:
    rng = np.random.default_rng(0)
    return SampleSizes(
        num_tokens=rng.integers(3, 60, 500),
        height=16 * rng.integers(4, 24, 500),
        width=16 * rng.integers(4, 24, 500),
        group=np.arange(500) // 5,
    )


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_each_epoch_has_every_sample_once(name, world_size, sizes):
    plan = make_scheduler(name, world_size=world_size).plan(sizes, epoch=1)
    assert sorted(row for batch in plan for row in batch) == list(range(500))
    assert len(plan) % world_size == 0
    assert all(plan)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_plan_is_a_batch_sampler(name, sizes):
    plan = make_scheduler(name).plan(sizes)
    loader = DataLoader(range(500), batch_sampler=plan, collate_fn=list)
    assert list(loader) == list(plan)
    assert len(loader) == len(plan)
