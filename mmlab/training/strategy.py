"""`Strategy`: how devices share a training step. This one is for a single process, and shares nothing.

A strategy is passed to the trainer: `FusionTrainer(model, strategy=make_strategy("ddp"))`; those for several
devices are in `mmlab.parallel`. Methods marked *collective* are called by every rank, in the same order.

What the trainer calls, in order: `check` and `prepare` once; then, in every step, `begin_step`, `gradient` with the
window of micro-batches, `part_norms`, and `step_values` for the event. `gradient` runs the window through
`mmlab.training.split.Window`, which calls `sync` before each micro-batch and `forward` for its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmlab.errors import OptionError, RunError
from mmlab.machine import place_of_process
from mmlab.training.precision import part_norms

if TYPE_CHECKING:
    from mmlab.training.setup import TrainerSetup

Result = TypeVar("Result")
# what a rank may be doing, in the words that other ranks report
STARTS, STEP, WAITS, SAVES = "starting", "computing", "waiting for the others", "saving a checkpoint"


class CollectiveFailed(RunError):
    """A rank failed inside an exchange that the other ranks wait in; the run cannot go on and must be resumed."""


class Strategy:
    """Trains on one device.

    Attributes:
        rank, world_size: of this process and its run.
        num_shares: number of ranks among which the samples are split; 1 if every rank takes all samples, and so draws
            the same random numbers.
        requires_equal_steps: every rank must run equally many micro-batches, if need be on a dummy batch.
        saves_on_every_rank: `state_dict` holds this rank's share only.
        scale: factor on the losses of a window whose gradient is averaged, not summed, over the ranks.
        refused: why this strategy cannot scale the loss, split on out-of-memory, or compile, by `check`'s
            argument.
    """

    rank = 0
    world_size = 1
    num_shares = 1
    requires_equal_steps = False
    saves_on_every_rank = False
    scale = 1.0
    refused: ClassVar[Mapping[str, str]] = {}
    device: torch.device

    def check(self, **asked: bool) -> None:
        """Check that those of `scales`, `splits` and `compiles` that are asked for can work.

        Raises:
            OptionError: one of them cannot work.
        """
        for name, is_asked in asked.items():
            if is_asked and name in self.refused:
                raise OptionError(self.refused[name])

    def prepare(self, model: nn.Module, trainer: TrainerSetup) -> nn.Module:
        """Put the model on the trainer's device, before its optimizer is made; collective. Returns the module to train."""
        self.device = trainer.device
        return model.to(self.device)

    def optimizer_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The parameter groups that the optimizer gets."""
        return list(groups)

    def note(self, step: int, doing: str) -> None:
        """Record what this rank does from now on, for other ranks that wait for it."""

    def begin_step(self) -> None:
        """A step begins; collective."""

    def gradient(self, window: Any) -> dict[str, float]:
        """Leave the gradient of a `Window` in the weights; collective. Returns the objectives' means over all ranks."""
        return window.run(window.counts).means()

    def sync(self, *, last: bool) -> None:
        """A micro-batch begins: `last` is True where its backward pass reduces the window's gradient."""

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work`, which runs the model and the objectives on a micro-batch and returns the loss."""
        return work()

    def part_norms(self, parts: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, float]:
        """L2 norm of the gradient of each part of the model that has one; collective."""
        return part_norms(parts)

    def step_values(self) -> dict[str, float]:
        """Values about the other ranks in a `step` event."""
        return {}

    def gather_weights(self) -> None:
        """Make this rank's model complete if each rank trains a part of it; collective."""

    def evaluate(self, work: Callable[[], Result]) -> Result:
        """Call `work`, which runs a forward pass without a backward pass."""
        return work()

    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """`model` and `optimizer`, as in one process or this rank's share; collective."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` of any strategy returned. The optimizer keeps its own options; collective."""
        model.load_state_dict(state["model"])
        own = [group["weight_decay"] for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        for group, weight_decay in zip(optimizer.param_groups, own, strict=True):
            group["weight_decay"] = weight_decay
        for weight, moments in optimizer.state.items():  # a fused step reads both as they lie in memory
            for name, moment in moments.items():
                if moment.shape == weight.shape and moment.stride() != weight.stride():
                    moments[name] = torch.empty_like(weight).copy_(moment)

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers; collective."""
        return number

    def gather_objects(self, work: Callable[[], Result], doing: str) -> list[Result]:
        """What `work` returns on each rank, by rank; collective.

        Args:
            doing: what `work` does, for an error: "save a checkpoint".
        """
        return [work()]

    def run_on_main(self, work: Callable[[], Result], doing: str) -> Result:
        """Call `work` on rank 0 alone and return its result on every rank; collective."""
        return work()


def alone() -> Strategy:
    """The strategy of a single process.

    Raises:
        OptionError: there are other ranks, with which this strategy would share nothing.
    """
    if (started := place_of_process()[1]) > 1:
        raise OptionError(
            f"{started} ranks were started without a strategy, and each would train a model of its own: give "
            "FusionTrainer strategy=make_strategy('ddp') from mmlab.parallel"
        )
    return Strategy()
