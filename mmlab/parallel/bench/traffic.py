"""What a step sends and how long its device works: counted in a step of its own, never guessed.

`Traffic` sees every collective on its way through torch's dispatcher, whoever issued it: Python, or the C++ reducer of
DistributedDataParallel. `written_bytes` is the system's own count of what this process wrote, sockets included, and
checks it. Both cost a few microseconds an operation, so they stand in no timed step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmlab.parallel.scaling.links import ring

_IO = Path("/proc/self/io")
# operation of torch's c10d -> collective, and which of its tensors is the whole: the larger of the first two arguments
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "all_reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "all_reduce": "all_reduce",  # and of its functional form
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes of their tensors inside the context, in this thread and its backward passes.

    Attributes:
        num_calls, num_bytes: by collective; the bytes are those of the whole tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: dict[str, int] = {}
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = _COLLECTIVES.get(func.__name__.split(".")[0])
            if name is not None:
                self.num_calls[name] = self.num_calls.get(name, 0) + 1
                whole = max(sum(tensor.nbytes for tensor in _tensors(item)) for item in args[:2])
                if func.namespace == "_c10d_functional" and name == "all_gather":
                    whole *= args[1]  # it is given one rank's part, and the number of ranks
                self.num_bytes[name] = self.num_bytes.get(name, 0) + whole
        return func(*args, **(kwargs or {}))

    def sent_bytes(self, num_ranks: int) -> float:
        """What each rank sends for it, if every collective goes round a ring."""
        return sum(
            ring(name, size, num_ranks)[1]
            if name in ("all_reduce", "all_gather", "reduce_scatter")
            else float(size)
            for name, size in self.num_bytes.items()
        )


def written_bytes() -> int | None:
    """Bytes that this process has written to files and sockets since it began; None where the system does not tell."""
    try:
        fields = dict(line.split(": ") for line in _IO.read_text().splitlines())
    except OSError:
        return None
    return int(fields["wchar"])


def kernel_ratio(spans: Sequence[tuple[float, float]], wall: float) -> float:
    """Share of the time that at least one of the spans (start, end) covers.

    >>> kernel_ratio([(0, 2), (1, 3), (5, 6)], 10)
    0.4
    """
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return min(1.0, busy / wall)


def kernel_spans(profile: Any) -> list[tuple[float, float]]:
    """Start and end, in microseconds, of the kernels on a GPU that compute; those of NCCL wait for other ranks."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in event.name.lower()
    ]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)
