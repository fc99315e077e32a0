"""Cost of a plan's epoch on a device: seconds, the largest batch's bytes and, for a rented device, money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import check_numbers
from mmlab.machine import CONTEXT_BYTES, GIB, MemoryLimit, memory_limit, resolve_device
from mmlab.pricing.devices import find_device
from mmlab.pricing.equal_memory import EqualMemory
from mmlab.pricing.fit import fit_memory, patch_of
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.named_model import conversation_model, named_model
from mmlab.pricing.roofline import predict_time
from mmlab.pricing.step_prices import packing, price_dataset
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import check_samples_fit
from mmlab.schedule.dense import DEFAULT_MEAN_SAMPLES
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import scheduler_type
from mmlab.types import SampleSizes

_VOCAB_SIZE = 8192  # of a preset: the builtin tokenizer's at most


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModels:
    """The models that predict a step's bytes and seconds, those of packs apart; None where nothing predicts them."""

    memory: Any = None  # a `CostModel` in bytes
    time: Any = None  # a `TimeModel`
    packs: tuple[MemoryModel | None, TimeModel] | None = None  # no bytes of packed pairs

    def prices(self, plan: BatchPlan) -> tuple[Any, Any]:
        """The models for a plan's bytes and seconds; None for the bytes of packs, unless packs were measured."""
        if plan.limits.streams is None:
            return self.memory, self.time
        return self.packs or (None, self.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrices(StepModels):
    """Bytes and seconds of a model's steps on one device, for plans of one data set."""

    limit_bytes: float  # the most that the tensors of a step may take
    price_per_hour: float | None = None

    def figures(self, plan: BatchPlan, num_ranks: int = 1) -> dict[str, float | None]:
        """`epoch_s`, `peak_bytes` and, given a price, `epoch_price` of all ranks in its currency.

        A packed plan has no `peak_bytes`, unless packs were measured. A plan without a single step has no `epoch_s`, as one
        of batches of one image under a contrastive loss.
        """
        memory, time = self.prices(plan)
        epoch_s = time.epoch_s(plan, num_ranks=num_ranks) or None
        peak_bytes = None if memory is None else float(plan.costs(memory).max())
        found: dict[str, float | None] = {"epoch_s": epoch_s, "peak_bytes": peak_bytes}
        if self.price_per_hour is not None:
            found["epoch_price"] = epoch_s and epoch_s / 3600 * self.price_per_hour * num_ranks
        return found

    def __str__(self) -> str:
        conditions, spread = self.time.conditions, self.time.spread_ratio
        method = f"{conditions['method']}, repeats {spread:.0%} apart" if spread else conditions["method"]
        return (
            f"seconds on {conditions['device']} in {conditions['precision']}: {method}; "
            f"equal memory: a step may take {self.limit_bytes / GIB:.3g} GiB"
        )


def side_of_patch(model: str) -> int:
    """Side in pixels of a named model's image patches.

    Raises:
        OptionError: an unknown model.
    """
    return patch_of(named_model(model, vocab_size=_VOCAB_SIZE))


def price_plans(
    model: str,
    sizes: SampleSizes,
    names: Sequence[str],
    *,
    dataset: ConversationDataset | None = None,
    device_name: str | None = None,
    precision: str = "fp32",
    price_per_hour: float | None = None,
    memory_gb: float | None = None,
    epochs: int = 2,
    **options: Any,
) -> tuple[PlanPrices, dict[str, Scheduler]]:
    """Predict bytes and seconds of a model's steps on a named device, or measure steps here.

    The schedulers get the largest batches that need no more memory than `random` with 32 samples, or than
    `memory_gb`.

    Args:
        model: a preset's name, or the path or name of a transformers model, of which only the configuration is read.
        sizes: of the data, after the image policy.
        names: of the schedulers.
        dataset: the conversations of a vision-language model.
        device_name: a name in `mmlab.pricing.devices.DEVICES`, for which seconds are predicted; None measures
            on the device at hand.
        memory_gb: limit in GiB on the memory of the process, as for `mmlab memory`.
        epochs: number of epochs that must keep within the limit.
        options: of all schedulers, such as the seed.

    Returns:
        The prices, and the schedulers by name.

    Raises:
        OptionError: an unknown model or device, a price that is not above 0, or samples that do not fit the device
            or into the limit.
    """
    check_numbers({"price_per_hour": price_per_hour, "memory_gb": memory_gb})
    for name in names:  # an unknown one is refused now: pricing takes a while
        scheduler_type(name)
    named = None if device_name is None else find_device(device_name)
    if named is None:
        kind = resolve_device("auto")
        limit = memory_limit(kind, memory_gb=memory_gb)
    else:
        named.check_precision(precision)
        kind, total_bytes = named.kind, named.memory_bytes
        if memory_gb is not None:
            total_bytes = min(total_bytes, round(memory_gb * GIB))
        limit = MemoryLimit(device=named.name, total_bytes=total_bytes, context_bytes=CONTEXT_BYTES[kind])
    usable_bytes = limit.usable_bytes
    priced: dict[str, Any] = {"precision": precision}
    packs: Any = None
    time: Any = None
    if dataset is not None and not named:
        vlm = conversation_model(model, device=kind)
        memory, time = price_dataset(vlm, dataset, precision=precision)
        if "packed" in names:
            packs = price_dataset(packing(vlm, dataset), dataset, precision=precision)
    else:
        if dataset is not None:
            network: nn.Module = conversation_model(model)
        else:
            network = named_model(model, vocab_size=_VOCAB_SIZE, device="meta" if named else "cpu")
        memory = fit_memory(network, dataset=dataset, device=kind, num_held_out=0, **priced)
    check_samples_fit(memory, sizes, usable_bytes, "make images smaller, or take more memory")
    equal = EqualMemory(
        sizes=sizes,
        memory=memory,
        plans_of=lambda scheduler: (scheduler.plan(sizes, epoch=epoch) for epoch in range(epochs)),
        batch_size=DEFAULT_MEAN_SAMPLES,
        options={"patch": memory.patch, **options},
    )
    baseline, limit_bytes = equal.baseline(None if memory_gb is None else usable_bytes)
    if limit_bytes > usable_bytes:
        baseline, limit_bytes = equal.baseline(usable_bytes)
    if time is None:
        priced |= {"cost": memory, "budget": limit_bytes}
        if named:
            time = predict_time(network, sizes, named, dataset=dataset, **priced)
        else:
            time = fit_time(network, sizes, device=kind, **priced)
    planners = equal.schedulers(names, baseline, limit_bytes, time=time, packs=packs, progress=True)
    prices = PlanPrices(
        memory=memory, time=time, limit_bytes=limit_bytes, price_per_hour=price_per_hour, packs=packs
    )
    return prices, planners
