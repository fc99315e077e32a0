"""How the ranks of a run share a step: the options, and `ReduceStrategy`, on which the others are built.

========  ==================================================================================================
ddp       every rank holds the model; gradients are summed during the window's last backward pass
reduce    the same, but they are summed after it, so that no rank waits inside a pass that may yet fail
fsdp      every rank holds a share of the weights, gradients and optimizer state (`mmlab.parallel.fsdp`)
branch    two ranks see all samples: one trains the images, one texts and fusion (`mmlab.parallel.branch`)
========  ==================================================================================================

`FusionTrainer(model, strategy=make_strategy("ddp"))`. In a single process no strategy changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import distributed, nn

from mmlab.errors import OptionError, unknown_name
from mmlab.parallel.process_group import ProcessGroup
from mmlab.schedule.metrics import work
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.precision import Precision
from mmlab.training.strategy import CollectiveFailed, Strategy
from mmlab.types import PATCH, Batch

if TYPE_CHECKING:
    from mmlab.training.split import Window

STRATEGIES = ("ddp", "reduce", "fsdp", "branch")
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
OVERLAPS = ("auto", "always", "never")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of a run on several ranks; in a single process they change nothing.

    >>> ParallelOptions.parse("reduce").strategy
    'reduce'

    Args:
        strategy: a name in `STRATEGIES`.
        bucket_mb: gradients that are sent together, in MiB (`ddp`).
        compression: send gradients in 16 bits, `fp16` or `bf16`, or by `powersgd` as products of thin matrices (Vogels
            et al. 2019, arXiv:1905.13727); the gradient is then no longer exact (`ddp`).
        powersgd_rank: width of those matrices.
        powersgd_start: the first steps, which are sent whole.
        overlap: whether gradients are sent while the backward pass still runs (`ddp`). `auto` sends them afterwards
            where memory is predicted to come near its limit: a step that fails then is cheaper to run again.
        ahead: micro-batches that the image branch's ranks may be ahead of the last (`branch`, two ranks or more).
        image_layers: first blocks of the image encoder that image ranks compute, where the last rank computes the rest;
            None leaves it all to them (`branch`, two ranks or more).

    Raises:
        OptionError: an unknown name, a number out of range, or a combination that has no meaning.
    """

    strategy: str = "ddp"
    bucket_mb: float = 25.0
    compression: str = "none"
    powersgd_rank: int = 1
    powersgd_start: int = 1000
    overlap: str = "auto"
    ahead: int = 1
    image_layers: int | None = None

    def __post_init__(self) -> None:
        for what, name, known in (
            ("parallel strategy", self.strategy, STRATEGIES),
            ("gradient compression", self.compression, COMPRESSIONS),
            ("overlap", self.overlap, OVERLAPS),
        ):
            if name not in known:
                raise unknown_name(what, name, known)
        if not self.bucket_mb > 0:
            raise OptionError(f"bucket_mb must be above 0, found {self.bucket_mb}")
        for name, value, least in (
            ("powersgd_rank", self.powersgd_rank, 1),
            ("powersgd_start", self.powersgd_start, 2),
            ("ahead", self.ahead, 0),
            ("image_layers", 1 if self.image_layers is None else self.image_layers, 1),
        ):
            if value < least:
                raise OptionError(f"{name} must be at least {least}, found {value}")
        if self.image_layers is not None and self.strategy != "branch":
            raise OptionError(
                f"image_layers={self.image_layers} cuts the image branch, which strategy={self.strategy!r} leaves "
                "whole; use strategy='branch'"
            )
        if self.compression != "none" and (self.strategy != "ddp" or self.overlap == "never"):
            raise OptionError(
                f"compression={self.compression!r} is part of ddp's reduction during the backward pass, found "
                f"strategy={self.strategy!r}, overlap={self.overlap!r}; use compression='none'"
            )

    @classmethod
    def parse(cls, options: str | ParallelOptions) -> ParallelOptions:
        """Options from a strategy's name; those that exist are passed through."""
        return cls(strategy=options) if isinstance(options, str) else options


class ReduceStrategy(Strategy):
    """The strategy `reduce`: gradients are summed after the last backward pass.

    Args:
        group: the ranks.
    """

    def __init__(self, options: ParallelOptions, group: ProcessGroup) -> None:
        self.options, self.group = options, group
        self.rank = self.draw_rank = self.order_rank = group.rank
        self.world_size = self.num_shares = group.world_size
        self._most_work = 0.0  # that a rank had in this step
        self._is_packed = False

    def prepare(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        objectives: Mapping[str, Objective],
        precision: Precision,
    ) -> nn.Module:
        self.device, self._is_packed = device, getattr(model, "is_packed", False)
        self._broadcast(model)
        return self._prepare(model)

    def _prepare(self, model: nn.Module) -> nn.Module:
        """What a strategy does to the model, whose weights are alike on all ranks."""
        model = model.to(self.device)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        return model

    def _broadcast(self, model: nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0.

        Raises:
            OptionError: the ranks' models differ.
        """
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        found = self.gather_objects(lambda: shapes, "compare the models")
        for rank, other in enumerate(found):
            if other != found[0]:
                first = next(iter(set(other) ^ set(found[0])), "their order")
                raise OptionError(
                    f"the ranks' models differ: rank {rank} and rank 0 disagree on {first}; build the same model on all"
                )
        for tensor in tensors.values():
            message = tensor.detach().to(self.device).contiguous()
            distributed.broadcast(message, 0)
            tensor.data.copy_(message)

    def note(self, step: int, doing: str) -> None:
        self.group.note(step, doing)

    def begin_step(self) -> None:
        self.group.begin_step(self.device)

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self.group.sums(numbers, self.device)

    def largest(self, number: float) -> float:
        return self.group.largest(number, self.device)

    def gather_objects(self, work: Callable[[], Result], doing: str) -> list[Result]:
        return self.group.gather_objects(work, doing)

    def run_on_main(self, work: Callable[[], Result], doing: str) -> Result:
        return self.group.run_on_main(work, doing)

    def gradient(self, window: Window) -> dict[str, float]:
        counts, length, overlaps = self._exchange_counts(window)
        window.lengthen(length)
        terms, problem, stats = None, None, []
        if overlaps:
            terms, problem = self._overlapped(window, counts)
            stats = [] if terms is None else self.extra_stats()
        if terms is None:
            terms = self._reduced_afterwards(window, counts, problem)
        means = terms.means()
        sums = self.total([*(means.get(name, 0.0) for name in counts), *stats])
        self.apply_extra_stats(sums[len(counts) :])
        return {name: total for name, total in zip(counts, sums, strict=False) if counts[name]}

    def _exchange_counts(self, window: Window) -> tuple[dict[str, float], int, bool]:
        """Counts over all ranks; micro-batches that each rank must run; whether the backward pass reduces."""
        counts, equal = window.counts, self.requires_equal_steps
        wants = equal or (not window.gathers and self.should_overlap(window.predicted_bytes, window.step))
        by_rank = [
            self.group.one_hot_by_rank(number)
            for number in (self._work(window.learnable), len(window.batches))
        ]
        sums = iter(self.total([*counts.values(), not wants, *by_rank[0], *by_rank[1]]))
        totals = dict(zip(counts, islice(sums, len(counts)), strict=True))
        overlaps = not next(sums)
        self._most_work = max(islice(sums, self.world_size))
        return totals, int(max(sums)) if equal else int(overlaps), overlaps

    def _overlapped(
        self, window: Window, counts: Mapping[str, float]
    ) -> tuple[LossTerms | None, Exception | None]:
        """The window's losses, its gradient reduced in the last backward pass. None where that failed on some rank;
        and this rank's own error, which running the window again would not mend."""
        terms: LossTerms | None = None
        problem: Exception | None = None
        try:
            terms = window.attempt(counts, reduce=True)
        except CollectiveFailed:
            raise
        except Exception as error:
            problem = error
        if terms is None:
            try:
                self.drain_reduction(problem)
            except CollectiveFailed as error:
                raise error from problem
        if self.largest(terms is None):
            window.reset()
            terms = None
        return terms, problem

    def _reduced_afterwards(
        self, window: Window, counts: Mapping[str, float], problem: Exception | None
    ) -> LossTerms:
        """The window's losses, its gradient summed over the ranks once all of them are through."""
        terms = LossTerms(counts)
        try:
            if problem is None:
                terms = window.run(counts)
        except Exception as error:
            problem = error
        if window.gathers and problem is not None:
            raise CollectiveFailed(
                f"rank {self.rank} failed where the ranks gather embeddings from each other: {problem}; resume from the "
                "last checkpoint, with smaller batches if memory ran out"
            ) from problem
        self.group.raise_if_any_failed(problem, self.device, f"step {window.step}")
        self.group.add_gradients(self.weights, self.device)
        return terms

    def step_values(self, batches: Sequence[Batch]) -> dict[str, float]:
        """What the step waited for other ranks, and what it had to by the sizes of their batches."""
        by_plan = (
            {"predicted_wait_ratio": 1 - self._work(batches) / self._most_work} if self._most_work else {}
        )
        return {"rank_wait_s": self.group.waited_s, **by_plan}

    def _work(self, batches: Sequence[Batch]) -> float:
        """What plans for several ranks make alike in a step; 0 where padded shapes do not tell."""
        if self._is_packed:
            return 0.0
        total = 0.0
        for batch in batches:
            size, num_tokens, height, width = batch.shape
            patches = -(-height // PATCH) * -(-width // PATCH)
            total += size * float(work(np.array([num_tokens, patches])).sum())
        return total

    def should_overlap(self, predicted_bytes: float | None, step: int) -> bool:
        """Whether this rank would have the coming window reduced during its backward pass; all must want it.

        Args:
            predicted_bytes: peak of the window's costliest micro-batch; None where nothing predicts it.
        """
        return False

    def drain_reduction(self, problem: Exception | None) -> None:
        """After a failure here: take part in the reduction that the other ranks wait in, whose result is dropped.

        Args:
            problem: None where memory ran out.

        Raises:
            CollectiveFailed: the reduction itself failed.
        """

    def extra_stats(self) -> list[float]:
        """Numbers to sum over the ranks after a window that was reduced."""
        return []

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        """The sums of `extra_stats`, to correct the gradients by; none after a window that was not reduced."""
