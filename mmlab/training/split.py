"""A window of micro-batches that is run again in parts if memory runs out, with the same gradient.

The micro-batch that did not fit is cut into twice as many parts, gradients, running statistics and random
draws are reset to the window's start, and the window runs again. Objectives that compare samples
(contrastive, matching) need the whole micro-batch, so its parts go through the model twice: first without a
graph, for the outputs; then the objectives run on all outputs together; then each part again, with a graph,
to receive its share of the gradient (Gao et al. 2021, GradCache, arXiv:2101.06983). A part draws the same
random numbers both times, and the objectives have draws of their own, so the negatives do not depend on the
parts.

Dropout masks, drawn part by part, and the statistics of batch normalisation do depend on the parts. Costs without parts:
a copy of the running statistics, where there are any; with parts, a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from mmlab.errors import RunError
from mmlab.model.checkpointing import counting_norms
from mmlab.schedule.cost import described
from mmlab.training.losses.base import LossTerms, count_of
from mmlab.training.losses.names import OWN
from mmlab.training.out_of_memory import out_of_memory_in, release_memory
from mmlab.types import Batch

if TYPE_CHECKING:
    from mmlab.training.loop import FusionTrainer


class Window:
    """The micro-batches of one optimizer step, and how many terms each objective has in them.

    Making one is a collective if objectives gather embeddings from all ranks.

    Args:
        trainer: provides the model, the objectives and the random draws.
        batches: on any device; those with nothing to learn from (every count zero) are left out, unless
            objectives gather embeddings from all ranks.
        weights: by objective, the factor of its mean.

    Attributes:
        batches: None stands for a micro-batch that other ranks have and this one does not.
        dummy: the batch to run in place of None.
        counts: by objective, over this rank's batches.
        predicted_bytes: peak memory of the largest micro-batch; None if nothing predicts it.
        num_parts: number of parts into which each micro-batch is cut.
    """

    def __init__(
        self, trainer: FusionTrainer, batches: Sequence[Batch], weights: Mapping[str, float]
    ) -> None:
        self.trainer, self.weights, self.step, self.gathers = trainer, weights, trainer.step, trainer.gathers
        self.predicted_bytes = trainer.meter.predicted_bytes(batches)
        # all ranks count and gather equally often
        num_missing = int(trainer.strategy.largest(len(batches))) - len(batches) if self.gathers else 0
        self.dummy = None
        if self.gathers or trainer.strategy.requires_equal_steps:
            self.dummy = dummy_batch(batches[0])
        trainer.check_words(*batches)
        counts = [self._count(batch) for batch in batches]
        for _ in range(num_missing):  # the other ranks count more batches, and counting is a collective
            assert self.dummy is not None
            self._count(self.dummy)
        self.counts = {name: sum(count[name] for count in counts) for name in trainer.goals}
        self.batches: list[Batch | None] = [*batches, *[None] * num_missing]
        if not self.gathers:
            self.batches = [batches[n] for n, count in enumerate(counts) if any(count.values())]
        self._begin()

    def _count(self, batch: Batch) -> dict[str, int]:
        """The count of each objective."""
        return {name: count_of(name, goal, batch) for name, goal in self.trainer.goals.items()}

    def _begin(self) -> None:
        self.num_parts = [1] * len(self.batches)
        self._statistics = self.trainer.retry(lambda: [buffer.clone() for buffer in self.trainer.statistics])
        self._number = 1  # of the current micro-batch
        self._rows = slice(0, 0)  # of the current part

    @property
    def learnable(self) -> list[Batch]:
        """The micro-batches that this rank has."""
        return [batch for batch in self.batches if batch is not None]

    def weighted(self, weights: Mapping[str, float]) -> Window:
        """The same window with other weights."""
        other = copy(self)
        other.weights, other.batches = weights, [*self.batches]
        other._begin()
        return other

    def lengthen(self, num_batches: int) -> None:
        """Add dummies until there are `num_batches` micro-batches."""
        missing = max(0, num_batches - len(self.batches))
        self.batches += [None] * missing
        self.num_parts += [1] * missing

    def run(self, counts: Mapping[str, float]) -> LossTerms:
        """Add the gradient of the window's mean losses to that of the weights, in as many parts as need be.

        Args:
            counts: by objective, what the sums are divided by.

        Raises:
            RunError: a sample does not fit by itself, or a loss that cannot be computed in parts does not fit.
        """
        while (terms := self.attempt(counts)) is None:
            self.reset()
        return terms

    def attempt(self, counts: Mapping[str, float], *, reduce: bool = False) -> LossTerms | None:
        """Run the window once. None if memory ran out: call `reset`; the next attempt is in more parts."""
        terms = LossTerms(counts, self.weights, scale=self.trainer.strategy.scale if reduce else 1.0)
        if not self.trainer.splits:
            self._run(terms, reduce)
            return terms
        failure = out_of_memory_in(lambda: self._run(terms, reduce))
        if failure is None:
            return terms
        release_memory(self.trainer.device)
        self._cut(failure)
        return None

    def reset(self) -> None:
        """Drop the gradients and set running statistics back to where the window began."""
        self.trainer.model.zero_grad(set_to_none=True)
        self._put_back(self._statistics)

    def _put_back(self, statistics: Sequence[Tensor]) -> None:
        for buffer, before in zip(self.trainer.statistics, statistics, strict=True):
            buffer.copy_(before)

    def _run(self, terms: LossTerms, reduce: bool) -> None:
        self.trainer.seed(0)
        for number, batch in enumerate(self.batches, 1):
            self._number = number
            self.trainer.strategy.sync(last=reduce and number == len(self.batches))
            self._micro_step(batch, number, terms)

    def _micro_step(self, batch: Batch | None, number: int, terms: LossTerms) -> None:
        trainer, num_parts = self.trainer, self.num_parts[number - 1]
        if batch is None:
            if self.dummy is not None:
                trainer.micro_step(self.dummy, number, LossTerms(terms.counts, scale=0.0))
                return
            loss = trainer.strategy.forward(lambda: torch.zeros((), device=trainer.device))
            if loss.requires_grad:  # its backward pass takes part in the reduction of gradients
                trainer.backward(loss)
            return
        ends = [n * len(batch) // num_parts for n in range(num_parts + 1)]
        parts = [slice(begin, end) for begin, end in pairwise(ends)]
        self._rows = parts[0]
        if num_parts == 1:
            trainer.micro_step(batch, number, terms)
        elif OWN in trainer.objectives:
            for self._rows in parts:
                part = batch.part(self._rows)
                if trainer.objectives[OWN].count(part):
                    trainer.micro_step(part, number, terms)  # else its mean would be NaN
        else:
            self._cached_step(batch, parts, number, terms)

    def _cached_step(self, batch: Batch, parts: Sequence[slice], number: int, terms: LossTerms) -> None:
        """Run the model on each part and the objectives on all of them: GradCache, see the module."""
        trainer, random, size = self.trainer, self.trainer.random, len(batch)
        states, outputs = [], []
        statistics = [buffer.clone() for buffer in trainer.statistics]
        for self._rows in parts:
            states.append(random.state())
            with torch.no_grad():
                outputs.append(Leaves.of(trainer.forward(batch.part(self._rows).to(trainer.device))))
        self._put_back(statistics)
        whole, leaves = _join(outputs, size)
        del outputs
        self._rows = slice(0, len(batch))
        trainer.backward(trainer.loss(whole, batch.to(trainer.device), number, terms))
        del whole
        after = random.state()
        for rows, state in zip(parts, states, strict=True):
            self._rows = rows
            random.restore(state)
            output = Leaves.of(trainer.forward(batch.part(rows).to(trainer.device)))
            trainer.phase = "backward"
            gradients: list[Tensor | None] = []
            for leaf in leaves:
                if leaf.shape[:1] == (size,):  # it has a row for each sample
                    gradients.append(None if leaf.grad is None else leaf.grad[rows])
                else:  # all parts share it: the first part alone takes its gradient
                    gradients.append(leaf.grad if rows.start == 0 else None)
            backward_features(output.tensors, gradients)
        random.restore(after)

    def _cut(self, failure: str) -> None:
        """Cut the current micro-batch into twice as many parts.

        Raises:
            RunError: that cannot help.
        """
        batch, tried = self.batches[self._number - 1], self.num_parts[self._number - 1]
        if batch is None:
            raise RunError(f"no memory for a dummy batch while other ranks compute ({failure})")
        num_parts = self.num_parts[self._number - 1] = min(2 * tried, len(batch))
        self.trainer.ran_out(self.trainer.phase, failure, num_parts)
        if tried == len(batch) and self._rows.stop - self._rows.start == 1:
            raise RunError(
                f"sample {batch.record_ids[self._rows.start]!r} does not fit into memory by itself: "
                f"{described(*batch.shape[1:])} ({failure}); shorten its text, shrink its image, use "
                "checkpointing=True or 16-bit precision, or a device with more memory"
            )
        if tried == len(batch):
            raise RunError(
                f"the batch of {len(batch)} samples from {batch.record_ids[0]!r} fits in parts, but not its losses "
                f"together ({failure}); plan smaller batches"
            )
        if getattr(self.trainer.model, "compares_samples", False):
            raise RunError(
                f"a batch of {len(batch)} samples ran out of memory ({failure}), and this model's own loss compares "
                "the samples of a batch, so that it cannot be computed in parts; plan smaller batches"
            )


def backward_features(tensors: Sequence[Tensor | None], feature_grads: Sequence[Tensor | None]) -> None:
    """Run the backward pass of a part of the model from the gradients of its outputs; None has no gradient."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, feature_grads, strict=True)
        if gradient is not None and tensor is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


class Leaves(NamedTuple):
    """A model's output, flattened into its leaves."""

    tensors: list[Tensor]
    leaves: list[Any]  # tensors and anything else, in order
    rebuild: Callable[[list[Any]], Any]  # makes such an output from other leaves

    @classmethod
    def of(cls, output: Any) -> Leaves:
        tree = output
        if is_dataclass(output) and not isinstance(output, Mapping):
            tree = {item.name: getattr(output, item.name) for item in fields(output)}
        elif _pytree.tree_is_leaf(output) and hasattr(output, "__dict__") and not isinstance(output, Tensor):
            tree = vars(output)
        leaves, spec = _pytree.tree_flatten(tree)

        def rebuild(leaves: list[Any]) -> Any:
            rebuilt = _pytree.tree_unflatten(leaves, spec)
            if tree is output:
                return rebuilt
            other = copy(output)
            for name, value in rebuilt.items():
                object.__setattr__(other, name, value)  # it may be frozen
            return other

        return cls([leaf for leaf in leaves if isinstance(leaf, Tensor)], leaves, rebuild)


def _join(parts: Sequence[Leaves], size: int) -> tuple[Any, list[Tensor]]:
    """One output of all parts, and its tensors, which are the leaves of a new graph.

    What does not have a row for each of the batch's samples, such as a temperature, is taken from the first part.
    """
    joined: list[Any] = []
    for of_parts in zip(*(part.leaves for part in parts), strict=True):
        leaf = of_parts[0]
        if isinstance(leaf, Tensor):
            has_rows = leaf.dim() > 0 and sum(map(len, of_parts)) == size
            leaf = torch.cat(of_parts) if has_rows else leaf.clone()
            leaf = leaf.detach().requires_grad_(leaf.is_floating_point())
        joined.append(leaf)
    whole = parts[0].rebuild(joined)
    if hasattr(whole, "num_chunks"):
        whole = replace(whole, num_chunks=len(parts))
    return whole, [leaf for leaf in joined if isinstance(leaf, Tensor)]


def dummy_batch(batch: Batch) -> Batch:
    """One sample that no objective counts, for a rank with fewer micro-batches than the others."""
    first = batch.part(slice(0, 1))
    host = first.host
    nothing = replace(host, height=0 * host.height, attention_mask=torch.zeros_like(host.attention_mask))
    return replace(first, columns=nothing)


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Buffers that batch normalisation updates in training; a second run of a window must not do so again."""
    return [buffer for norm in counting_norms(model) for buffer in norm.buffers(recurse=False)]
