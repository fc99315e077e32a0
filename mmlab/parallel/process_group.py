"""`ProcessGroup`: what the ranks of a run exchange: sums and maxima of numbers, small objects, gradients.

Built on `torch.distributed`; a single process exchanges nothing, at no cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from mmlab.errors import RunError
from mmlab.parallel.faults import RankWatch
from mmlab.parallel.torch_internals import in_buckets
from mmlab.training.out_of_memory import retried
from mmlab.training.strategy import CollectiveFailed

Result = TypeVar("Result")
# at most as many bytes of gradients in a message, and of memory for it: a small message costs as much as a big one
_BUCKET_BYTES = 4 << 20


class ProcessGroup:
    """The process group of a run, or a single process.

    Every method except `note`, `begin_step` and `waiting` is a collective: all ranks call it, in the same
    order.

    Args:
        device: on which numbers are exchanged: a GPU for NCCL.

    Attributes:
        waited_s: seconds waited since the step began, in short exchanges and for what other ranks send.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        joined = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if joined else 0
        self.world_size = distributed.get_world_size() if joined else 1
        self.device = torch.device(device)
        self.waited_s = 0.0

    def note(self, step: int, doing: str) -> None:
        """Record what this rank does, for ranks that wait for it; see `mmlab.parallel.faults`."""
        if RankWatch.current is not None:
            RankWatch.current.note(step, doing)

    def begin_step(self) -> None:
        """Measure waiting from here."""
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The context to exchange numbers or wait for a rank in; its errors name the rank that failed."""
        if self.device.type == "cuda":  # work that is still queued is this rank's own time
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        with _exchange():
            yield
        self.waited_s += time.perf_counter() - started

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over the ranks, in double precision."""
        return self._reduced(numbers, distributed.ReduceOp.SUM)

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return self.largest_of([number])[0]

    def largest_of(self, numbers: Sequence[float]) -> list[float]:
        """The same for several numbers, each by itself."""
        return self._reduced(numbers, distributed.ReduceOp.MAX)

    def raise_if_any_failed(self, problem: Exception | None, doing: str) -> None:
        """Return only if no rank has a problem.

        Raises:
            RunError: another rank has one; the message names it. This rank's own problem is raised unchanged.
        """

        def work() -> None:
            if problem is not None:
                raise problem

        if self.largest(problem is not None):
            try:
                self.gather_objects(work, f"do {doing}")
            except RunError as failures:
                raise problem or failures from None

    def gather_objects(self, work: Callable[[], Result], doing: str) -> list[Result]:
        """What `work` returns on every rank, by rank; small picklable objects.

        Args:
            doing: what `work` does, for the error: "save a checkpoint".

        Raises:
            RunError: it failed on some ranks, which the message names; raised on every rank. A single process
                raises its own error.
            CollectiveFailed: an exchange inside `work` failed; the other ranks are left waiting.
        """
        if self.world_size == 1:
            return [work()]
        found, problem, words = None, None, ""
        try:
            found = work()
        except CollectiveFailed:  # the others wait in that exchange, and would take this one for it
            raise
        except Exception as error:
            problem, words = error, f"{type(error).__name__}: {error}"
        answers: list[Any] = [None] * self.world_size
        with _exchange():
            distributed.all_gather_object(answers, (found, words))
        told = [f"rank {rank} failed to {doing}: {words}" for rank, (_, words) in enumerate(answers) if words]
        if told:
            raise RunError("; ".join(told)) from problem
        return [found for found, _ in answers]

    def run_on_main(self, work: Callable[[], Result], doing: str) -> Result:
        """What `work` returns on rank 0, the only rank that calls it; see `gather_objects`."""
        return self.gather_objects(lambda: work() if self.rank == 0 else None, doing)[0]  # type: ignore[return-value]

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; one that no rank has stays None.

        Called after the last backward pass: no collective runs while a step may still run out of memory on one rank.
        """
        if self.world_size == 1:
            return
        there = self.largest_of([weight.grad is not None for weight in parameters])
        gradients: list[Tensor] = []
        for weight, has_gradient in zip(parameters, there, strict=True):
            if has_gradient and weight.grad is None:
                weight.grad = retried(partial(torch.zeros_like, weight), self.device)
            if weight.grad is not None:
                gradients.append(weight.grad)
        with _exchange():
            for bucket in in_buckets(gradients, _BUCKET_BYTES):
                flat = retried(partial(torch.cat, [gradient.reshape(-1) for gradient in bucket]), self.device)
                retried(partial(distributed.all_reduce, flat), self.device)
                parts = flat.split([gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

    def _reduced(self, numbers: Sequence[float], operation: distributed.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return list(numbers)
        values = retried(lambda: torch.tensor(numbers, dtype=torch.float64, device=self.device), self.device)
        with self.waiting():
            retried(lambda: distributed.all_reduce(values, op=operation), self.device)
            return retried(values.tolist, self.device)


def _exchange() -> AbstractContextManager[None]:
    return nullcontext() if RankWatch.current is None else RankWatch.current.exchange()
