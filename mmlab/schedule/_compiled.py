"""numba's `njit` with its machine code kept on disk, so that only the first run on a machine compiles (seconds)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile; anew in each run if neither the package's folder nor the user's cache folder is writable."""
    try:
        return numba.njit(function, cache=True, nogil=True, **options)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(function, nogil=True, **options)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile into the callers: a call in a hot loop costs tens of nanoseconds for every array that it is given."""
    return compiled(function, inline="always")
