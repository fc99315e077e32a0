"""The gradient of one optimizer step over a window of micro-batches, whatever the memory.

A micro-batch that does not fit is cut into parts, and the window done again from the start, with the same gradient.
Objectives that compare samples with each other (contrastive, matching) need the whole micro-batch, so the parts go
through the model twice: first without a graph, for the outputs; then the objectives run on all of them together; then
each part again, with a graph, to receive its share of the gradient (Gao et al. 2021, GradCache, arXiv:2101.06983). Each
part draws the same random numbers both times, and the objectives have generators of their own, so that the drawn
negatives do not depend on the parts.

Where an objective takes its negatives from all ranks, they exchange embeddings in every micro-batch (see
`mmlab.training.losses.all_ranks`), and a window that one rank has to do again all do again. So it is where the engine reduces
gradients during the last backward pass (`mmlab.parallel`): the window is then done again without that.

Two things do depend on the parts: dropout masks, drawn part by part, and batch normalisation, whose statistics
are those of a part. Costs without parts: nothing but a copy of the running statistics, where there are any. With parts:
a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from mmlab.errors import OptionError, RunError
from mmlab.parallel.strategies import CollectiveFailed, ReduceStrategy, Roots
from mmlab.training.losses.all_ranks import AGAIN, AllRanks, GlobalBatch, Interrupted
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.names import OBJECTIVES, OwnLoss
from mmlab.training.out_of_memory import out_of_memory_in, release_memory
from mmlab.training.precision import Precision
from mmlab.types import Batch


class Window:
    """Computes gradients; keeps nothing between steps.

    Args:
        model: from a `Batch` to an output; a tensor in it that has dimensions has a row for each sample.
        seed: called with 0 and, per micro-batch, its number (from 1): seeds the random draws that follow.
        on_failure: told the phase, the error's first line and the parts, each time that memory ran out.
        recover: cut what does not fit into parts; else the error goes to the caller.
        forward: what to call instead of the model, with the same outcome.
        all_ranks: the exchange for the objectives that take negatives from all ranks.
        engine: how ranks share a step; None in a single process.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, Objective],
        precision: Precision,
        device: torch.device,
        *,
        seed: Callable[[int], None],
        on_failure: Callable[[str, str, int], None],
        recover: bool = True,
        forward: Callable[[Batch], Any] | None = None,
        all_ranks: AllRanks | None = None,
        engine: ReduceStrategy | None = None,
    ) -> None:
        self.model, self.objectives, self.precision, self.device = model, objectives, precision, device
        self._devices: list[torch.device] = getattr(model, "branch_devices", [device])
        self._seed, self._on_failure, self._recover = seed, on_failure, recover
        self._call = forward or model
        self._engine, self._reduces = engine, False
        self.stand_in: Batch | None = (
            None  # gone through for nothing where this rank has no micro-batch and must
        )
        self._all_ranks, self._joined = all_ranks, list[GlobalBatch]()
        joint = {} if all_ranks is None else all_ranks.goals
        self._local = {name: goal for name, goal in objectives.items() if name not in joint}
        self._phase, self._rows = "forward", slice(0, 0)
        self._before: list[Tensor] = []  # statistics as they were before the last window
        self._statistics = [
            buffer
            for module in model.modules()
            if getattr(module, "track_running_stats", False)
            for buffer in module.buffers(recurse=False)
        ]

    def gradient(
        self,
        batches: Sequence[Batch | None],
        counts: Mapping[str, float],
        weights: Mapping[str, float] | None = None,
        joined: Sequence[GlobalBatch] = (),
        *,
        reduce: bool = False,
        length: int = 0,
    ) -> tuple[LossTerms, int, bool]:
        """Add the gradient of the window's mean losses to the parameters, whose gradients are None.

        Args:
            batches: micro-batches, on any device; those without anything to learn from are left out by the caller, or
                None where all ranks' numbers must agree.
            counts: by objective, what the sums are divided by.
            weights: by objective, the factor of its mean.
            joined: of each number, what the ranks' micro-batches hold; with an exchange every rank calls this.
            reduce: let the engine reduce the gradients in the last backward pass; alike on all ranks.
            length: micro-batches of the longest window of all ranks, where they must go through the model together.

        Returns:
            The sums of the losses, the most parts that a micro-batch was cut into, and whether the gradients are
            reduced, on which all ranks then agree.

        Raises:
            RunError: a sample does not fit by itself, or a loss that cannot be computed in parts does not fit.
            Interrupted: another rank gave up.
            CollectiveFailed: ranks cannot agree on anything any more.
        """
        self._joined = [*joined]
        batches = [*batches, *[None] * (max(len(joined), length) - len(batches))]
        num_parts = [1] * len(batches)
        statistics = self.remember()
        number = 0

        def attempt(terms: LossTerms) -> None:
            nonlocal number
            self._seed(0)
            self._num_exchanges = sum(any(rows.counts) for rows in joined)
            for number, batch in enumerate(batches):
                self._reduces = reduce and number == len(batches) - 1
                if batch is None:
                    self._idle(number + 1, terms)
                else:
                    self._one(batch, number + 1, num_parts[number], terms)

        def cut(failure: str) -> None:
            release_memory(self.device)
            batch, tried = batches[number], num_parts[number]
            if batch is None:
                raise RunError(f"no memory to exchange embeddings with the other ranks ({failure})")
            num_parts[number] = min(2 * tried, len(batch))
            self._on_failure(self._phase, failure, num_parts[number])
            self._refuse_hopeless(batch, tried, failure)

        while True:
            scale = self._engine.scale if reduce and self._engine is not None else 1.0
            number, terms = 0, LossTerms(counts, weights, scale=scale)
            verdict = self._attempt(partial(attempt, terms), cut, reduce=reduce)
            if not verdict:
                return terms, max(num_parts, default=1), reduce
            if verdict > AGAIN:
                raise Interrupted(verdict)
            reduce = False
            self.model.zero_grad(set_to_none=True)
            self._put_back(statistics)

    def _attempt(self, attempt: Callable[[], None], cut: Callable[[str], None], *, reduce: bool) -> int:
        """The verdict on one attempt; of all ranks, where they share anything. What went wrong here is raised."""
        own, told = 0, None
        problem: Exception | None = None
        try:
            failure = None
            if self._recover:
                failure = out_of_memory_in(attempt)
            else:
                attempt()
            if failure is not None:
                own = AGAIN
                cut(failure)
        except Interrupted as interrupted:
            told = interrupted.verdict
        except Exception as error:
            problem = error
        if told is None and self._engine is not None and (reduce or self._all_ranks is not None):
            waited_for = not self._num_exchanges or self._engine.requires_equal_steps
            if reduce and (own or problem is not None) and waited_for:
                try:
                    self._engine.drain_reduction(problem)
                except CollectiveFailed as error:
                    raise error from problem
            own = own if problem is None else AGAIN + 1 + self._engine.ranks.rank
            told = self._verdict(own)
        if problem is not None:
            raise problem
        return own if told is None else told

    def _verdict(self, own: int) -> int:
        if self._all_ranks is not None:
            return self._all_ranks.verdict(own)
        return 0 if self._engine is None else int(self._engine.ranks.largest(own, self.device))

    def remember(self) -> list[Tensor]:
        """Running statistics as they are before a window, for `forget`."""
        self._before = self._copy_statistics()
        return self._before

    def forget(self) -> None:
        """Take back what the last window did to running statistics, which a sample that is not finite spoils."""
        self._put_back(self._before)

    def _one(self, batch: Batch, number: int, num_parts: int, terms: LossTerms) -> None:
        """One micro-batch in so many parts."""
        parts = list(_rows_of_parts(len(batch), num_parts))
        if num_parts == 1:
            whole = self._on_device(batch, parts[0])
            self._learn(lambda: self._forward(whole), whole, number, terms)
        elif any(isinstance(goal, OwnLoss) for goal in self.objectives.values()):
            for rows in parts:
                part = self._on_device(batch, rows)
                if not any(goal.count(part) for goal in self.objectives.values()):
                    continue  # the mean over nothing is NaN
                self._learn(partial(self._forward, part), part, number, terms)
        else:
            self._together(batch, parts, number, terms)

    def _together(self, batch: Batch, parts: Sequence[slice], number: int, terms: LossTerms) -> None:
        """Parts apart through the model, together through the objectives."""
        states, outputs, statistics = [], [], self._copy_statistics()
        for rows in parts:
            states.append(self._random_state())
            with torch.no_grad():
                outputs.append(_leaves(self._forward(self._on_device(batch, rows))))
        self._put_back(statistics)
        whole, leaves = _joined(outputs)
        del outputs
        self._rows = slice(0, len(batch))
        self._learn(partial(_given, whole), batch.to(self.device), number, terms)
        del whole
        after = self._random_state()
        for rows, state in zip(parts, states, strict=True):
            self._restore(state)
            output, _, _ = _leaves(self._forward(self._on_device(batch, rows)))
            self._phase = "backward"
            taught = [
                (tensor, leaf.grad[rows] if leaf.dim() else leaf.grad)
                for tensor, leaf in zip(output, leaves, strict=True)
                if tensor.requires_grad and leaf.grad is not None and (leaf.dim() or not rows.start)
            ]
            torch.autograd.backward([tensor for tensor, _ in taught], [grad for _, grad in taught])
        self._restore(after)

    def _on_device(self, batch: Batch, rows: slice) -> Batch:
        self._rows = rows
        return (batch if rows == slice(0, len(batch)) else batch.part(rows)).to(self.device)

    def _forward(self, batch: Batch) -> Any:
        self._phase = "forward"
        with self.precision.autocast():
            output = self._call(batch)
        if isinstance(output, Tensor | dict):
            self._refuse_bare(output)
        return output

    def _learn(self, forward: Callable[[], Any], batch: Batch, number: int, terms: LossTerms) -> None:
        """The objectives on an output, and the backward pass."""

        self._pass(partial(self._roots, forward, batch, number, terms))

    def _roots(self, forward: Callable[[], Any], batch: Batch, number: int, terms: LossTerms) -> Roots:
        output = forward()
        self._phase = "forward"
        self._seed(number)
        loss = None
        if self._local:
            with self.precision.autocast():
                loss = terms.add({name: goal(output, batch) for name, goal in self._local.items()})
        taught = self._teach(output, number, terms)
        if self._engine is not None and self._engine.requires_equal_steps and self._all_ranks is not None:
            taught += _nothing_taught(output)
        return loss, taught

    def _idle(self, number: int, terms: LossTerms) -> None:
        """In the place of a micro-batch that this rank does not have."""
        if self.stand_in is None:
            self._pass(lambda: (None, self._teach(None, number, terms)))
            return
        batch = self._on_device(self.stand_in, slice(0, len(self.stand_in)))
        nothing = LossTerms(terms.counts, scale=0.0)

        def roots() -> Roots:
            output = self._forward(batch)
            with self.precision.autocast():
                sums = {name: goal(output, batch) for name, goal in self._local.items()}
                loss = nothing.add(sums) if sums else None
            self._teach(None, number, terms)
            return loss, [] if self._all_ranks is None else _nothing_taught(output)

        self._pass(roots)

    def _pass(self, work: Callable[[], Roots]) -> None:
        loss, taught = work() if self._engine is None else self._engine.run(work, reduce=self._reduces)
        self._phase = "backward"
        self.precision.backward(loss, taught)

    def _teach(self, output: Any, number: int, terms: LossTerms) -> list[tuple[Tensor, Tensor]]:
        """Gradients of the losses over all ranks, where there are any; those of other ranks wait for this."""
        if self._all_ranks is None:
            return []
        rows = self._joined[number - 1]
        with self.precision.autocast():
            taught = self._all_ranks.teach(output, rows, terms, self.precision.scaled)
        self._num_exchanges -= any(rows.counts)
        return taught

    def _refuse_bare(self, output: Any) -> None:
        """A loss of the model's own is nothing that objectives over embeddings can read."""
        reading = [name for name, goal in self.objectives.items() if type(goal) in OBJECTIVES.values()]
        if reading and not hasattr(output, "image_embedding"):
            name = type(self.model).__name__
            raise OptionError(
                f"{name} returned a {type(output).__name__}, and {', '.join(reading)} reads embeddings; if this is the "
                f"model's own loss, train LossModel({name}(...))"
            )

    def _refuse_hopeless(self, batch: Batch, tried: int, failure: str) -> None:
        shape = batch.shape
        if tried == len(batch) and self._rows.stop - self._rows.start == 1:
            raise RunError(
                f"sample {batch.record_ids[self._rows.start]!r} does not fit into memory by itself: {shape.num_tokens} "
                f"tokens, {shape.height} x {shape.width} pixels ({failure}); cut its text or image, use "
                "checkpointing=True or 16-bit precision, or a device with more memory"
            )
        if tried == len(batch):
            raise RunError(
                f"the batch of {len(batch)} samples from {batch.record_ids[0]!r} fits in parts, but not its losses "
                f"together ({failure}); plan smaller batches"
            )
        if getattr(self.model, "compares_samples", False):
            raise RunError(
                f"a batch of {len(batch)} samples ran out of memory ({failure}), and this model's own loss compares "
                "the samples of a batch, so that it cannot be computed in parts; plan smaller batches"
            )

    def _copy_statistics(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._statistics]

    def _put_back(self, statistics: Sequence[Tensor]) -> None:
        for buffer, before in zip(self._statistics, statistics, strict=True):
            buffer.copy_(before)

    def _random_state(self) -> list[Tensor]:
        """Of the generators that the model draws from, one a device."""
        return [
            torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            for device in self._devices
        ]

    def _restore(self, states: Sequence[Tensor]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)


def _nothing_taught(output: Any) -> list[tuple[Tensor, Any]]:
    """Gradients of zero for all that a loss over all ranks may teach on one of them."""
    tensors = (output.image_embedding, output.text_embedding, output.logit_scale)
    return [(tensor, torch.zeros_like(tensor)) for tensor in tensors if tensor.requires_grad]


def _given(output: Any) -> Any:
    return output


def _rows_of_parts(num_rows: int, num_parts: int) -> Iterator[slice]:
    for part in range(num_parts):
        yield slice(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)


def _leaves(output: Any) -> tuple[list[Tensor], list[Any], Callable[[list[Any]], Any]]:
    """Tensors of an output; all its leaves; and how to make the output again from leaves."""
    tree = output
    if is_dataclass(output) and not isinstance(output, Mapping):
        tree = {item.name: getattr(output, item.name) for item in fields(output)}
    leaves, spec = _pytree.tree_flatten(tree)

    def again(leaves: list[Any]) -> Any:
        rebuilt = _pytree.tree_unflatten(leaves, spec)
        return rebuilt if tree is output else replace(output, **rebuilt)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], leaves, again


def _joined(
    parts: Sequence[tuple[list[Tensor], list[Any], Callable[[list[Any]], Any]]],
) -> tuple[Any, list[Tensor]]:
    """One output of all parts, and its tensors: leaves of a new graph. What has no dimensions is the first part's."""
    _, first, again = parts[0]
    joined: list[Any] = []
    for position, leaf in enumerate(first):
        if isinstance(leaf, Tensor):
            leaf = torch.cat([part[1][position] for part in parts]) if leaf.dim() else leaf.detach().clone()
            leaf.requires_grad_(leaf.is_floating_point())
        joined.append(leaf)
    whole = again(joined)
    if hasattr(whole, "num_chunks"):
        whole = replace(whole, num_chunks=len(parts))
    return whole, [leaf for leaf in joined if isinstance(leaf, Tensor)]
