"""How a run's memory use changes the size of its batches: by correcting a memory model, or by halving.

A policy takes the values of each step and says which value (a budget or a batch size) it wants now. The ranks
agree on the least that any of them wants, and the policy settles on a new value from that. It works with
plain numbers; a step costs a few microseconds.

`Predictive` keeps a factor on the predicted bytes. The factor rises at once to what a peak shows and falls
slowly; it is never below 1, because a model that predicts too much is safe. An out-of-memory error tells only
that more than the limit was needed: the value then falls by a guess, until the next batch has been measured.
`Halving` is article A's rule.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mmlab.errors import OptionError
from mmlab.machine import GIB, available_memory_bytes, total_memory_bytes
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import costliest_sample
from mmlab.types import BatchShape, SampleSizes

TOLERANCE = 0.01  # a peak above the corrected prediction by less than this changes nothing
DECAY = 0.002  # share of the way to a lower peak that the correction falls in a step
MAX_CORRECTION = 2.0
CAUTION = 1.2  # factor on predictions after an out-of-memory, until a batch has been measured
MARGIN_STEP, MAX_MARGIN = 0.02, 0.2  # added to the margin by an out-of-memory
HYSTERESIS, PATIENCE = 0.01, 20  # the value rises only by more than this, after that many steps that want it
MAX_CHANGE = 0.25  # the largest relative change in one decision
HALVE_ABOVE, DOUBLE_BELOW, LARGEST_BATCH = 0.8, 0.3, 64  # of article A

Values = Mapping[str, Any]
Wish = tuple[float, str]  # the value that is wanted now, and why


class MemoryPolicy(ABC):
    """Turns step values into the value that planners get. Deterministic, but for what `Halving` reads of the
    system where no step has a counted peak."""

    STATE: ClassVar[tuple[str, ...]]  # attributes that a resumed run needs
    value: float

    @abstractmethod
    def observe(self, values: Values) -> Wish:
        """Take the values of a step."""

    @abstractmethod
    def planner(self, planner: Scheduler, value: float) -> Scheduler:
        """A copy of the planner with this value: a budget or a batch size."""

    def bind(self, sizes: SampleSizes) -> None:  # noqa: B027
        """Note which samples will be planned."""

    def next_epoch(self) -> Wish:
        """What is wanted at the start of a later epoch."""
        return self.value, ""

    def settle(self, agreed: float) -> float:
        """The new value, the same on all ranks."""
        return agreed

    def figures(self) -> dict[str, float]:
        """The policy's own values in a `decision` event."""
        return {}

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name in self.STATE:
            setattr(self, name, state[name])


class Predictive(MemoryPolicy):
    """A budget in predicted bytes: limit x (1 - margin) / correction.

    Args:
        planner: with a cost model in bytes.
        limit_bytes: what training may use.

    Raises:
        OptionError: the planner has no cost model in bytes.
    """

    STATE = ("value", "margin_ratio", "measured", "caution", "_num_above", "_num_since_lower")

    def __init__(self, planner: Scheduler, limit_bytes: float) -> None:
        cost = getattr(planner, "cost", None)
        if cost is None or cost.unit != "bytes":
            found = f"{type(planner).__name__}{'' if cost is None else f' with a cost in {cost.unit}'}"
            raise OptionError(
                f"policy 'predictive' needs a planner with a cost model in bytes, found {found}; "
                "use make_scheduler('memory', cost=<memory model>, budget=<bytes>)"
            )
        self.cost, self.limit_bytes = cost, limit_bytes
        self.margin_ratio = 1 - getattr(planner, "target_ratio", 0.97)  # share of the limit that is kept free
        self.measured = 1.0  # factor on predictions, from peaks
        self.caution = 1.0  # a further factor, by guess, after an out-of-memory
        self._num_above = 0  # steps in a row in which a higher value was wanted
        self._num_since_lower = PATIENCE  # steps since the value was lowered
        self._floor = 0.0
        self.value = self._wanted()

    @property
    def correction(self) -> float:
        """Factor on predicted bytes."""
        return self.measured * self.caution

    def planner(self, planner: Scheduler, value: float) -> Scheduler:
        options: dict[str, Any] = {"budget": value}
        if hasattr(planner, "target_ratio"):
            options["target_ratio"] = 1.0  # the value already leaves the margin
        return replace(planner, **options)

    def bind(self, sizes: SampleSizes) -> None:
        """Keep the budget at or above the costliest sample, which could not be planned otherwise."""
        self._floor = costliest_sample(self.cost, sizes, enough=0)[1]

    def observe(self, values: Values) -> Wish:
        predicted = values.get("predicted_bytes") or self._predicted(values)
        reason = "steps used less than was planned for"
        if values.get("num_out_of_memory"):
            reason = self._failed(predicted)
        elif (peak := _peak(values)) is not None:
            reason = self._measure(predicted, peak) or reason
        return self._wanted(), reason

    def settle(self, agreed: float) -> float:
        self._num_since_lower += 1
        if agreed < self.value:
            self._num_above = self._num_since_lower = 0
            return max(agreed, (1 - MAX_CHANGE) * self.value)
        self._num_above = self._num_above + 1 if agreed > self.value * (1 + HYSTERESIS) else 0
        # a value just lowered may have been a guess: one batch that shows it was too low raises it again
        if self._num_above < (1 if self._num_since_lower <= PATIENCE else PATIENCE):
            return self.value
        self._num_above, self._num_since_lower = 0, PATIENCE
        return min(agreed, (1 + MAX_CHANGE) * self.value)

    def figures(self) -> dict[str, float]:
        return {"margin_ratio": self.margin_ratio, "correction_factor": self.correction}

    def _wanted(self) -> float:
        return max(self.limit_bytes * (1 - self.margin_ratio) / self.correction, self._floor)

    def _predicted(self, values: Values) -> float:
        """The prediction for a step if the trainer has no memory model; exact if the step has one batch."""
        batch_size = -(-values["num_samples"] // values["num_batches"])
        return self.cost(BatchShape(batch_size, values["num_tokens"], values["height"], values["width"]))

    def _failed(self, predicted: float) -> str:
        self.measured = min(MAX_CORRECTION, max(self.measured, self.limit_bytes / predicted))
        text = f"ran out of memory on a batch predicted at {predicted / GIB:.4g} GiB"
        if predicted > self.value:
            return f"{text}, which was planned before the budget was lowered"
        self.caution = min(CAUTION * self.caution, MAX_CORRECTION)
        self.margin_ratio = min(MAX_MARGIN, self.margin_ratio + MARGIN_STEP)
        return text

    def _measure(self, predicted: float, peak: float) -> str:
        # a constant error is a large share of a small batch's bytes, and must not be taken for a factor
        shown = 1 + (peak - predicted) / max(predicted, self.value / 2)
        is_full = predicted >= self.value / 2
        if is_full:
            self.caution = 1.0
        if shown > self.measured * (1 + TOLERANCE):
            self.measured = min(MAX_CORRECTION, shown)
            return f"a peak of {peak / GIB:.4g} GiB where {predicted / GIB:.4g} GiB was predicted"
        if is_full and shown < self.measured:
            self.measured += DECAY * (max(1.0, shown) - self.measured)
        return ""


class Halving(MemoryPolicy):
    """A batch size: halved above 80 % of the limit, doubled (up to 64) below 30 %, at the end of each epoch.

    It is halved at once when memory runs out, where the article's run would have ended.

    Raises:
        OptionError: the planner has no batch size.
    """

    STATE = ("value", "_peak_bytes", "_num_steps")

    def __init__(self, planner: Scheduler | None, limit_bytes: float) -> None:
        batch_size = 1 if planner is None else getattr(planner, "batch_size", None)
        if batch_size is None:
            raise OptionError(
                f"policy 'halving' needs a planner with a batch_size, found {type(planner).__name__}; "
                "use 'random' or another with batches of fixed size"
            )
        self.limit_bytes, self.value = limit_bytes, float(batch_size)
        self._peak_bytes = 0.0  # since the last decision; 0 if no step has a counted peak
        self._num_steps = 0  # of the epoch

    def adjust(self, current: int) -> int:
        """The article's rule."""
        used_bytes = self.used_bytes()
        if used_bytes > HALVE_ABOVE * self.limit_bytes:
            return max(1, current // 2)
        if used_bytes < DOUBLE_BELOW * self.limit_bytes:
            return max(current, min(LARGEST_BATCH, 2 * current))
        return current

    def planner(self, planner: Scheduler, value: float) -> Scheduler:
        return replace(planner, **dict[str, Any](batch_size=int(value)))

    def observe(self, values: Values) -> Wish:
        self._num_steps += 1
        self._peak_bytes = max(self._peak_bytes, _peak(values) or 0)
        is_of_now = values.get("num_samples", 0) <= self.value * values.get("num_batches", 1)
        if values.get("num_out_of_memory") and is_of_now:
            self._peak_bytes = 0.0
            return max(1, self.value // 2), "ran out of memory"
        return self.value, "ran out of memory on a batch from before the last decision"

    def next_epoch(self) -> Wish:
        if not self._num_steps:
            return self.value, ""
        share = self.used_bytes() / self.limit_bytes
        wanted = self.adjust(int(self.value))
        self._peak_bytes, self._num_steps = 0.0, 0
        return float(wanted), f"{share:.0%} of the limit was used"

    def used_bytes(self) -> float:
        """The steps' highest peak; without one, memory in use on system and device, as in the article."""
        if self._peak_bytes:
            return self._peak_bytes
        used_bytes = total_memory_bytes() - available_memory_bytes()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            used_bytes = max(used_bytes, torch.cuda.max_memory_allocated())
        return used_bytes


def _peak(values: Values) -> float | None:
    """A step's peak if tensors were counted; a process's resident memory does not show a step's peak."""
    counted = values.get("memory_source") in ("torch allocator", "live tensors")
    return values.get("peak_bytes") if counted else None
