"""Scheduler `memory` for a model on a device: the memory model is fitted, or read where it was saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.machine import device_limit
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.fitted import FittedModel
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time, time_conditions, timed_trainer
from mmlab.pricing.trace import StepSetting
from mmlab.schedule.base import Scheduler
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import SampleSizes

Fitted = TypeVar("Fitted", bound=FittedModel)


def memory_scheduler(
    model: nn.Module,
    *,
    device: str | torch.device,
    memory_gb: float | None = None,
    saved: Path | None = None,
    progress: bool = True,
    once: Callable[[Callable[[], MemoryModel]], MemoryModel] = lambda make: make(),
    **options: Any,
) -> Scheduler:
    """Plan batches that fill a device's memory.

    Args:
        device: that will train; its type is priced.
        memory_gb: GiB that it has, or None to ask it; see `device_limit`.
        saved: a file to read the memory model from, or to write it to where there is none that fits.
        once: calls what makes the memory model; of several ranks one may make it for all.
        options: the fields of `mmlab.pricing.trace.StepSetting` but `device`; all others go to the scheduler.

    Raises:
        OptionError: a model that cannot be priced, a packed one among them, or no memory left.
    """
    asked = {item.name: options.pop(item.name) for item in fields(StepSetting) if item.name in options}
    setting = asked | {"device": torch.device(device).type}

    def fitted() -> MemoryModel:
        return saved_or_fitted(
            saved,
            MemoryModel,
            lambda: fit_memory(model, num_held_out=0, progress=progress, **setting),
            fingerprint=fingerprint(model),
            conditions=lambda: StepSetting(**setting).conditions,
        )

    limit_bytes = device_limit(device, memory_gb=memory_gb)
    return make_scheduler("memory", cost=once(fitted), budget=limit_bytes, **options)


def saved_or_fitted_time(
    saved: Path | None, model: nn.Module, sizes: SampleSizes, *, trainer: Mapping[str, Any], **options: Any
) -> TimeModel:
    """The time model of a file, so that a run that goes on has the same plans; fitted and written where there is none.

    One that was measured on another device, in another precision or with another number of threads is fitted anew, and
    a warning says why.

    Args:
        trainer: options of its trainer.
        options: others of `fit_time`.
    """
    return saved_or_fitted(
        saved,
        TimeModel,
        lambda: fit_time(model, sizes, **options, **trainer),
        fingerprint=fingerprint(model),
        conditions=lambda: time_conditions(timed_trainer(model, **trainer)),
    )


def saved_or_fitted(
    saved: Path | None,
    kind: type[Fitted],
    fit: Callable[[], Fitted],
    *,
    fingerprint: str,
    conditions: Callable[[], Mapping[str, Any]],
) -> Fitted:
    """What `saved` holds, if it is of this model and these conditions; else what `fit` makes, which is saved.

    Conditions are asked for only where there is a file: those of a time model take a copy of the model.
    """
    if saved is not None and saved.exists():
        try:
            return kind.load(saved, fingerprint=fingerprint, conditions=conditions())
        except OptionError as error:
            warnings.warn(f"{error}: done now, and plans may differ from earlier ones", stacklevel=4)
    found = fit()
    if saved is not None:
        found.save(saved)
    return found
