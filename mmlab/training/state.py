"""Weights and moments as one process has them, for a checkpoint, whoever holds them.

A checkpoint is read by any number of ranks under any strategy, so what is written does not tell how it was shared out:
the optimizer's state is numbered in the order of one process's parameter groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmlab.parallel.branch import BranchRanks
from mmlab.parallel.strategies import ReduceStrategy

Group = Mapping[str, Any]  # options of the optimizer, and "params"


class WeightsAndMoments:
    """Reads and writes the weights of a model and the state of its optimizer.

    Args:
        groups: the optimizer's groups as one process has them.
        branches: where the ranks are a branch each.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Group],
        engine: ReduceStrategy,
        branches: BranchRanks | None,
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._engine, self._branches = engine, branches
        self._order = [weight for group in groups for weight in group["params"]]
        self._groups = _numbered(groups, {weight: name for name, weight in model.named_parameters()})

    def gather(self) -> None:
        """Have all weights here, where ranks train a branch each; a collective."""
        if self._branches is not None:
            self._branches.share_weights()

    def state_dict(self) -> dict[str, Any]:
        """`model` and `optimizer`; under `fsdp` this rank's shares. Where ranks are a branch each a collective."""
        self.gather()
        return {"model": self._model.state_dict(), "optimizer": self._moments()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the whole, or this rank's share of it."""
        if self._engine.requires_equal_steps:
            self._load_shares(state)
            return
        self._model.load_state_dict(state["model"])
        own = [(group["weight_decay"], group["lr_factor"]) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, options in zip(self._optimizer.param_groups, own, strict=True):  # not the checkpoint's
            group["weight_decay"], group["lr_factor"] = options
        if self._branches is not None:
            self._branches.forget_moments(self._optimizer)

    def _moments(self) -> dict[str, Any]:
        """In the order that one process has; under `fsdp` with the weights' names."""
        if self._branches is not None:
            self._branches.share_moments(self._optimizer)
            whole = self._optimizer.state_dict()
            self._branches.forget_moments(self._optimizer)
            return whole
        if not self._engine.requires_equal_steps:
            return self._optimizer.state_dict()
        known = ((place, self._optimizer.state.get(weight)) for place, weight in enumerate(self._order))
        state = {place: values for place, values in known if values}
        options = self._optimizer.param_groups[0]
        return {"state": state, "param_groups": [{**options, **group} for group in self._groups]}

    def _load_shares(self, state: Mapping[str, Any]) -> None:
        """Take this rank's share of what one process has, or what was read of it already."""
        own = self._model.state_dict()
        found = {name: tensor.shape for name, tensor in state["model"].items()}
        if found != {name: tensor.shape for name, tensor in own.items()}:
            raise ValueError(
                f"its weights {list(found)[:3]}... have other names or sizes than {list(own)[:3]}..."
            )
        for name, tensor in own.items():
            tensor.copy_(self._engine.share(state["model"][name], tensor))
        self._optimizer.state.clear()
        for place, values in state["optimizer"]["state"].items():
            weight = self._order[place]
            self._optimizer.state[weight] = {
                key: value.to(self._device) if key == "step" else self._engine.share(value, weight.detach())
                for key, value in values.items()
            }


def by_sharing(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each group as what is shared out and what is not, which no operation of the optimizer takes at once."""
    return [part for group in groups for part in _by_sharing(group)]


def _by_sharing(group: Group) -> list[dict[str, Any]]:
    parts: list[list[nn.Parameter]] = [[], []]
    for weight in group["params"]:
        parts[hasattr(weight, "to_local")].append(weight)
    return [{**group, "params": part} for part in parts if part]


def _numbered(groups: Sequence[Group], names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The groups with places and names instead of the weights themselves."""
    numbered, start = [], 0
    for group in groups:
        weights = group["params"]
        places = [*range(start, start + len(weights))]
        numbered.append({**group, "params": places, "param_names": [names[weight] for weight in weights]})
        start += len(weights)
    return numbered
