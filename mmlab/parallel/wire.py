"""Tensors from one rank to another: a message of fixed size that describes them, then the bytes of each.

Batches differ in shape, so the receiver learns from the description what follows. Tensors keep their order in memory,
because rounding depends on it (features of a ResNet are stored channel by channel). Sending does not block: the sender
goes on with its next micro-batch.
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
            shared group both ranks would wait for each other.
        ranks: all ranks; tensors are on its device, and it measures how long this rank waits.
    """

    def __init__(self, peer: int, group: Any, ranks: ProcessGroup) -> None:
        self.peer, self.device = peer, ranks.device
        self._group, self._ranks = group, ranks
        self._sent: list[tuple[Any, Tensor]] = []  # work in progress and the bytes that it reads

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start to send tensors; None stays None."""
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
        """Wait for the peer's tensors; those that wanted a gradient there are leaves that want one here.

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
        """Send a message that nothing more comes, in the place of what the peer waits for."""
        self._start(None)

    def wait(self) -> None:
        """Until the peer has received everything."""
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
            # NCCL returns at once, and the wait would count as the next kernel's
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        return message

    def _rebuilt(
        self, shape: Sequence[int], dtype: torch.dtype, order: list[int], wants_gradient: bool
    ) -> Tensor:
        stored = self._take(torch.empty(shape, dtype=dtype, device=self.device))
        return stored.permute([order.index(dim) for dim in range(len(order))]).requires_grad_(wants_gradient)
