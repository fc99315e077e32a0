"""Recognise out-of-memory errors, release memory, and retry.

torch raises `OutOfMemoryError` for its own allocators; errors of the system's allocator, cuBLAS and cuDNN
have no type of their own and are recognised by their messages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from mmlab.errors import RunError

Result = TypeVar("Result")

_WITHOUT_TYPE = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_TRIES = 3


def out_of_memory_in(work: Callable[[], object]) -> str | None:
    """Call `work`; returns the first line of its error if memory ran out, None if it succeeded.

    When this returns, the error and all tensors that its traceback held have been freed.
    """
    try:
        work()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    except RuntimeError as error:  # a RunError may quote such a message
        if isinstance(error, RunError) or not any(text in str(error) for text in _WITHOUT_TYPE):
            raise
        return str(error).splitlines()[0]
    return None


def release_memory(device: torch.device) -> None:
    """Free unused memory: reference cycles, and the blocks that torch's allocator keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def retried(
    work: Callable[[], Result], device: torch.device, on_failure: Callable[[str], object] | None = None
) -> Result:
    """What `work` returns; if memory runs out, it is released and `work` called again, three times in all.

    Args:
        work: can be called again after it failed.
        on_failure: called with the error's first line each time.

    Raises:
        RunError: memory ran out every time.
    """
    results: list[Result] = []
    for _ in range(_TRIES):
        failure = out_of_memory_in(lambda: results.append(work()))
        if failure is None:
            return results[0]
        release_memory(device)
        if on_failure is not None:
            on_failure(failure)
    raise RunError(
        f"out of memory {_TRIES} times with nothing left to release ({failure}); "
        "use a smaller model, another optimizer, or a device with more memory"
    )
