"""What is used of torch though it is not public still does what is expected of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from mmlab.parallel.torch_internals import default_store, finish_reduction, in_buckets


@pytest.fixture
def lone_group() -> Iterator[distributed.Store]:
    """A process group of this process alone; gives its store."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    distributed.destroy_process_group()


def test_the_groups_store_keeps_what_others_read(lone_group: distributed.Store) -> None:
    default_store().set("key", "value")
    assert default_store().get("key") == b"value"


def test_buckets_have_one_type_and_hold_every_tensor_once_in_order() -> None:
    single, half = (
        [torch.zeros(size, dtype=dtype) for size in (3, 9, 3)] for dtype in (torch.float32, torch.float16)
    )
    found = list(in_buckets([single[0], half[0], *single[1:], *half[1:]], 48))
    assert [[len(tensor) for tensor in bucket] for bucket in found] == [[3, 9], [3], [3, 9, 3]]
    assert [{tensor.dtype for tensor in bucket} for bucket in found] == [{torch.float32}] * 2 + [
        {torch.float16}
    ]


def test_a_reduction_that_misses_a_weight_is_not_complete(lone_group: distributed.Store) -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, number: int) -> torch.Tensor:
            return sum(layer(torch.ones(1, 2)).sum() for layer in self.layers[:number])

    model = torch.nn.parallel.DistributedDataParallel(Model())
    model(2).backward()
    finish_reduction(model)
    model(1).backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        finish_reduction(model)
