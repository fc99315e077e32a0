"""`StepMeter`: measures an optimizer step, for the values of its event."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmlab.runs.meters import LiveBytes, step_memory
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.metrics import waste
from mmlab.schedule.plan import BatchPlan
from mmlab.training.losses.names import OBJECTIVES, OWN
from mmlab.training.precision import StepResult
from mmlab.training.split import Window
from mmlab.types import PATCH, Batch, CostModel

StepValues = dict[str, Any]  # keys of mmlab.runs.event_keys.EVENT_KEYS


def clock(device: torch.device) -> float:
    """The time in seconds, read once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepMeter:
    """Measures steps on one device.

    Args:
        memory: predicts the peak of a micro-batch in bytes.
        live: counts live tensors during each step.
        packed: the model removes the padding before it computes, see `mmlab.model.packing`.
    """

    def __init__(
        self, device: torch.device, *, memory: CostModel | None, live: LiveBytes | None, packed: bool
    ) -> None:
        self.device, self.memory, self.live, self.packed = device, memory, live, packed
        self._started_s = 0.0

    def begin(self) -> None:
        """Start measuring a step."""
        self._started_s = clock(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.live is not None:
            self.live.reset_peak()

    def predicted_bytes(self, batches: Sequence[Batch]) -> float | None:
        """Predicted peak memory of the window; None if nothing predicts it."""
        return None if self.memory is None else max(self.memory(batch.shape) for batch in batches)

    def end(
        self,
        window: Window,
        batches: Sequence[Batch],
        means: Mapping[str, float],
        result: StepResult,
        *,
        data_wait_s: float,
    ) -> StepValues:
        """A step event's values for time, each objective, gradient, padding and memory."""
        step_s = clock(self.device) - self._started_s + data_wait_s
        num_samples, shapes = sum(map(len, batches)), [batch.shape for batch in batches]
        most = window.predicted_bytes
        return {
            "num_samples": num_samples,
            "num_batches": len(batches),
            "num_tokens": max(shape.num_tokens for shape in shapes),
            "height": max(shape.height for shape in shapes),
            "width": max(shape.width for shape in shapes),
            **{key_of(name, "loss"): mean for name, mean in means.items() if name != OWN},
            **{key_of(name, "weight"): window.weights[name] for name in means if name != OWN},
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "loss_scale": result.loss_scale,
            **{f"{part}_grad_norm": norm for part, norm in result.part_norms.items()},
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "samples_per_s": num_samples / step_s,
            **measure_padding(batches, packed=self.packed),
            **({} if most is None else {"predicted_bytes": int(most)}),
            **step_memory(self.device, self.live),
            "num_parts": max(window.num_parts, default=1),
        }


def key_of(name: str, what: str) -> str:
    """The event key of an objective's "loss" or "weight"; `user_` marks the user's own objectives."""
    return f"{name}_{what}" if name in OBJECTIVES else f"user_{name}_{what}"


def measure_padding(batches: Sequence[Batch], *, packed: bool = False) -> dict[str, float]:
    """How much of a window is padding; texts count in tokens, images in patches of 16 x 16 pixels, as planners count."""
    tokens = padded_tokens = patches = padded_patches = 0
    for batch in batches:
        shape = batch.shape
        tokens += batch.host.num_tokens
        patches += batch.host.num_patches
        padded_tokens += shape.batch_size * shape.num_tokens
        # the negations round the divisions up
        rectangle = shape.batch_size * -(-shape.height // PATCH) * -(-shape.width // PATCH)
        padded_patches += rectangle if batch.pads_images else batch.host.num_patches
    if packed:
        padded_tokens, padded_patches = tokens, patches
    return padding_values(tokens, patches, padded_tokens, padded_patches)


def padding_values(tokens: int, patches: int, padded_tokens: int, padded_patches: int) -> dict[str, float]:
    """A step event's values for padding, from the numbers of tokens and patches without and with it.

    Returns:
        `text_waste`, `image_waste` and `combined_waste`, the shares of tokens, of patches and of both together that
        are padding; `padded_tokens` and `padded_patches`.
    """
    return {
        "text_waste": waste(tokens, padded_tokens),
        "image_waste": waste(patches, padded_patches),
        "combined_waste": waste(tokens + patches, padded_tokens + padded_patches),
        "padded_tokens": padded_tokens,
        "padded_patches": padded_patches,
    }


def predicted_cost(loader: Any, start: int, num_batches: int) -> dict[str, float]:
    """`predicted_cost` of a window: the tokens and patches that the loader's plan expects; empty without a plan.

    Args:
        start: number of batches that were done before; a loader that has `num_done` knows better, as it may leave out
            batches that it cannot read.
    """
    plan = getattr(loader, "plan", None)
    if not isinstance(plan, BatchPlan):
        return {}
    end = getattr(loader, "num_done", start + num_batches)
    end -= len(loader) - len(plan)  # after a resume the plan is that of the rest
    return {"predicted_cost": float(plan_costs(plan)[end - num_batches : end].sum())}


@lru_cache(maxsize=1)
def plan_costs(plan: BatchPlan) -> NDArray[np.float64]:
    """Tokens and patches of each batch: with padding, or without in a packed plan."""
    return plan.costs(PaddedTokens())
