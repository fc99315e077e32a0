"""`FSDPStrategy`: every rank holds a share of the weights, gradients and optimizer state, by torch's `fully_shard`.

Blocks of encoders and fusion are gathered one at a time, for the forward and again for the backward pass; what is left
(embeddings, projections, heads) makes one more group, which stays whole in between. Losses may use weights outside the
model's `forward`, so forward pass and losses together are one call of the module that torch sees.

Every rank runs the model equally often: one with fewer micro-batches, or with nothing to learn from, runs a
dummy batch whose loss is multiplied by zero. Within a step all ranks must use the same weights. Under `bf16`
weights are still gathered, and gradients summed, in 32 bits: on a CPU, normalisation does not accept 16-bit
weights with 32-bit inputs.

Costs: gathering every block twice a micro-batch. Gradients of micro-batches before the last are accumulated
unsharded, so that they need not be sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mmlab.errors import OptionError
from mmlab.parallel.reduce import ReduceStrategy
from mmlab.training.precision import Parts, gradients_of, tensor_norms
from mmlab.training.strategy import CollectiveFailed, Result
from mmlab.types import SampleSizes

_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers?|stages|h)\.\d+$")


def check_images(*sizes: SampleSizes) -> None:
    """Refuse conversations of which only some have an image: a rank whose batch has none would not gather the image encoder.

    Raises:
        OptionError: some have an image, others not.
    """
    has_image = [height > 0 for part in sizes for height in part.height.tolist()]
    num_without = has_image.count(False)
    if 0 < num_without < len(has_image):
        raise OptionError(
            f"fsdp: {num_without} of {len(has_image)} conversations have no image, and ranks whose batches have none would "
            "leave the others waiting; use strategy='ddp' or 'reduce', or leave those conversations out"
        )


class FSDPStrategy(ReduceStrategy):
    """The strategy `fsdp`."""

    requires_equal_steps = True
    saves_on_every_rank = True
    refused: ClassVar[Mapping[str, str]] = {
        "scales": "fsdp has no loss scale that all ranks share; use precision='bf16' or 'fp32'",
        "splits": "under fsdp the ranks gather weights from each other in every pass, so that one alone cannot "
        "run a micro-batch again in parts; use on_out_of_memory='auto', and plan smaller batches",
        "compiles": "fsdp was not tried with torch.compile; use compile=False",
    }

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Shard the weights block by block, so that no device ever holds all of them.

        Raises:
            OptionError: the model runs packed, or its weights are not contiguous.
        """
        if getattr(model, "is_packed", False):
            raise OptionError("fsdp cannot take packed batches; use strategy='ddp' or another scheduler")
        if not all(weight.is_contiguous() for weight in model.parameters()):
            raise OptionError("fsdp needs contiguous weights; use channels_last=False")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        # torch does not shard scalars
        scalars = [weight for weight in model.parameters() if not weight.dim()]
        for weight in scalars:
            weight.data = weight.data.to(self.device)
        self._scalars = [weight for weight in scalars if weight.requires_grad]
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(scalars)}
        for block in _outermost_blocks(model):
            fully_shard(block, **options)
        whole = _Whole(model)
        self._root: Any = fully_shard(whole, **options)
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo only sums
        return model

    def sync(self, *, last: bool) -> None:
        self._root.set_requires_gradient_sync(last)

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        return self._root(work)

    def drain_reduction(self, problem: Exception | None) -> NoReturn:
        raise CollectiveFailed(
            f"rank {self.rank} failed where the ranks gather weights from each other: {problem or 'memory ran out'}; resume "
            "from the last checkpoint, with smaller batches if memory ran out"
        ) from problem

    def apply_extra_stats(self, sums: Sequence[float]) -> None:
        self.add_gradients(self._scalars)

    def evaluate(self, work: Callable[[], Result]) -> Result:
        try:
            return self._root(work)
        except Exception as error:
            self.drain_reduction(error)
        finally:
            self._root.reshard()

    def part_norms(self, parts: Parts) -> dict[str, float]:
        gradients = gradients_of(parts)
        tensors = [tensor for of_part in gradients.values() for tensor in of_part]
        # a gradient that every rank holds whole is counted once
        factors = [1.0 if hasattr(tensor, "to_local") else 1 / self.world_size for tensor in tensors]
        squares = iter(factor * norm**2 for factor, norm in zip(factors, tensor_norms(tensors), strict=True))
        of_parts = [sum(islice(squares, len(of_part))) for of_part in gradients.values()]
        return dict(zip(gradients, map(math.sqrt, self.total(of_parts)), strict=True))

    def optimizer_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each group in two, sharded and whole weights, which an operation of the optimizer cannot mix."""
        self._groups = list(groups)
        self._order = [weight for group in groups for weight in group["params"]]
        return [
            {**group, "params": weights}
            for group in groups
            for is_sharded in (False, True)
            if (weights := [each for each in group["params"] if hasattr(each, "to_local") == is_sharded])
        ]

    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shares. Moments are indexed as in one process, where groups are not split in two, so
        that any number of ranks can read them under any strategy."""
        self.gather_weights()  # what all ranks hold whole, any of them may write
        names = {weight: name for name, weight in model.named_parameters()}
        places = {weight: place for place, weight in enumerate(self._order)}
        groups = [
            {
                **optimizer.param_groups[0],
                **group,
                "params": [places[weight] for weight in group["params"]],
                "param_names": [names[weight] for weight in group["params"]],
            }
            for group in self._groups
        ]
        state = {place: own for weight, place in places.items() if (own := optimizer.state.get(weight))}
        return {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}

    def load_state_dict(self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's shares: cut from whole tensors, or already read as shares."""
        own = model.state_dict()
        shares = {name: _share_of(tensor, own.get(name)) for name, tensor in state["model"].items()}
        model.load_state_dict(shares)
        optimizer.state.clear()
        for place, values in state["optimizer"]["state"].items():
            weight = self._order[place]
            optimizer.state[weight] = {
                key: value.to(self.device) if key == "step" else _share_of(value, weight.detach())
                for key, value in values.items()
            }


def _share_of(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's share of a tensor, sharded like `like`; unchanged if either is not to be sharded."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class _Whole(nn.Module):
    """The module that torch sees: a call in which anything may be computed with the model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _outermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Layers of encoders and fusion, none inside another."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # parents first
        inside = any(name.startswith(f"{block}.") for block in found)
        if _BLOCK.search(name) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    return list(found.values())
