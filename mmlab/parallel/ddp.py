"""Gradients summed by torch's DistributedDataParallel while the backward pass still runs.

Only the last micro-batch's pass of a window is handed to it, and of that only the roots of the graph: losses and
negatives may use weights outside the model's `forward`. Every trained weight is made part of that graph, so that
its bucket is sent whether or not this rank used it; what no rank used is told apart by a hook on each weight, and has
no gradient afterwards, as in a single process.

A rank that fails within such a pass leaves the others waiting in it. So it goes on to the end of the reduction with
whatever it has (`drain_reduction`), then says so, and all do the window again, without overlap.

Costs: one more set of gradients, the buckets, while micro-batches are accumulated; a call into Python for each weight
and backward pass. The reduction ends in a mean, so the losses are multiplied by the number of ranks.
Running statistics of batch normalisation stay each rank's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mmlab.errors import OptionError
from mmlab.machine import device_limit
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.strategies import CollectiveFailed, ParallelOptions, ReduceStrategy, Roots
from mmlab.parallel.torch_internals import finish_reduction

NEAR_LIMIT = 0.9  # of the device's memory: from here on a step is likely enough to fail
_CAREFUL_STEPS = 100  # after one that ran out of memory, where nothing predicts it


class DDPStrategy(ReduceStrategy):
    """The strategy `ddp`."""

    def __init__(self, options: ParallelOptions, ranks: ProcessGroup, device: torch.device) -> None:
        super().__init__(options, ranks, device)
        self.scale = float(ranks.world_size)
        self._used: set[int] = set()
        self._armed = False  # the reduction waits for every weight
        self._careful_until = 0
        self._limit_bytes: int | None = None

    def prepare(self, model: nn.Module) -> None:
        """Wrap the trained weights; a collective.

        Raises:
            OptionError: the ranks' models differ.
        """
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        # under its old name in torch before 2.14
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        no_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {no_buffers: False, "bucket_cap_mb": self.options.bucket_mb}
        try:
            self._ddp = DistributedDataParallel(
                _Reduced(model, self._weights), gradient_as_bucket_view=True, **options
            )
        except RuntimeError as error:
            raise OptionError(
                f"the ranks' models differ, or cannot be trained by ddp: {' '.join(str(error).split())}"
            ) from error
        self._settle_buckets()
        for index, weight in enumerate(self._weights):
            weight.register_post_accumulate_grad_hook(partial(self._note, index))
        self._compress()

    def should_overlap(self, predicted_bytes: float | None, step: int) -> bool:
        self._used.clear()
        self._armed = False
        if self.ranks.world_size == 1:
            return False
        if self.options.overlap == "always":
            return True
        if predicted_bytes is None:
            return step >= self._careful_until
        if self._limit_bytes is None:
            self._limit_bytes = device_limit(self.device)
        return predicted_bytes <= NEAR_LIMIT * self._limit_bytes

    def run(self, work: Callable[[], Roots], *, reduce: bool) -> Roots:
        loss, taught = work()
        if reduce:
            taught = [*taught, (self._ddp(), None)]
            self._armed = True
        return loss, taught

    def drain_reduction(self, problem: Exception | None) -> None:
        try:
            if not self._armed:
                self._ddp().backward()
            else:
                for weight in self._weights:
                    self._touch(weight)
            finish_reduction(self._ddp)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise CollectiveFailed(
                f"rank {self.ranks.rank} failed inside the reduction of gradients, which cannot be taken up again: "
                f"{problem or error}; resume from the last checkpoint, with strategy='reduce' if memory ran out there"
            ) from error

    def extra_stats(self) -> list[float]:
        return [float(index in self._used) for index in range(len(self._weights))]

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        for weight, num_ranks in zip(self._weights, sums, strict=False):  # none without overlap
            if not num_ranks:
                weight.grad = None

    def be_careful(self, step: int) -> None:
        self._careful_until = step + _CAREFUL_STEPS

    def _settle_buckets(self) -> None:
        """Torch orders the buckets anew after the first backward pass, as it met the weights there; and the order of
        the additions, of three ranks or more, depends on it. So that a resumed run adds as the first did, let that be
        once, before the first step, and always the reverse of the model's order."""
        self._ddp()
        for weight in reversed(self._weights):
            self._touch(weight)
        self._ddp().backward()
        for weight in self._weights:
            weight.grad = None

    def _note(self, index: int, weight: Tensor) -> None:
        if weight.grad is not None:  # also called for those that only the reduction reached
            self._used.add(index)

    def _touch(self, weight: nn.Parameter) -> None:
        """Count a weight as done, unless it was."""
        try:
            _Reached.apply(weight).backward()
        except RuntimeError as error:
            if "ready only once" not in str(error):
                raise

    def _compress(self) -> None:
        if self.options.compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self.options.powersgd_rank,
                start_powerSGD_iter=self.options.powersgd_start,
            )
            hook: Any = powerSGD_hook.powerSGD_hook
            self._ddp.register_comm_hook(state, lambda state, bucket: hook(state, _WithoutScalars(bucket)))
        elif self.options.compression != "none":
            hooks: dict[str, Any] = {
                "fp16": default_hooks.fp16_compress_hook,
                "bf16": default_hooks.bf16_compress_hook,
            }
            self._ddp.register_comm_hook(None, hooks[self.options.compression])


class _WithoutScalars:
    """A bucket whose gradients all have a dimension, without which torch's PowerSGD fails."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[Tensor]:
        return [gradient if gradient.dim() else gradient.view(1) for gradient in self._bucket.gradients()]


class _Reduced(nn.Module):
    """What DistributedDataParallel sees of a model: its weights, and a root of the graph that reaches them all."""

    def __init__(self, model: nn.Module, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model = model
        self._weights = [*weights]

    def forward(self) -> Tensor:
        return _Reached.apply(*self._weights)


class _Reached(torch.autograd.Function):
    """Zero, as a function of weights that says nothing of their gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.num_weights
