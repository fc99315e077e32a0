"""A device with little memory, for tests and benchmarks on a CPU: real tensors, counted, with a limit.

`VirtualDevice` runs a step for real and raises torch's own `OutOfMemoryError` at the operation that would cross the
limit, as a GPU's allocator does, or at one chosen beforehand. So every path through out-of-memory can be
tested without a GPU. It does not imitate fragmentation or scratch memory inside an operation.
"""

from __future__ import annotations

from typing import Any

import torch

from mmlab.pricing.torch_internals import schema_of
from mmlab.runs.meters import LiveBytes

_LIKE_CUDA = "CUDA out of memory. (virtual device)"  # other libraries look for the first words


class VirtualDevice(LiveBytes):
    """Counts live bytes and runs out of memory.

    >>> with VirtualDevice(limit_bytes=900) as device:
    ...     a = torch.zeros(200)
    ...     b = torch.zeros(200)
    Traceback (most recent call last):
    torch.OutOfMemoryError: CUDA out of memory. (virtual device) aten.zeros.default needs 800 bytes, 800 of 900 are used

    Args:
        limit_bytes: memory of the device; None sets no limit.
        fail_at: number of the operation, counted from 0 over the device's life, that fails once instead of
            running; if that one allocates no memory, the next that does.

    Attributes:
        num_operations: operations seen so far.
        num_failures: how often it ran out of memory.
    """

    def __init__(self, *, limit_bytes: int | None = None, fail_at: int | None = None) -> None:
        super().__init__()
        self.limit_bytes, self.fail_at = limit_bytes, fail_at
        self.num_operations = self.num_failures = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self.num_operations = self.num_operations, self.num_operations + 1
        if self.fail_at is not None and number >= self.fail_at and _asks_for_memory(func):
            self.fail_at, self.num_failures = None, self.num_failures + 1
            raise torch.OutOfMemoryError(f"{_LIKE_CUDA} {func} was chosen to fail")
        before_bytes, peak_bytes = self.current_bytes, self.peak_bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.limit_bytes is not None and self.current_bytes > max(self.limit_bytes, before_bytes):
            added_bytes = self.current_bytes - before_bytes
            del out
            self.peak_bytes = peak_bytes  # a real device would never have had this memory in use
            self.num_failures += 1
            alone = "; weights and batch alone do not fit" if before_bytes > self.limit_bytes else ""
            raise torch.OutOfMemoryError(
                f"{_LIKE_CUDA} {func} needs {added_bytes} bytes, {before_bytes} of {self.limit_bytes} are used{alone}"
            )
        return out


def _asks_for_memory(func: Any) -> bool:
    """Whether an operation allocates: not if it only reads, returns a view, or writes to existing memory."""
    schema = schema_of(func)
    in_place = schema.name.endswith("_") or schema.overload_name == "out"
    return not (in_place or func.is_view or schema.name.startswith(("aten::_local_scalar", "profiler::")))
