"""Scheduler `memory` for a model on a device: the memory model is fitted, or read where it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.machine import device_limit
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.schedule.base import Scheduler
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.losses.base import Objective


def memory_scheduler(
    model: nn.Module,
    *,
    device: str | torch.device,
    memory_gb: float | None = None,
    precision: str = "fp32",
    checkpointing: bool = False,
    objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
    accumulating: bool = False,
    gradient_buckets: bool = False,
    saved: Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Scheduler:
    """Plan batches that fill a device's memory.

    Args:
        device: that will train; its type is priced.
        memory_gb: GiB that it has, or None to ask it; see `device_limit`.
        precision, checkpointing, objectives, accumulating, gradient_buckets: of the training, see `StepTracer`.
        saved: a file to read the memory model from, or to write it to where there is none that fits.
        options: of the scheduler.

    Raises:
        OptionError: a model that cannot be priced, a packed one among them, or no memory left.
    """
    kind = torch.device(device).type
    conditions = {
        "precision": precision,
        "checkpointing": checkpointing,
        "device": kind,
        "objectives": " + ".join(objectives),
        "accumulating": accumulating,
        "gradient_buckets": gradient_buckets,
    }
    memory = _read(saved, fingerprint(model), conditions)
    if memory is None:
        memory = fit_memory(
            model,
            precision=precision,
            checkpointing=checkpointing,
            device=kind,
            objectives=objectives,
            accumulating=accumulating,
            gradient_buckets=gradient_buckets,
            num_held_out=0,
            progress=progress,
        )
        if saved is not None:
            memory.save(saved)
    return make_scheduler("memory", cost=memory, budget=device_limit(device, memory_gb=memory_gb), **options)


def _read(saved: Path | None, of_model: str, conditions: Mapping[str, Any]) -> MemoryModel | None:
    if saved is None or not saved.exists():
        return None
    try:
        return MemoryModel.load(saved, fingerprint=of_model, conditions=conditions)
    except OptionError:  # of another model or training: fitted anew
        return None
