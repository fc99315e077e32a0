"""Random draws of branches that run at once: which branch draws, and a generator of its own for each.

The CPU has one generator for all threads. Where one branch draws (dropout in the text encoder, as in the presets), it
draws from that one, in the order of a plain model: the same masks. Where both draw, the order would depend on the
threads, so each gets a generator of its own, seeded from the common one at the start of its forward pass: the same
seed gives the same masks again, though others than the plain model's.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_LOCK = threading.Lock()


class OwnDraws(TorchDispatchMode):
    """Within, every draw of this thread comes from a generator of its own. Costs some 10 us an operation.

    >>> def drawn(seed):
    ...     with OwnDraws(seed):
    ...         return torch.rand(2)
    >>> bool((drawn(1) == drawn(1)).all())
    True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": self.generator})
        with _LOCK:  # an operation that knows the common generator only: it is lent this one's state
            common = torch.default_generator
            state = common.get_state()
            common.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(common.get_state())
                common.set_state(state)


def draws(module: nn.Module) -> bool:
    """Whether a module has dropout, or anything of that name, above zero. Other draws are not found here."""
    return any(_has_dropout(part) for part in module.modules())


def keeps_generator(module: nn.Module) -> bool:
    """Whether a part is checkpointed in the way that sets the common generator back in the backward pass."""
    names = ("gradient_checkpointing", "activation_checkpointing")  # what transformers sets in a layer
    return any(vars(part).get(name) for part in module.modules() for name in names)


def _has_dropout(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    held = vars(part)
    return any(
        "drop" in name and isinstance(value, int | float) and value > 0 for name, value in held.items()
    )
