"""A plugin of `make notebooks`: a kernel that dies while it starts is started again, twice at most.

jupyter_client finds free ports for a kernel, which binds them a moment later: another process may have them by then. What
happens in a kernel that has started is not touched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import nbval.kernel

_start = nbval.kernel.start_new_kernel


def start_new_kernel(*args: Any, **options: Any) -> Any:
    """As nbval's own, with two more attempts."""
    for _ in range(2):
        with suppress(RuntimeError):  # "Kernel died before replying to kernel_info"
            return _start(*args, **options)
    return _start(*args, **options)


nbval.kernel.start_new_kernel = start_new_kernel
