"""What the ranks of a data-parallel run say to each other: sums of counts, one verdict, rows, the sum of the gradients.

Built on `torch.distributed`, started by `torchrun`; a single process needs none of it and pays nothing. Gradients are
reduced once a step, after the last backward pass, in flat buckets: no collective runs while a step may still run out
of memory on one rank, so that ranks can agree before they go on. The price is that communication does not overlap
with the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from mmlab.errors import RunError
from mmlab.parallel.faults import broke_off, current_watch
from mmlab.training.out_of_memory import retried

_BUCKET_BYTES = 32 * 2**20
_NUM_TIMED = 10  # exchanges that tell what one costs
Result = TypeVar("Result")


class ProcessGroup:
    """The process group of a run, or a lone process.

    Every method but `note`, `one_hot_by_rank` and `waiting` is a collective: all ranks call it, in the same order.

    Args:
        alone: this process has nothing to say to the others, though there may be some.
        group: some of the processes, this one among them, numbered from 0; None takes all.
    """

    def __init__(self, *, alone: bool = False, group: Any = None) -> None:
        joined = not alone and distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank(group) if joined else 0
        self.world_size = distributed.get_world_size(group) if joined else 1
        self._group = group
        self._met_s, self._num_met = 0.0, 0  # in short exchanges since the step began
        self._cost_s: float | None = None  # of one, when nobody is late

    def note(self, step: int, doing: str) -> None:
        """Where this rank is, for the others to know should they wait for it; see `mmlab.parallel.faults`."""
        if (watch := current_watch()) is not None:
            watch.note(step, doing)

    def begin_step(self, device: torch.device) -> None:
        """Count the waiting from here. A collective the first time: it learns what a short exchange costs."""
        if self.world_size > 1 and self._cost_s is None:
            costs_s = []
            for _ in range(_NUM_TIMED):
                self._met_s = 0.0
                self.largest(0, device)
                costs_s.append(self._met_s)
            self._cost_s = median(costs_s)
        self._met_s, self._num_met = 0.0, 0

    @property
    def waited_s(self) -> float:
        """Seconds in the step's short exchanges beyond what they cost when nobody is late, and in `waiting`."""
        return max(0.0, self._met_s - self._num_met * (self._cost_s or 0.0))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for what another rank sends: counted in whole, and that rank is named if it fails."""
        started = time.perf_counter()
        with _exchange():
            yield
        self._met_s += time.perf_counter() - started

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Each number summed over the ranks, in double precision."""
        return (
            self._reduced(numbers, device, distributed.ReduceOp.SUM) if self.world_size > 1 else list(numbers)
        )

    def largest(self, number: float, device: torch.device) -> float:
        """The largest of the ranks' numbers."""
        return self.largest_of([number], device)[0]

    def largest_of(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The same of several numbers, each by itself."""
        if self.world_size == 1:
            return list(numbers)
        return self._reduced(numbers, device, distributed.ReduceOp.MAX)

    def one_hot_by_rank(self, number: float) -> list[float]:
        """This rank's number among zeros, (world_size,): summed over the ranks, that of each."""
        return [number if rank == self.rank else 0.0 for rank in range(self.world_size)]

    def raise_if_any_failed(self, problem: Exception | None, device: torch.device, doing: str) -> None:
        """Go on only if no rank has a problem.

        Raises:
            RunError: another rank has one, and it is named; this rank's own is raised as it is.
        """
        watch = current_watch()
        if problem is not None and watch is not None and not broke_off(problem):
            watch.say(problem)
        failed = self.largest(0 if problem is None else self.rank + 1, device)
        if problem is not None:
            raise problem
        if failed:
            rank = round(failed) - 1
            words = "" if watch is None else watch.words_of(rank)
            raise RunError(f"rank {rank} could not do {doing}: {words or 'its own error says why'}")

    def gather_objects(self, work: Callable[[], Result], doing: str) -> list[Result]:
        """What `work` returns on every rank, by rank; small things that can be pickled.

        Args:
            doing: what it does, for the error: "save a checkpoint".

        Raises:
            RunError: it failed on some ranks, and they are named; on every rank. A lone process has its own error.
        """
        if self.world_size == 1:
            return [work()]
        found, problem = None, None
        try:
            found = work()
        except Exception as error:
            problem = error
        words = None if problem is None else f"{type(problem).__name__}: {problem}"
        answers: list[Any] = [None] * self.world_size
        with _exchange():
            distributed.all_gather_object(answers, (found, words), group=self._group)
        failures = [
            f"rank {rank} could not {doing}: {words}" for rank, (_, words) in enumerate(answers) if words
        ]
        if failures:
            raise RunError("; ".join(failures)) from problem
        return [found for found, _ in answers]

    def run_on_main(self, work: Callable[[], Result], doing: str) -> Result:
        """What `work` returns on rank 0, which alone does it; see `gather_objects`."""
        return self.gather_objects(lambda: work() if self.rank == 0 else None, doing)[0]  # type: ignore[return-value]

    def gather(self, rows: torch.Tensor, into: torch.Tensor, device: torch.device) -> None:
        """Every rank's rows (N, ...), one rank after the other, into a tensor of (world_size x N, ...)."""
        with _exchange():
            retried(lambda: distributed.all_gather_into_tensor(into, rows, group=self._group), device)

    def add_gradients(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Replace every gradient by its sum over the ranks; one that no rank has stays None."""
        if self.world_size == 1:
            return
        there = self._reduced(
            [weight.grad is not None for weight in parameters], device, distributed.ReduceOp.MAX
        )
        for weight, has_gradient in zip(parameters, there, strict=True):
            if has_gradient and weight.grad is None:
                weight.grad = retried(partial(torch.zeros_like, weight), device)
        for bucket in _buckets([weight.grad for weight in parameters if weight.grad is not None]):
            self._add(bucket, device)

    def _add(self, bucket: Sequence[torch.Tensor], device: torch.device) -> None:
        flat = retried(lambda: torch.cat([gradient.flatten() for gradient in bucket]), device)
        with _exchange():
            retried(lambda: distributed.all_reduce(flat, group=self._group), device)

        def copy_back() -> None:
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

        retried(copy_back, device)

    def _reduced(
        self, numbers: Sequence[float], device: torch.device, operation: distributed.ReduceOp.RedOpType
    ) -> list[float]:
        values = retried(lambda: torch.tensor(numbers, dtype=torch.float64, device=device), device)
        if device.type == "cuda":  # what it still has to do is this rank's own time
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        with _exchange():
            retried(lambda: distributed.all_reduce(values, op=operation, group=self._group), device)
            found = retried(values.tolist, device)
        self._met_s += time.perf_counter() - started
        self._num_met += 1
        return found


def _exchange() -> AbstractContextManager[None]:
    watch = current_watch()
    return nullcontext() if watch is None else watch.exchange()


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one type together, about 32 MiB a bucket."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for gradient in sorted(gradients, key=lambda gradient: str(gradient.dtype)):
        if not buckets or room < gradient.nbytes or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= gradient.nbytes
    return buckets
