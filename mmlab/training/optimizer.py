"""AdamW whose step can be called again after it ran out of memory half-way.

An optimizer that failed between two of its parameter groups, or while it made its state, has changed some weights and
not others; calling it again would change the first ones twice. `RestartableAdamW` goes on where it stopped. Costs one
copy of a scalar a group and step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class RestartableAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused, with a step that either is done, or can be called again to finish it."""

    _num_done = 0  # parameter groups that the step in hand has updated

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every group that this step has not updated yet.

        Raises:
            torch.OutOfMemoryError: memory ran out; the weights of a group are all updated or none is.
        """
        groups, loss = self.param_groups, None
        try:
            while self._num_done < len(groups):
                self.param_groups = groups[self._num_done : self._num_done + 1]
                loss = self._step_group(closure)
                self._num_done += 1
        finally:
            self.param_groups = groups
        self._num_done = 0
        return loss

    def _step_group(self, closure: Callable[[], float] | None) -> Any:
        weights = [weight for weight in self.param_groups[0]["params"] if weight.grad is not None]
        known = [weight for weight in weights if weight in self.state]
        before = self.state[known[0]]["step"].clone() if known else None
        try:
            return _PLAIN_STEP(self, closure)
        except torch.OutOfMemoryError:
            for weight in set(weights) - set(known):
                self.state.pop(weight, None)
            if before is not None and not torch.equal(self.state[known[0]]["step"], before):
                torch._foreach_sub_([self.state[weight]["step"] for weight in known], 1.0)
            raise


# without the wrapper that torch puts round it once any AdamW exists, which would run the step's hooks for every group
_step = torch.optim.AdamW.step
_PLAIN_STEP = _step.__wrapped__ if getattr(_step, "hooked", False) else _step  # type: ignore[attr-defined]


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
