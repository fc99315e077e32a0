"""Send tensors from one rank to another: a message of fixed size that describes them, then the bytes of each.

Batches differ in shape, so the receiver learns from the description what follows. Tensors keep their memory
order, because rounding depends on it (features of a ResNet are stored channel by channel). Sending does not
block: the sender continues with its next micro-batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mmlab.parallel.process_group import ProcessGroup

_HEADER_BYTES = 1024


class PeerFailed(Exception):
    """The other rank gave up on this step; its own error says why."""


class Wire:
    """One direction between two ranks; both construct it.

    Args:
        group: of the two ranks, for this direction alone: NCCL keeps the messages of a group in one order, and with a
            group for both directions the ranks would wait for each other.
        ranks: the process group of all ranks; gives the device of the tensors, and measures how long this
            rank waits.
    """

    def __init__(self, peer: int, group: Any, ranks: ProcessGroup) -> None:
        self.peer, self.device = peer, ranks.device
        self._group, self._ranks = group, ranks
        self._sent: list[tuple[Any, Tensor]] = []  # sends in progress and the tensors that they read

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start sending tensors; None is received as None."""
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        described: list[Any] = [None] * len(tensors)
        messages: list[Tensor] = []
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
                messages.append(tensor.detach().permute(order).contiguous())  # the longest stride first
                described[place] = (tuple(messages[-1].shape), tensor.dtype, order, tensor.requires_grad)
        # every message is made before one is sent: the description announces bytes that must come
        self._start(described, *messages)

    def receive(self) -> list[Tensor | None]:
        """Wait for the peer's tensors; those that require a gradient there are leaves that require one here.

        Raises:
            PeerFailed: the other rank gave up.
        """
        header = self._take(torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self.device))
        # written by the peer's `_start`; pickle ignores what follows its end
        described = pickle.loads(header.cpu().numpy().tobytes())
        if described is None:
            raise PeerFailed
        return [None if each is None else self._rebuilt(*each) for each in described]

    def give_up(self) -> None:
        """Tell the peer, in place of what it waits for, that nothing more will come."""
        self._start(None)

    def wait(self) -> None:
        """Wait until the peer has received everything."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _start(self, described: Any, *messages: Tensor) -> None:
        header = bytearray(pickle.dumps(described).ljust(_HEADER_BYTES, b"\0"))
        for message in (torch.frombuffer(header, dtype=torch.uint8).to(self.device), *messages):
            self._sent.append((distributed.isend(message, self.peer, group=self._group), message))

    def _take(self, message: Tensor) -> Tensor:
        with self._ranks.waiting():
            distributed.recv(message, self.peer, group=self._group)
            # NCCL returns at once, and the wait would count as time of the next kernel
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        return message

    def _rebuilt(
        self, shape: Sequence[int], dtype: torch.dtype, order: list[int], needs_grad: bool
    ) -> Tensor:
        stored = self._take(torch.empty(shape, dtype=dtype, device=self.device))
        return stored.permute([order.index(dim) for dim in range(len(order))]).requires_grad_(needs_grad)
