"""torch's random generators, borrowed: inside a `with` block they are the trainer's, outside it the caller's again.

Dropout draws from torch's global generators, which cannot be replaced; so their states are swapped. Costs
some 20 us a block. Other threads that draw meanwhile also draw from the trainer's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


class RandomStream:
    """A separate stream of random numbers, which continues from one `with` block to the next.

    >>> stream = RandomStream([torch.device("cpu")])
    >>> before = torch.get_rng_state()
    >>> with stream:
    ...     stream.seed("a name")
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True

    Args:
        devices: whose generators are used; the CPU's always is.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._own: list[Tensor] | None = None
        self._callers: list[Tensor] = []

    def __enter__(self) -> RandomStream:
        self._callers = self.state()
        if self._own is not None:
            self.restore(self._own)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._own = self.state()
        self.restore(self._callers)

    def seed(self, name: str) -> None:
        """Begin the stream of this name; call it inside the `with` block."""
        key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(key)
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(key)

    def state(self) -> list[Tensor]:
        """The states of all generators."""
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def restore(self, states: Sequence[Tensor]) -> None:
        """Go back to a `state`."""
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
