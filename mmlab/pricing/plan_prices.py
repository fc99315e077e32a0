"""Cost of a plan's epoch on a device: seconds, the largest batch's bytes and, for a rented device, money."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import OptionError, check_numbers
from mmlab.machine import CONTEXT_BYTES, GIB, memory_limit, resolve_device
from mmlab.pricing.devices import find_device
from mmlab.pricing.fit import fit_memory, patch_of
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.named_model import conversation_model, named_model
from mmlab.pricing.roofline import predict_time
from mmlab.pricing.step_prices import packing, price_dataset
from mmlab.pricing.time_model import TimeModel
from mmlab.pricing.timing import fit_time
from mmlab.schedule.cost import check_samples_fit
from mmlab.schedule.plan import BatchPlan
from mmlab.types import SampleSizes

_VOCAB_SIZE = 8192  # of a preset: the builtin tokenizer's at most


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrices:
    """Bytes and seconds of a model's steps on one device, for plans of one data set."""

    memory: MemoryModel
    time: TimeModel
    limit_bytes: int  # the most that the tensors of a step may take
    packs: tuple[MemoryModel, TimeModel] | None = None  # of packed conversations
    price_per_hour: float | None = None

    def figures(self, plan: BatchPlan, num_ranks: int = 1) -> dict[str, float | None]:
        """`epoch_s`, `peak_bytes` and, given a price, `epoch_price` of all ranks in its currency.

        A packed plan has no `peak_bytes`, unless packs were measured.
        """
        memory, time = prices_of(plan, self.memory, self.time, self.packs)
        epoch_s = time.epoch_s(plan, num_ranks=num_ranks)
        peak_bytes = None if memory is None else float(plan.costs(memory).max())
        found: dict[str, float | None] = {"epoch_s": epoch_s, "peak_bytes": peak_bytes}
        if self.price_per_hour is not None:
            found["epoch_price"] = epoch_s / 3600 * self.price_per_hour * num_ranks
        return found

    def __str__(self) -> str:
        conditions, spread = self.time.conditions, self.time.spread_ratio
        method = f"{conditions['method']}, repeats {spread:.0%} apart" if spread else conditions["method"]
        return (
            f"seconds on {conditions['device']} in {conditions['precision']}: {method}; "
            f"a step may take {self.limit_bytes / GIB:.1f} GiB"
        )


def prices_of(
    plan: BatchPlan, memory: Any, time: Any, packs: tuple[MemoryModel, TimeModel] | None
) -> tuple[Any, Any]:
    """The models for a plan's bytes and seconds; None for the bytes of packs, unless packs were measured."""
    return (memory, time) if plan.limits.streams is None else packs or (None, time)


def side_of_patch(model: str, given: int | None = None) -> int:
    """Side in pixels of a named model's image patches.

    Raises:
        OptionError: an unknown model, or `given` is another side.
    """
    side = patch_of(named_model(model, vocab_size=_VOCAB_SIZE))
    if given not in (None, side):
        raise OptionError(
            f"{model} has patches of {side} pixels, found patch={given}; leave it out, or give {side}"
        )
    return side


def price_plans(
    model: str,
    sizes: SampleSizes,
    *,
    dataset: ConversationDataset | None = None,
    device_name: str | None = None,
    precision: str = "fp32",
    price_per_hour: float | None = None,
    packed: bool = False,
    progress: bool = True,
) -> PlanPrices:
    """Predict bytes and seconds of a model's steps on a named device, or measure steps here.

    Args:
        model: a preset's name, or the path or name of a transformers model, of which only the configuration is read.
        sizes: of the data, after the image policy.
        dataset: the conversations of a vision-language model.
        device_name: a name in `mmlab.pricing.devices.DEVICES`, for which seconds are predicted; None measures
            on the device at hand.
        packed: measure packs of conversations, too.
        progress: say on stderr what is done and how long it takes, and show bars if stderr is a terminal.

    Raises:
        OptionError: an unknown model or device, a price that is not above 0, or samples that do not fit the device.
    """
    check_numbers({"price_per_hour": price_per_hour})
    named = None if device_name is None else find_device(device_name)
    if named is not None:
        named.check_precision(precision)
    kind = named.kind if named else resolve_device("auto")
    limit_bytes = named.memory_bytes - CONTEXT_BYTES[kind] if named else memory_limit(kind).usable_bytes
    priced: dict[str, Any] = {"precision": precision, "progress": progress}
    packs = None
    if progress:
        steps = "30 steps without the device" if named else f"100 to 200 steps on {kind}"
        print(
            f"Pricing {model} by {steps}; the base preset takes a minute or two", file=sys.stderr, flush=True
        )
    if dataset is not None and not named:
        vlm = conversation_model(model, device=kind)
        memory, time = price_dataset(vlm, dataset, precision=precision)
        packs = price_dataset(packing(vlm, dataset), dataset, precision=precision) if packed else None
    else:
        if dataset is not None:
            network: nn.Module = conversation_model(model)
        else:
            network = named_model(model, vocab_size=_VOCAB_SIZE, device="meta" if named else "cpu")
        memory = fit_memory(network, dataset=dataset, device=kind, num_held_out=0, **priced)
        check_samples_fit(memory, sizes, limit_bytes, "make images smaller, or take a larger device")
        if named:
            priced |= {"dataset": dataset, "cost": memory, "budget": limit_bytes}
            time = predict_time(network, sizes, named, **priced)
        else:
            time = fit_time(network, sizes, device=kind, **priced)
    return PlanPrices(
        memory=memory, time=time, limit_bytes=limit_bytes, price_per_hour=price_per_hour, packs=packs
    )
