"""How the ranks of a run share a step: the options, and `ReduceStrategy`, on which `ddp` and `fsdp` are built.

========  ==================================================================================================
ddp       every rank holds the model; gradients are summed during the window's last backward pass
reduce    the same, but gradients are summed after it, so that no rank waits inside a pass that may still fail
fsdp      every rank holds a share of the weights, gradients and optimizer state (`mmlab.parallel.fsdp`)
branch    two ranks see all samples: one trains the images, one texts and fusion (`mmlab.parallel.branch`)
========  ==================================================================================================

`FusionTrainer(model, strategy=make_strategy("ddp"))`. In a single process no strategy changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, distributed, nn

from mmlab.errors import OptionError, check_name, check_numbers
from mmlab.parallel.faults import TIMEOUT_S
from mmlab.parallel.process_group import ProcessGroup
from mmlab.training.losses.base import LossTerms
from mmlab.training.setup import TrainerSetup
from mmlab.training.split import Window
from mmlab.training.strategy import CollectiveFailed, Strategy

STRATEGIES = ("ddp", "reduce", "fsdp", "branch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of a run on several ranks; in a single process they change nothing.

    Args:
        strategy: a name in `STRATEGIES`.
        ahead: number of micro-batches that the image rank may be ahead of the other (`branch`).
        image_layers: number of image encoder blocks that the image rank computes; the other rank computes the
            rest. None leaves all to the image rank (`branch`).
        timeout_s: how long one rank may keep the others waiting, in a run of `mmlab.train`.

    Raises:
        OptionError: an unknown name, a number out of range, or a combination that has no meaning.
    """

    strategy: str = "ddp"
    ahead: int = 1
    image_layers: int | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        check_name("parallel strategy", self.strategy, STRATEGIES)
        check_numbers(self)
        if self.image_layers is not None and self.strategy != "branch":
            raise OptionError(
                f"image_layers={self.image_layers} cuts the image branch, which strategy={self.strategy!r} leaves "
                "whole; use strategy='branch'"
            )


class RanksStrategy(ProcessGroup, Strategy):
    """A strategy of several ranks: every exchange of `Strategy` goes through the process group."""

    def __init__(self, options: ParallelOptions) -> None:
        super().__init__()
        self.options = options

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy one rank's tensor to the others; a collective."""
        message = tensor.detach().to(self.device).contiguous()
        with self.waiting():
            distributed.broadcast(message, source)
        if self.rank != source:
            tensor.data.copy_(message)

    def step_values(self) -> dict[str, float]:
        return {"rank_wait_s": self.waited_s}


class ReduceStrategy(RanksStrategy):
    """The strategy `reduce`: gradients are summed after the last backward pass."""

    def __init__(self, options: ParallelOptions) -> None:
        super().__init__(options)
        self.num_shares = self.world_size

    def prepare(self, model: nn.Module, trainer: TrainerSetup) -> nn.Module:
        self.device = trainer.device
        self._make_alike(model)
        prepared = self._prepare(model)
        self._buffers = list(prepared.buffers())
        return prepared

    def gather_weights(self) -> None:
        for buffer in self._buffers:  # running statistics, which differ; a checkpoint has those of rank 0
            self.broadcast(buffer, 0)

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Prepare the model, whose weights are now the same on all ranks."""
        model = model.to(self.device)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        return model

    def _make_alike(self, model: nn.Module) -> None:
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
            self.broadcast(tensor, 0)

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
        """Counts over all ranks; least micro-batches to run on each; whether the backward pass reduces."""
        counts, equal = window.counts, self.requires_equal_steps
        wants = equal or (not window.gathers and self.should_overlap(window.predicted_bytes))
        by_rank = [0.0] * self.world_size
        by_rank[self.rank] = len(window.batches)
        sums = self.total([*counts.values(), not wants, *by_rank])
        overlaps, most = not sums[len(counts)], int(max(sums[len(counts) + 1 :]))
        return dict(zip(counts, sums, strict=False)), most if equal else int(overlaps), overlaps

    def _overlapped(
        self, window: Window, counts: Mapping[str, float]
    ) -> tuple[LossTerms | None, Exception | None]:
        """The window's losses, its gradient reduced in the last backward pass, or None if a rank failed; and
        this rank's own error, if any, which running the window again would not avoid."""
        terms: LossTerms | None = None
        problem: Exception | None = None
        try:
            terms = window.attempt(counts, reduce=True)
        except CollectiveFailed:
            raise
        except Exception as error:
            problem = error
        if terms is None:
            self.drain_reduction(problem)
        if self.largest(terms is None):
            window.reset()
            terms = None
        return terms, problem

    def _reduced_afterwards(
        self, window: Window, counts: Mapping[str, float], problem: Exception | None
    ) -> LossTerms:
        """The window's losses, with its gradient summed over the ranks once all of them have finished."""
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
        self.raise_if_any_failed(problem, f"step {window.step}")
        self.add_gradients(self.weights)
        return terms

    def should_overlap(self, predicted_bytes: float | None) -> bool:
        """Whether this rank wants the next window reduced during its backward pass; all ranks must want it.

        Args:
            predicted_bytes: peak of the window's costliest micro-batch; None if nothing predicts it.
        """
        return False

    def drain_reduction(self, problem: Exception | None) -> None:
        """After a failure here, complete the reduction that the other ranks wait in; its result is discarded.

        Args:
            problem: the failure; None if memory ran out.

        Raises:
            CollectiveFailed: the reduction itself failed.
        """

    def extra_stats(self) -> list[float]:
        """Numbers to sum over the ranks after a window that was reduced in its backward pass."""
        return []

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        """Correct the gradients by the sums of `extra_stats`; empty if the backward pass did not reduce."""
