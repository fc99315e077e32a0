"""A model's parameters by the part that they belong to, and as groups of an optimizer.

Parts are `image`, `text`, `fusion` and `heads`, by the names of modules; what belongs to none of the first three is a
head.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from mmlab.errors import OptionError

PARTS = ("image", "text", "fusion", "heads")
_NAMES = (
    ("fusion", re.compile(r"fusion|cross")),
    # a vision-encoder-decoder's image encoder is named just `encoder`
    ("image", re.compile(r"^(module\.)?encoder\.|image_encoder|vision|visual(?!_projection)|pixel|patch")),
    ("text", re.compile(r"text_encoder|text_model|language|embeddings|decoder|bert")),
)


def part_of(name: str) -> str:
    """The part that a parameter of this name belongs to.

    >>> part_of("image_encoder.blocks.0.norm.weight"), part_of("match_head.bias")
    ('image', 'heads')
    """
    return next((part for part, pattern in _NAMES if pattern.search(name)), "heads")


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of each part that has any."""
    parts: dict[str, list[nn.Parameter]] = {part: [] for part in PARTS}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            parts[part_of(name)].append(weight)
    return {part: weights for part, weights in parts.items() if weights}


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters.

    Raises:
        OptionError: there is none.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise OptionError(f"{type(model).__name__} has nothing to train: no parameter requires a gradient")
    return weights


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Stop training the parameters whose names match a pattern (`image_encoder.*`).

    Raises:
        OptionError: a pattern that matches nothing.
    """
    for pattern in patterns:
        weights = [weight for name, weight in model.named_parameters() if fnmatchcase(name, pattern)]
        if not weights:
            known = sorted({name.split(".")[0] + ".*" for name, _ in model.named_parameters()})
            raise OptionError(f"freeze pattern {pattern!r} matches no parameter; some are {', '.join(known)}")
        for weight in weights:
            weight.requires_grad_(False)


def warn_of_modes(model: nn.Module) -> None:
    """Warn if modules of a model in training mode are in evaluation mode, though their weights will be trained.

    Such parts compute without dropout, and batch normalisation does not learn. A frozen part is often meant so.
    """
    trained = [
        name
        for name, module in model.named_modules()
        if not module.training and any(weight.requires_grad for weight in module.parameters(recurse=False))
    ]
    if model.training and trained:
        warnings.warn(
            f"{len(trained)} modules that will be trained, first {trained[0]}, are in evaluation mode and stay in it, for "
            "instance without dropout; from_pretrained loads models so. If it is not meant, call model.train() first",
            stacklevel=4,
        )


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: `weight_decay` for weights of two or more dimensions, none for biases, norms and scalars."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decayed = [weight for weight in weights if weight.dim() > 1]
    others = [weight for weight in weights if weight.dim() <= 1]
    groups = ((decayed, weight_decay), (others, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
