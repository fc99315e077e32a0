"""How the ranks of a run share the work of a step: the options, and the plainest of the strategies.

========  ==================================================================================================
ddp       every rank holds the model; gradients are summed during the window's last backward pass
reduce    the same, but they are summed after it, so that no rank waits inside a pass that may yet fail
fsdp      every rank holds a share of the weights, gradients and optimizer state (`mmlab.parallel.fsdp`)
branch    two ranks see all samples: one trains the images, one texts and fusion (`mmlab.parallel.branch`)
========  ==================================================================================================

An engine stands between the trainer's window and torch's own machinery. All ranks call it in the same order. A single
process has the plain engine, which does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError, RunError, unknown_name
from mmlab.parallel.process_group import ProcessGroup

STRATEGIES = ("ddp", "reduce", "fsdp", "branch")
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
OVERLAPS = ("auto", "always", "never")
Result = TypeVar("Result")
Roots = tuple[Tensor | None, list[tuple[Tensor, Any]]]  # of a graph: a loss; tensors with gradients of theirs


class CollectiveFailed(RunError):
    """A rank failed where the others cannot be told: they end when its process does, or at the group's timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of a run on several ranks; in a single process all but `branch` change nothing.

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
            where memory is predicted to come near its limit: a step that then fails is cheaper to do again.
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


class ReduceStrategy:
    """Gradients are summed after the last backward pass; the strategy `reduce`, and what a single process has.

    Attributes:
        requires_equal_steps: every rank must go through the model equally often, if need be for nothing.
        splits: a rank can go through a micro-batch again in parts, by itself.
        scale: factor on the losses of a window that is reduced in its backward pass.
    """

    requires_equal_steps = False
    splits = True
    scale = 1.0

    def __init__(self, options: ParallelOptions, ranks: ProcessGroup, device: torch.device) -> None:
        self.options, self.ranks, self.device = options, ranks, device

    def check(self, *, scales: bool, splits: bool, compiles: bool) -> None:
        """Refuse what does not go together: a loss scale, cutting what does not fit into parts, and compiling.

        Raises:
            OptionError: one of them is asked for and cannot work.
        """

    def prepare(self, model: nn.Module) -> None:
        """Take the model, on its device and with its trained weights marked, before an optimizer does."""

    def should_overlap(self, predicted_bytes: float | None, step: int) -> bool:
        """Whether this rank would have the coming window reduced during its backward pass; the others may not.

        Args:
            predicted_bytes: peak of the window's dearest micro-batch; None where nothing predicts it.
        """
        return False

    def run(self, work: Callable[[], Roots], *, reduce: bool) -> Roots:
        """A forward pass, up to the roots of its backward pass.

        Args:
            reduce: gradients are to be reduced in that backward pass; true of the last of a window, or of none.
        """
        return work()

    def drain_reduction(self, problem: Exception | None) -> None:
        """After a failure here: take part in the reduction that the other ranks wait in; its outcome means nothing.

        Args:
            problem: None where memory ran out.

        Raises:
            CollectiveFailed: the reduction itself failed.
        """

    def extra_stats(self) -> list[float]:
        """What is to be summed over the ranks after a window that was reduced, beside the losses."""
        return []

    def be_careful(self, step: int) -> None:
        """A step ran out of memory; if nothing predicts it, the next ones are to be done so that it costs least."""

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        """The sums of what was told, to set the gradients right by; none after a window that was not reduced."""

    def reduce(self, weights: Sequence[nn.Parameter]) -> None:
        """Sum the gradients after the window."""
        self.ranks.add_gradients(weights, self.device)

    def share(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's share of a tensor, as one like it is shared out; one that is a share is returned as it is."""
        return tensor

    def evaluate(self, work: Callable[[], Result]) -> Result:
        """A forward pass without a backward pass."""
        return work()


class OneBranchEach(ReduceStrategy):
    """The strategy `branch`, of which `mmlab.parallel.branch.BranchRanks` does the work."""

    splits = False

    def check(self, *, scales: bool, splits: bool, compiles: bool) -> None:
        if splits:
            raise OptionError(
                "with a branch on each rank one alone cannot go through a micro-batch again in parts; use "
                "on_out_of_memory='auto', and plan smaller batches"
            )
        if compiles:
            raise OptionError("with a branch on each rank no rank calls the whole model; use compile=False")


def make_strategy(options: ParallelOptions, ranks: ProcessGroup, device: torch.device) -> ReduceStrategy:
    """The engine of a strategy; in a single process the one that does nothing."""
    if ranks.world_size > 1 and options.strategy == "fsdp":
        from mmlab.parallel.fsdp import FSDPStrategy

        return FSDPStrategy(options, ranks, device)
    if ranks.world_size > 1 and options.strategy == "branch":
        return OneBranchEach(options, ranks, device)
    if ranks.world_size > 1 and options.strategy == "ddp" and options.overlap != "never":
        from mmlab.parallel.ddp import DDPStrategy

        return DDPStrategy(options, ranks, device)
    return ReduceStrategy(options, ranks, device)
