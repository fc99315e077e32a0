"""mmlab: plan, price, train and compare image-text batches.

`import mmlab` loads neither torch nor widgets: every public name is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Batch": "types",
    "BatchShape": "types",
    "Record": "types",
    "SampleSizes": "types",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mmlab' has no attribute {name!r}")
    value = getattr(import_module(f"mmlab.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
