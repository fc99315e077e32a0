"""`GradientAccumulator`: forward, losses and backward of a window's micro-batches, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import OptionError
from mmlab.training.losses.base import LossTerms, Objective
from mmlab.training.losses.names import OBJECTIVES
from mmlab.training.precision import Precision
from mmlab.training.strategy import Strategy
from mmlab.types import Batch

MicroStep = Callable[[Batch | None, int, LossTerms], None]  # batch, its number from 1, the window's losses


class GradientAccumulator:
    """Adds the gradient of a window's losses to the weights, one micro-batch after the other.

    Each objective's sum is divided by its count over the whole window, so the gradient is that of all samples together.

    Args:
        model: called with a `Batch`.
        seed: called with 0 before a window, and with a micro-batch's number, from 1, before its objectives.
    """

    def __init__(
        self,
        model: Callable[[Batch], Any],
        objectives: Mapping[str, Objective],
        precision: Precision,
        device: torch.device,
        *,
        seed: Callable[[int], None] = lambda draw: None,
        strategy: Strategy | None = None,
    ) -> None:
        self.model, self.objectives, self.precision, self.device = model, objectives, precision, device
        self.seed, self.strategy = seed, strategy or Strategy()
        self.phase = "forward"  # for the event, should memory run out

    def run(
        self,
        batches: Sequence[Batch | None],
        terms: LossTerms,
        *,
        reduce: bool = False,
        micro_step: MicroStep | None = None,
    ) -> None:
        """Forward, losses and backward of every micro-batch.

        Args:
            terms: takes the losses; its counts are those of the whole window.
            reduce: the strategy reduces the gradient over the ranks in the last backward pass.
            micro_step: what to do with a micro-batch, in the place of `micro_step`.
        """
        self.seed(0)
        for number, batch in enumerate(batches, 1):
            with self.strategy.sync(last=reduce and number == len(batches)):
                (micro_step or self.micro_step)(batch, number, terms)

    def micro_step(self, batch: Batch | None, number: int, terms: LossTerms) -> None:
        """Add the gradient of one micro-batch."""
        assert batch is not None
        batch = batch.to(self.device)
        self.backward(self.strategy.forward(lambda: self.loss(self.forward(batch), batch, number, terms)))

    def forward(self, batch: Batch) -> Any:
        """The model's output."""
        self.phase = "forward"
        with self.precision.autocast():
            output = self.model(batch)
        if isinstance(output, Tensor | dict):
            self._refuse_bare(output)
        return output

    def loss(self, output: Any, batch: Batch, number: int, terms: LossTerms) -> Tensor:
        """The micro-batch's share of the window's loss."""
        self.seed(number)
        with self.precision.autocast():
            return terms.add({name: goal(output, batch) for name, goal in self.objectives.items()})

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient to that of the weights."""
        self.phase = "backward"
        self.precision.backward(loss)

    def _refuse_bare(self, output: Any) -> None:
        """A plain tensor or dict has no embeddings for the objectives to read."""
        reading = [name for name, goal in self.objectives.items() if type(goal) in OBJECTIVES.values()]
        if reading and not hasattr(output, "image_embedding"):
            name = type(self.model).__name__
            raise OptionError(
                f"{name} returned a {type(output).__name__}, and {', '.join(reading)} reads embeddings; if this is the "
                f"model's own loss, train LossModel({name}(...))"
            )
