"""From collated batches to where training wants them: pinned in host memory, or on the device.

Copies to a CUDA device run on a stream of their own, while the device computes; `arrive` lets the current stream wait
for them, which costs the processor nothing.
"""

from __future__ import annotations

import torch

from mmlab.types import Batch


class Copier:
    """Pins batches and copies them to a device.

    Args:
        pin: page-lock the host's batch first; a copy to a GPU is asynchronous only from there.
        device: where batches go; None leaves them in host memory.
    """

    def __init__(self, *, pin: bool, device: torch.device | str | None = None) -> None:
        self.pin = pin
        self.device = None if device is None else torch.device(device)
        on_gpu = self.device is not None and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None

    @property
    def has_work(self) -> bool:
        """Whether batches are changed at all."""
        return self.pin or self.device is not None

    def __call__(self, batch: Batch) -> Batch:
        """The batch, pinned and on its way to the device; for any thread."""
        if self.pin and not batch.pixel_values.is_pinned():
            batch = batch.pin_memory()
        if self.device is None:
            return batch
        with torch.cuda.stream(self._stream):  # does nothing where there is no stream
            return batch.to(self.device, non_blocking=True)

    def arrive(self, batch: Batch) -> None:
        """Let the current stream wait for the copies; for the thread that trains."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in batch.tensors():
            tensor.record_stream(current)  # keep the memory until the current stream is done with it
