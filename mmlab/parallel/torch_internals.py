"""What this package needs of torch that torch does not make public; `tests/parallel/test_torch_internals.py` tries each."""

from __future__ import annotations

from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def default_store() -> distributed.Store:
    """The store of the default process group, over a connection of its own: the group's is held while it waits."""
    store: distributed.Store = distributed.distributed_c10d._get_default_store().clone()
    return store


def finish_reduction(model: DistributedDataParallel) -> None:
    """Raise RuntimeError unless the reduction of the last backward pass is complete."""
    model._check_reducer_finalized()
