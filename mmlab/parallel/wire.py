"""Tensors from one rank to another: a header with their shapes, then their bytes in one message.

Batches differ in shape, so the receiver learns from a header of fixed size what follows. Tensors keep their order in
memory, because rounding depends on it (features of a ResNet are stored channel by channel). Sending does not block: the
sender goes on with its next micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed

from mmlab.parallel.process_group import ProcessGroup

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)
_MAX_TENSORS, _MAX_DIMS, _ALIGNED_BYTES = 3, 4, 16
# type (negative if a gradient is wanted), number of dimensions, sizes, order in memory
_PER_TENSOR = 2 + 2 * _MAX_DIMS
_GAVE_UP = -1


class PeerFailed(Exception):
    """The other rank gave up on this step; its own error says why."""


class Wire:
    """One direction between two ranks; both construct it.

    Args:
        group: of the two ranks, for this direction alone: NCCL keeps the messages of a group in one order, and with a
            shared group both ranks would wait for each other.
        device: where this rank's tensors are.
        ranks: measures how long this rank waits.
    """

    def __init__(self, peer: int, group: Any, device: torch.device, ranks: ProcessGroup) -> None:
        self.peer, self.device = peer, device
        self._group, self._ranks = group, ranks
        self._sent: list[tuple[Any, Tensor]] = []  # work in progress and the bytes that it reads
        self.num_bytes = 0  # sent so far

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Start to send tensors of at most four dimensions; None stays None."""
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        header = [len(tensors), *(number for tensor in tensors for number in _described(tensor))]
        header += [0] * (1 + _MAX_TENSORS * _PER_TENSOR - len(header))
        parts = [_bytes_of(tensor) for tensor in tensors if tensor is not None]
        # both messages are made before one is sent: a header announces bytes that must come
        messages = [torch.tensor(header, device=self.device), *([torch.cat(parts)] if parts else [])]
        for message in messages:
            self._begin(message)

    def receive(self) -> list[Tensor | None]:
        """Wait for the peer's tensors; those that wanted a gradient there are leaves that want one here.

        Raises:
            PeerFailed: the other rank gave up.
        """
        header = torch.empty(1 + _MAX_TENSORS * _PER_TENSOR, dtype=torch.int64, device=self.device)
        self._take(header)
        number, *rest = header.tolist()
        if number == _GAVE_UP:
            raise PeerFailed
        expected = [rest[place * _PER_TENSOR : (place + 1) * _PER_TENSOR] for place in range(number)]
        sizes = [_padded(_num_bytes(found)) for found in expected]
        if not any(code for code, *_ in expected):
            return [None] * number
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._take(buffer)
        return [_rebuilt(found, part) for found, part in zip(expected, buffer.split(sizes), strict=True)]

    def give_up(self) -> None:
        """Send a message that nothing more comes, in the place of what the peer waits for."""
        self._begin(torch.tensor([_GAVE_UP] + [0] * _MAX_TENSORS * _PER_TENSOR, device=self.device))

    def wait(self) -> None:
        """Until the peer has received everything."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _take(self, message: Tensor) -> None:
        with self._ranks.waiting():
            distributed.recv(message, self.peer, group=self._group)
            if (
                self.device.type == "cuda"
            ):  # NCCL returns at once, and the wait would count as the next kernel's
                torch.cuda.current_stream(self.device).synchronize()

    def _begin(self, message: Tensor) -> None:
        self._sent.append((distributed.isend(message, self.peer, group=self._group), message))
        self.num_bytes += message.nbytes


def _described(tensor: Tensor | None) -> list[int]:
    """A tensor's part of the header; zeros for None."""
    if tensor is None:
        return [0] * _PER_TENSOR
    code = _DTYPES.index(tensor.dtype) + 1
    rest = [0] * (_MAX_DIMS - tensor.dim())
    code = -code if tensor.requires_grad else code
    return [code, tensor.dim(), *tensor.shape, *rest, *_order(tensor), *rest]


def _order(tensor: Tensor) -> list[int]:
    """Dimensions by their stride, the longest first."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _num_bytes(described: Sequence[int]) -> int:
    code, num_dims, *sizes = described
    return prod(sizes[:num_dims]) * _DTYPES[abs(code) - 1].itemsize if code else 0


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().permute(_order(tensor)).contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, _padded(flat.numel()) - flat.numel()))


def _rebuilt(described: Sequence[int], part: Tensor) -> Tensor | None:
    code, num_dims, *rest = described
    if not code:
        return None
    sizes, order = rest[:num_dims], rest[_MAX_DIMS : _MAX_DIMS + num_dims]
    flat = part[: _num_bytes(described)].view(_DTYPES[abs(code) - 1])
    values = flat.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(num_dims)])
    return values.requires_grad_() if code < 0 else values
