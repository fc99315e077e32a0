"""The private parts of torch that this package needs; `tests/parallel/test_torch_internals.py` tests each."""

from __future__ import annotations

from torch import distributed
from torch._utils import _take_tensors
from torch.nn.parallel import DistributedDataParallel

in_buckets = _take_tensors  # groups of tensors of one type, in order, each up to so many bytes


def default_store() -> distributed.Store:
    """The default process group's store, over its own connection: the group's is blocked while it waits."""
    store: distributed.Store = distributed.distributed_c10d._get_default_store().clone()
    return store


def finish_reduction(model: DistributedDataParallel) -> None:
    """Raise RuntimeError unless the reduction of the last backward pass is complete."""
    model._check_reducer_finalized()
