"""What makes pricing cheap in tests: a small preset, and prices that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import nn

from mmlab.model.presets import PRESETS, ModelConfig
from mmlab.pricing.fingerprint import fingerprint

SPECK = ModelConfig(
    image="vit",
    image_dim=64,
    image_depth=1,
    text_dim=64,
    text_depth=1,
    head_dim=32,
    embed_dim=32,
    hidden_dim=64,
)


@contextmanager
def speck(**changes: Any) -> Iterator[str]:
    """The name of a preset that is there for the tests only: half the operations of `tiny`, and a fraction of the work.

    Args:
        changes: fields of `ModelConfig`.
    """
    with patch.dict(PRESETS, speck=replace(SPECK, **changes)):
        yield "speck"


@contextmanager
def priced_once(*places: str) -> Iterator[None]:
    """Each of these functions prices a model once for each setting, and gives the same price again.

    What bounds the batches that are measured (`cost`, `budget`) does not count: it is no part of what is measured.

    Args:
        places: full names, as `mmlab.comparison.sizing.fit_memory`.
    """
    kept: dict[Any, Any] = {}

    def once(name: str, fit: Callable[..., Any]) -> Callable[..., Any]:
        def price(model: nn.Module, *sizes: Any, **options: Any) -> Any:
            setting = {key: value for key, value in options.items() if isinstance(value, str | bool | int)}
            key = (name, fingerprint(model), tuple(sorted(setting.items())))
            if key not in kept:
                kept[key] = fit(model, *sizes, **options)
            return kept[key]

        return price

    with ExitStack() as stack:
        for place in places:
            module, _, name = place.rpartition(".")
            fit = getattr(import_module(module), name)
            stack.enter_context(patch(place, once(name, fit)))
        yield
