"""`DDPStrategy`: gradients summed by torch's DistributedDataParallel while the backward pass still runs.

DistributedDataParallel takes part only in the backward pass of a window's last micro-batch, and its `forward`
gives only an extra root of the graph, because losses and negatives may use weights outside the model's
`forward`. The root reaches every trained weight, so that each bucket is sent whether or not this rank used
its weights; a hook on each weight records which were used, and a weight that no rank used has no gradient
afterwards, as in a single process.

A rank that fails in such a pass would leave the others waiting in it. So it takes part in the rest of the
reduction (`drain_reduction`), then reports that it failed, and all ranks run the window again, without
overlap.

Costs: one more set of gradients, the buckets, while micro-batches are accumulated; a call into Python for
each weight in each backward pass. The reduction averages, so the losses are multiplied by the number of
ranks. Each rank keeps its own running statistics of batch normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmlab.errors import OptionError
from mmlab.machine import memory_limit
from mmlab.parallel.reduce import ParallelOptions, ReduceStrategy
from mmlab.parallel.torch_internals import finish_reduction
from mmlab.training.strategy import CollectiveFailed

NEAR_LIMIT = 0.9  # share of the device's memory above which a step, likely to fail, does not overlap


class DDPStrategy(ReduceStrategy):
    """The strategy `ddp`."""

    def __init__(self, options: ParallelOptions) -> None:
        super().__init__(options)
        self.scale = float(self.world_size)
        self._used: set[int] = set()
        self._reduces = False  # whether this micro-batch's backward pass reduces
        self.reduction_started = False  # whether the reduction waits for every weight

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Wrap the trained weights; a collective.

        Raises:
            OptionError: the model cannot be trained by DistributedDataParallel.
        """
        model = super()._prepare(model)
        try:
            self._ddp = DistributedDataParallel(_Reduced(self.weights), gradient_as_bucket_view=True)
        except RuntimeError as error:
            raise OptionError(f"ddp cannot train the model: {' '.join(str(error).split())}") from error
        self._settle_buckets()
        for index, weight in enumerate(self.weights):
            weight.register_post_accumulate_grad_hook(partial(self._note, index))
        return model

    @cached_property
    def _limit_bytes(self) -> int:
        return memory_limit(self.device).usable_bytes

    def should_overlap(self, predicted_bytes: float | None) -> bool:
        self._used.clear()
        self.reduction_started = False
        return predicted_bytes is None or predicted_bytes <= NEAR_LIMIT * self._limit_bytes

    def sync(self, *, last: bool) -> None:
        self._reduces = last

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        loss = work()
        if self._reduces:
            loss = loss + self._ddp().to(loss.dtype)
            self.reduction_started = True
        return loss

    def drain_reduction(self, problem: Exception | None) -> None:
        try:
            if not self.reduction_started:
                self._ddp().backward()
            else:
                for weight in self.weights:
                    self._touch(weight)
            finish_reduction(self._ddp)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise CollectiveFailed(
                f"rank {self.rank} failed inside the reduction of gradients, which cannot be resumed: "
                f"{problem or error}; resume from the last checkpoint, with strategy='reduce' if memory ran out there"
            ) from problem or error

    def extra_stats(self) -> list[float]:
        return [float(index in self._used) for index in range(len(self.weights))]

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        for weight, num_ranks in zip(self.weights, sums, strict=False):  # none without overlap
            if not num_ranks:
                weight.grad = None

    def _settle_buckets(self) -> None:
        """Make torch order the buckets now, in the reverse of the model's order.

        torch orders them after the first backward pass, by when weights got their gradients, and with three
        ranks or more rounding depends on that order: a resumed run would add in another order than the first
        run did.
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
        """Mark a weight as ready for the reduction, unless it already is."""
        try:
            _Reached.apply(weight).backward()
        except RuntimeError as error:
            if "ready only once" not in str(error):
                raise


class _Reduced(nn.Module):
    """What DistributedDataParallel sees of a model: its trained weights, and a root of the graph that reaches them all.

    Without the model's buffers: each rank keeps its own running statistics.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self) -> Tensor:
        return _Reached.apply(*self.weights)


class _Reached(torch.autograd.Function):
    """Zero, as a function of weights that adds nothing to their gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.num_weights
