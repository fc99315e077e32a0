"""Tensors from one rank to another: a header that tells their shapes, then their bytes in one message.

Batches differ in shape, so the receiver cannot know what comes; the header of 41 numbers says it. Tensors keep their
order in memory, on which rounding depends (features of a ResNet lie channel by channel). Sending does not wait: the
sender goes on with its next micro-batch. Features and gradients each have a process group of their own, since on NCCL
messages of one group between two ranks keep one order, in which both ranks would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mmlab.parallel.process_group import ProcessGroup

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64)
_MOST_TENSORS, _MOST_DIMS, _ALIGNED_BYTES = 4, 4, 16
_PER_TENSOR = (
    2 + 2 * _MOST_DIMS
)  # type and whether it asks for a gradient, number of dimensions, sizes, their order
_GAVE_UP = -1


class PeerFailed(Exception):
    """The other rank gave up on this step; its own error says why."""


class Wire:
    """One direction between this rank and another; both make it.

    Args:
        peer: the other rank.
        group: of processes, for this direction between the two alone.
        device: where this rank's tensors are.
        ranks: counts what this one waits.
    """

    def __init__(self, peer: int, group: Any, device: torch.device, ranks: ProcessGroup) -> None:
        self.peer, self.device, self._ranks = peer, device, ranks
        self._group = group
        self._sent: list[tuple[Any, Tensor]] = []  # work in progress and the bytes that it reads
        self.num_bytes = 0  # sent so far

    def send(self, tensors: Sequence[Tensor | None]) -> None:
        """Begin to send tensors of four dimensions at most; None stays None."""
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        header = [len(tensors)]
        for tensor in tensors:
            header += _described(tensor)
        header += [0] * (1 + _MOST_TENSORS * _PER_TENSOR - len(header))
        parts = [_bytes_of(tensor) for tensor in tensors if tensor is not None]
        messages = [torch.tensor(header, device=self.device), *([torch.cat(parts)] if parts else [])]
        for message in messages:  # all made before one leaves: a header announces what must come
            self._begin(message)

    def receive(self) -> list[Tensor | None]:
        """Wait for what the peer sends; tensors that asked for a gradient there are leaves that ask for one here.

        Raises:
            PeerFailed: the other rank gave up.
        """
        header = torch.empty(1 + _MOST_TENSORS * _PER_TENSOR, dtype=torch.int64, device=self.device)
        self._take(header)
        number, *rest = header.tolist()
        if number == _GAVE_UP:
            raise PeerFailed
        expected = [
            rest[start : start + _PER_TENSOR] for start in range(0, number * _PER_TENSOR, _PER_TENSOR)
        ]
        sizes = [_padded(_num_bytes(found)) for found in expected]
        if not any(code for code, *_ in expected):
            return [None] * number
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._take(buffer)
        return [_rebuilt(found, part) for found, part in zip(expected, buffer.split(sizes), strict=True)]

    def give_up(self) -> None:
        """Tell the peer, in the place of what it waits for, that nothing more comes."""
        self._begin(torch.tensor([_GAVE_UP] + [0] * _MOST_TENSORS * _PER_TENSOR, device=self.device))

    def wait(self) -> None:
        """Until all that was sent has been taken."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _take(self, message: Tensor) -> None:
        with self._ranks.waiting():
            distributed.recv(message, self.peer, group=self._group)
            if (
                self.device.type == "cuda"
            ):  # else the wait is the next kernel's; what is being sent may wait longer
                torch.cuda.current_stream(self.device).synchronize()

    def _begin(self, message: Tensor) -> None:
        self._sent.append((distributed.isend(message, self.peer, group=self._group), message))
        self.num_bytes += message.nbytes


def _described(tensor: Tensor | None) -> list[int]:
    """Type (from 1; negative where a gradient is wanted), number of dimensions, sizes, order; zeros for None."""
    if tensor is None:
        return [0] * _PER_TENSOR
    code = _DTYPES.index(tensor.dtype) + 1
    rest = [0] * (_MOST_DIMS - tensor.dim())
    return [
        -code if tensor.requires_grad else code, tensor.dim(), *tensor.shape, *rest, *_order(tensor), *rest
    ]  # fmt: skip


def _order(tensor: Tensor) -> list[int]:
    """Dimensions from the one whose steps are the longest in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _num_bytes(described: Sequence[int]) -> int:
    code, num_dims, *sizes = described[: 2 + _MOST_DIMS]
    if not code:
        return 0
    count = 1
    for size in sizes[:num_dims]:
        count *= size
    return count * _DTYPES[abs(code) - 1].itemsize


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().permute(_order(tensor)).contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, _padded(flat.numel()) - flat.numel()))


def _rebuilt(described: Sequence[int], part: Tensor) -> Tensor | None:
    code, num_dims, *rest = described
    if not code:
        return None
    sizes, order = rest[:num_dims], rest[_MOST_DIMS : _MOST_DIMS + num_dims]
    flat = part[: _num_bytes(described)].view(_DTYPES[abs(code) - 1])
    values = flat.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(num_dims)])
    return values.requires_grad_() if code < 0 else values
