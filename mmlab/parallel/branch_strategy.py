"""`BranchStrategy`: one rank trains the image branch, another the text branch and the fusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.parallel.branch import BranchRanks
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.reduce import ParallelOptions, Result
from mmlab.training.losses.base import Objective
from mmlab.training.precision import Parts, Precision
from mmlab.training.strategy import Strategy

if TYPE_CHECKING:
    from mmlab.training.split import Window
    from mmlab.types import Batch


class BranchStrategy(Strategy):
    """The strategy `branch`; see `BranchRanks`."""

    can_split = False

    def __init__(self, options: ParallelOptions, group: ProcessGroup) -> None:
        self.options, self.group = options, group
        self.rank, self.world_size = group.rank, group.world_size

    def check(self, *, scales: bool, splits: bool, compiles: bool) -> None:
        if splits:
            raise OptionError(
                "with a branch on each rank one alone cannot run a micro-batch again in parts; use "
                "on_out_of_memory='auto', and plan smaller batches"
            )
        if compiles:
            raise OptionError("with a branch on each rank no rank calls the whole model; use compile=False")

    def prepare(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        objectives: Mapping[str, Objective],
        precision: Precision,
    ) -> nn.Module:
        model = super().prepare(model, device=device, objectives=objectives, precision=precision)
        self.branches = BranchRanks(
            model,
            objectives=objectives,
            precision=precision,
            device=device,
            ahead=self.options.ahead,
            image_layers=self.options.image_layers,
            ranks=self.group,
        )
        return model

    def note(self, step: int, doing: str) -> None:
        self.group.note(step, doing)

    def begin_step(self) -> None:
        self.group.begin_step(self.device)

    def gradient(self, window: Window) -> dict[str, float]:
        return self.branches.gradient(
            window.learnable, window.counts, window.weights, seed=window.seed, doing=f"step {window.step}"
        )

    def part_norms(self, parts: Parts) -> dict[str, float]:
        return self.branches.part_norms(parts)

    def step_values(self, batches: Sequence[Batch]) -> dict[str, float]:
        return {"rank_wait_s": self.group.waited_s}

    def gather_weights(self) -> None:
        self.branches.share_weights()

    def state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.branches.share_weights()
        self.branches.share_moments(optimizer)
        state = super().state_dict(model, optimizer)
        self.branches.forget_moments(optimizer)
        return state

    def load_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        super().load_state_dict(model, optimizer, state)
        self.branches.forget_moments(optimizer)

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self.group.sums(numbers, self.device)

    def largest(self, number: float) -> float:
        return self.group.largest(number, self.device)

    def gather_objects(self, work: Callable[[], Result], doing: str) -> list[Result]:
        return self.group.gather_objects(work, doing)

    def run_on_main(self, work: Callable[[], Result], doing: str) -> Result:
        return self.group.run_on_main(work, doing)
