"""How many bytes a training run may plan with: what a device has, less what others use now, less what is no tensor.

A memory model counts tensors. A process that trains needs memory for more than tensors: a CUDA context with its loaded
kernels, or on a CPU the interpreter and its libraries. `CONTEXT_BYTES` states it, and it is taken off beforehand. The
allocator's fragmentation and what the model misses are not taken off: the scheduler's `target_ratio` is for them.

Costs a millisecond; asking for a CUDA device's limit initialises CUDA in this process.
Does not: watch what others take later, nor count what loader workers use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mmlab.errors import OptionError
from mmlab.machine import GIB, available_memory_bytes, process_rss_bytes, total_memory_bytes

CONTEXT_BYTES = {  # by type of device; stated, not measured on the device at hand
    # the driver's context, with the kernels of cuBLAS, cuDNN and torch as they load: NVML reports 0.4-0.6 GiB with CUDA
    # 12 and 13 on GPUs since Ampere
    "cuda": 600 * 2**20,
    "cpu": 1024 * 2**20,  # Python, torch, transformers and their threads
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Memory of a device, and what of it training may use.

    >>> print(MemoryLimit(device="cuda", total_bytes=16 * GIB, others_bytes=2 * GIB, context_bytes=GIB))
    cuda: 13.0 GiB for training (16.0 GiB, less 2.0 in use by others, less 1.0 for the context)
    """

    device: str
    total_bytes: int  # of the device, or as given
    others_bytes: int  # in use now, not by this process
    context_bytes: int  # what this process needs besides tensors

    @property
    def usable_bytes(self) -> int:
        """The most that a step's live tensors may take."""
        return self.total_bytes - self.others_bytes - self.context_bytes

    def __str__(self) -> str:
        usable, total, others, context = (
            value / GIB
            for value in (self.usable_bytes, self.total_bytes, self.others_bytes, self.context_bytes)
        )
        parts = f"{total:.1f} GiB, less {others:.1f} in use by others, less {context:.1f} for the context"
        return f"{self.device}: {usable:.1f} GiB for training ({parts})"


def memory_limit(device: torch.device | str, *, memory_gb: float | None = None) -> MemoryLimit:
    """Ask a device how much memory training may use now.

    Args:
        memory_gb: plan for so many GiB (2**30 bytes) instead of the device's own. A device that is here and has less
            to give now still counts; one that is not here is taken as empty, so that a run can be planned elsewhere.

    Raises:
        OptionError: no such device, the device is not here and `memory_gb` is not given, or nothing is left for
            training.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"{device!r} is no device; known: {', '.join(CONTEXT_BYTES)}") from error
    if device.type not in CONTEXT_BYTES:
        raise OptionError(f"memory of a {device.type} device is not known; known: {', '.join(CONTEXT_BYTES)}")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise OptionError(f"the memory to plan for must be above 0 GiB, found {memory_gb}")
    given = None if memory_gb is None else round(memory_gb * GIB)
    if device.type == "cpu":
        total = total_memory_bytes()
        others = max(0, total - available_memory_bytes() - process_rss_bytes())
    elif torch.cuda.is_available():
        total, others = _cuda(device)
    elif given is None:
        raise OptionError(f"no {device} device here; give the memory to plan for (memory_gb, --memory-gb)")
    else:
        total, others = given, 0
    if given is not None and given < total:
        others = max(
            0, others - (total - given)
        )  # what others use of the part that is left out does not matter
        total = given
    limit = MemoryLimit(
        device=str(device), total_bytes=total, others_bytes=others, context_bytes=CONTEXT_BYTES[device.type]
    )
    if limit.usable_bytes <= 0:
        raise OptionError(f"{limit}: nothing is left; free the device, or give more memory")
    return limit


def device_limit(device: torch.device | str, *, memory_gb: float | None = None) -> int:
    """Bytes that a step's live tensors may take, see `memory_limit`."""
    return memory_limit(device, memory_gb=memory_gb).usable_bytes


def _cuda(device: torch.device) -> tuple[int, int]:
    """Total, and what others use; this process's own context is told from others by its stated size only."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device) + CONTEXT_BYTES["cuda"]
    return total_bytes, max(0, total_bytes - free_bytes - own_bytes)
