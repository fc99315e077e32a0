"""Two functions at once in two threads of one process, each as if it had been called here.

torch keeps grad mode, autocast and the number of intra-op threads for each thread, so the helper thread is given those
of the caller. Autocast is set without its context: leaving the context in one thread would clear the cache of cast
weights for both. One helper thread a process is made at the first use; a forked child makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_AUTOCAST = ("cpu", "cuda")
_helper: ThreadPoolExecutor | None = None


def side_by_side(
    first: Callable[[], Any], second: Callable[[], Any], *, num_threads: int | None = None
) -> tuple[Any, Any]:
    """Call `first` in this thread and `second` in the helper, and wait for both, also where one raises.

    >>> side_by_side(lambda: 1, lambda: 2)
    (1, 2)

    Args:
        num_threads: intra-op threads of each meanwhile; None shares this thread's evenly.

    Raises:
        Exception: whatever `first` raised, else whatever `second` did.
    """
    global _helper
    _helper = _helper or ThreadPoolExecutor(1, thread_name_prefix="mmlab-branch")
    share = num_threads or max(1, torch.get_num_threads() // 2)
    mode = _Mode()

    def helped() -> Any:
        _use_threads(share)
        with mode.here():
            return second()

    with _intra_op_threads(share):
        future = _helper.submit(helped)
        try:
            found = first()
        finally:
            wait([future])
    return found, future.result()


def is_watched() -> bool:
    """Whether this thread has something on that sees each operation, such as `LiveBytes`: a helper would escape it."""
    return bool(
        _get_current_dispatch_mode_stack()
        or _get_current_function_mode_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
    )


class _Mode:
    """This thread's grad mode and autocast, to be had in another thread."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST
        ]
        self.cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def here(self) -> Iterator[None]:
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        try:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                yield
        finally:
            for kind in _AUTOCAST:
                torch.set_autocast_enabled(kind, False)


@contextmanager
def _intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    _use_threads(number)
    try:
        yield
    finally:
        _use_threads(before)


def _use_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _forget() -> None:
    global _helper
    _helper = None


os.register_at_fork(after_in_child=_forget)
