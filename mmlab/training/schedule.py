"""The schedule of the learning rate."""

from __future__ import annotations

import math


def warmup_cosine(step: float, total_steps: int | None, warmup_ratio: float) -> float:
    """Factor on the learning rate at a step: linear warm-up, then a cosine to zero at `total_steps`; 1 without one.

    >>> [round(warmup_cosine(step, 10, 0.2), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if total_steps is None:
        return 1.0
    num_warmup = math.ceil(warmup_ratio * total_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))
