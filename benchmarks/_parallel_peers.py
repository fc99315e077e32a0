"""Data parallel training beside ours: torch's own wrapper in a loop by hand, and accelerate where it is installed.

Same weights, samples, losses and optimizer; neither counts padding, agrees on failures, nor keeps norms by part.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import distributed

from mmlab.model.parameters import parameter_groups, trainable_parameters
from mmlab.parallel.bench import OBJECTIVES, Arm, BenchOptions, BuildArm, device_of, make_batch, seeded_model
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.names import parse_objectives
from mmlab.types import Batch


class WithLoss(torch.nn.Module):
    """Model and losses as one module: DistributedDataParallel reduces what its own forward used."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.objectives = model, parse_objectives(model, OBJECTIVES)

    def forward(self, batch: Batch) -> torch.Tensor:
        output = self.model(batch)
        counts = {name: goal.count(batch) for name, goal in self.objectives.items()}
        return LossTerms(counts).add({name: goal(output, batch) for name, goal in self.objectives.items()})


def _prepared(options: BenchOptions, rank: int) -> tuple[torch.nn.Module, Any, Batch]:
    module = WithLoss(seeded_model(options)).to(device_of(options, rank))
    optimizer = torch.optim.AdamW(parameter_groups(module, weight_decay=0.01), lr=1e-4, fused=True)
    batch = make_batch(options, rank, distributed.get_world_size()).to(device_of(options, rank))
    return module, optimizer, batch


def _prepare_steps(module: torch.nn.Module, wrapped: Any, optimizer: Any, batch: Batch, backward: Any) -> Arm:
    weights = trainable_parameters(module)

    def step() -> dict[str, float]:
        loss = wrapped(batch)
        backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(loss.detach())}

    return Arm(step, (module, optimizer, *batch.tensors()))


def by_hand(options: BenchOptions, rank: int, cut: int | None = None) -> Arm:
    """`torch.nn.parallel.DistributedDataParallel` and nothing else."""
    module, optimizer, batch = _prepared(options, rank)
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return _prepare_steps(module, wrapped, optimizer, batch, torch.Tensor.backward)


def accelerate(options: BenchOptions, rank: int, cut: int | None = None) -> Arm:
    """Hugging Face accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=options.device == "cpu")
    module, optimizer, batch = _prepared(options, rank)
    wrapped, optimizer = accelerator.prepare(module, optimizer)
    return _prepare_steps(module, wrapped, optimizer, batch, accelerator.backward)


def peers() -> dict[str, BuildArm]:
    """Those that are installed, by name."""
    found: dict[str, BuildArm] = {"DDP by hand": by_hand}
    if importlib.util.find_spec("accelerate"):
        found["accelerate"] = accelerate
    return found
