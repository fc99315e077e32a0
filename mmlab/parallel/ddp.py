"""`DDPStrategy`: gradients summed by torch's DistributedDataParallel while the backward pass still runs.

Only the last micro-batch's pass of a window is handed to it, and of that only a root of the graph: losses and negatives
may use weights outside the model's `forward`. The root reaches every trained weight, so that each bucket is sent whether
or not this rank used its weights; a hook on each weight notes what was used, and a weight that no rank used has no
gradient afterwards, as in a single process.

A rank that fails within such a pass would leave the others waiting in it. So it takes part in the rest of the reduction
(`drain_reduction`), then says that it failed, and all ranks run the window again, without overlap.

Costs: one more set of gradients, the buckets, while micro-batches are accumulated; a call into Python for each weight
and backward pass. The reduction ends in a mean, so the losses are multiplied by the number of ranks.
Running statistics of batch normalisation stay each rank's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from mmlab.parallel.reduce import ParallelOptions, ReduceStrategy
from mmlab.parallel.torch_internals import finish_reduction
from mmlab.training.strategy import CollectiveFailed

NEAR_LIMIT = 0.9  # of the device's memory: from here on a step is likely enough to fail
_CAREFUL_STEPS = 100  # after one that ran out of memory, where nothing predicts it


class DDPStrategy(ReduceStrategy):
    """The strategy `ddp`."""

    def __init__(self, options: ParallelOptions, group: ProcessGroup) -> None:
        super().__init__(options, group)
        self.scale = float(group.world_size)
        self._used: set[int] = set()
        self._reduces = False  # in this micro-batch's backward pass
        self.is_armed = False  # the reduction waits for every weight
        self._careful_until = 0
        self._limit_bytes: int | None = None

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Wrap the trained weights; a collective.

        Raises:
            OptionError: the model cannot be trained by DistributedDataParallel.
        """
        model = super()._prepare(model)
        # under its old name in torch before 2.14
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        no_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {no_buffers: False, "bucket_cap_mb": self.options.bucket_mb}
        try:
            self._ddp = DistributedDataParallel(
                _Reduced(model, self.weights), gradient_as_bucket_view=True, **options
            )
        except RuntimeError as error:
            raise OptionError(
                f"the model cannot be trained by ddp: {' '.join(str(error).split())}"
            ) from error
        self._settle_buckets()
        for index, weight in enumerate(self.weights):
            weight.register_post_accumulate_grad_hook(partial(self._note, index))
        self._compress()
        return model

    def should_overlap(self, predicted_bytes: float | None, step: int) -> bool:
        self._used.clear()
        self.is_armed = False
        if self.options.overlap == "always":
            return True
        if predicted_bytes is None:
            return step >= self._careful_until
        if self._limit_bytes is None:
            self._limit_bytes = device_limit(self.device)
        return predicted_bytes <= NEAR_LIMIT * self._limit_bytes

    @contextmanager
    def sync(self, *, last: bool) -> Iterator[None]:
        self._reduces = last
        try:
            yield
        finally:
            self._reduces = False

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        loss = work()
        if self._reduces:
            loss = loss + self._ddp().to(loss.dtype)
            self.is_armed = True
        return loss

    def drain_reduction(self, problem: Exception | None) -> None:
        try:
            if not self.is_armed:
                self._ddp().backward()
            else:
                for weight in self.weights:
                    self._touch(weight)
            finish_reduction(self._ddp)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise CollectiveFailed(
                f"rank {self.group.rank} failed inside the reduction of gradients, which cannot be taken up again: "
                f"{problem or error}; resume from the last checkpoint, with strategy='reduce' if memory ran out there"
            ) from error

    def extra_stats(self) -> list[float]:
        return [float(index in self._used) for index in range(len(self.weights))]

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        for weight, num_ranks in zip(self.weights, sums, strict=False):  # none without overlap
            if not num_ranks:
                weight.grad = None

    def ran_out_of_memory(self, step: int) -> None:
        self._careful_until = step + _CAREFUL_STEPS

    def _settle_buckets(self) -> None:
        """Have torch order the buckets now, by the reverse of the model's order.

        It orders them after the first backward pass, by the order in which weights got their gradients, and with three
        ranks or more rounding depends on it: a resumed run would add in another order than the first run did.
        """
        self._ddp()
        for weight in reversed(self.weights):
            self._touch(weight)
        self._ddp().backward()
        for weight in self.weights:
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
        self.weights = [*weights]

    def forward(self) -> Tensor:
        return _Reached.apply(*self.weights)


class _Reached(torch.autograd.Function):
    """Zero, as a function of weights that says nothing of their gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.num_weights
