"""What a trainer refuses before anything begins."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmlab.errors import OptionError, unknown_name
from mmlab.model.parameters import PARTS
from mmlab.training.weighting import Weighting

NONFINITE_POLICIES = ("raise", "skip")
OUT_OF_MEMORY_POLICIES = ("auto", "split", "raise")
WEIGHTING_ON = ("training", "held_out")


def check_options(
    on_out_of_memory: str, on_nonfinite: str, max_grad_norm: float | Mapping[str, float]
) -> None:
    """Refuse names that are not known, and limits that let nothing through."""
    if on_out_of_memory not in OUT_OF_MEMORY_POLICIES:
        raise unknown_name("policy for out-of-memory", on_out_of_memory, OUT_OF_MEMORY_POLICIES)
    if on_nonfinite not in NONFINITE_POLICIES:
        raise unknown_name("policy for losses that are not finite", on_nonfinite, NONFINITE_POLICIES)
    for part in max_grad_norm if isinstance(max_grad_norm, Mapping) else ():
        if part not in PARTS:
            raise unknown_name("part of the model", part, PARTS)
    limits = max_grad_norm.values() if isinstance(max_grad_norm, Mapping) else [max_grad_norm]
    if not all(limit > 0 for limit in limits):
        raise OptionError(f"max_grad_norm must be above 0 (infinity does not clip), found {max_grad_norm}")


def check_weighting(weighting: Weighting, on: str) -> None:
    """Refuse weights that follow what there is none of."""
    if on not in WEIGHTING_ON:
        raise unknown_name("losses for the weighting", on, WEIGHTING_ON)
    if on == "held_out" and weighting.wants_norms:
        raise OptionError(
            f"{type(weighting).__name__.lower()} needs the gradients of training steps, which held-out losses have "
            "none of; use weighting_on='training', or the weighting 'trend' or 'uncertainty'"
        )


def check_ranges(**numbers: tuple[float, float, float]) -> None:
    """Each number, the least and the most that it may be."""
    for name, (number, least, most) in numbers.items():
        if not least <= number <= most:
            bounds = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
            raise OptionError(f"{name} must be {bounds}, found {number}")
