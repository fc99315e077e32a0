"""What a step would take with any strategy, on any number of devices, from what one probe measured.

A step is simulated: every device and every link does its work in the order in which the strategy's program issues it, and
each piece of work starts when its device is free and what it needs has arrived. Left out: memory, caches, and devices that
slow each other down.

single   one device computes everything
reduce   gradients are summed after the backward pass
ddp      gradients are summed in buckets behind the last backward pass
fsdp     blocks are gathered one ahead, forward and backward, and their gradients scattered
branch   images on one device, texts and fusion on another, with the best cut of the image branch. More than two devices
         are predicted but cannot be run: several such pairs, or several devices that share the images of one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from mmlab.errors import OptionError, unknown_name
from mmlab.parallel.links import Line, Network, ring

STRATEGIES = ("single", "reduce", "ddp", "fsdp", "branch")
DEVICES = (1, 2, 4, 8, 16, 32, 64)
LOWEST, HIGHEST = 1e6, 1e12  # bytes/s between which winners are searched
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # of torch's DistributedDataParallel
NUM_UNITS = 12  # blocks that `fsdp` gathers one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What one device computes in a step, part by part, and the sizes of what is sent."""

    image_forward: Line
    image_backward: Line
    text_forward: Line
    text_backward: Line
    fusion_forward: Line  # fusion, heads and losses
    fusion_backward: Line
    optimizer_s: float  # of all parameters
    other_s: float  # the trainer's own: counting, clipping, the event
    image_bytes: float  # gradients of each part
    text_bytes: float
    fusion_bytes: float
    image_output_bytes: float  # per sample, that the image branch hands to fusion and losses
    image_layer_bytes: float = 0.0  # per sample, between two layers of the image encoder
    image_layers: tuple[
        float, ...
    ] = ()  # share of the image branch's time in each layer; empty if it cannot be cut

    @property
    def gradient_bytes(self) -> float:
        return self.image_bytes + self.text_bytes + self.fusion_bytes

    def forward_s(self, part: str, num_samples: float) -> float:
        line: Line = getattr(self, f"{part}_forward")
        return line(num_samples)

    def backward_s(self, part: str, num_samples: float) -> float:
        line: Line = getattr(self, f"{part}_backward")
        return line(num_samples)

    def branches_s(self, num_samples: float) -> dict[str, float]:
        """Forward and backward of each part together."""
        return {
            part: self.forward_s(part, num_samples) + self.backward_s(part, num_samples) for part in _PARTS
        }

    def step_s(self, num_samples: float) -> float:
        """One micro-batch in a step, on one device."""
        return sum(self.branches_s(num_samples).values()) + self.optimizer_s + self.other_s


_PARTS = ("image", "text", "fusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of one strategy."""

    strategy: str
    num_devices: int
    num_samples: float  # of the step, over all devices
    step_s: float
    exposed_s: float  # of it, communication that no computation hides
    sent_bytes: float  # by the device that sends most
    image_layers: int | None = None  # best cut of `branch`; None leaves the image branch whole

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s


class _Schedule:
    """Devices and links, each with the time at which it is free; work is added in the order in which they do it."""

    def __init__(self) -> None:
        self._free_s: defaultdict[str, float] = defaultdict(float)
        self.busy_s: defaultdict[str, float] = defaultdict(float)

    def add(self, place: str, seconds: float, after_s: float = 0.0) -> float:
        """Do something on a device or link, once that is free and `after_s` is past; returns when it ends."""
        self._free_s[place] = max(self._free_s[place], after_s) + seconds
        self.busy_s[place] += seconds
        return self._free_s[place]

    @property
    def end_s(self) -> float:
        return max(self._free_s.values())


def predict(
    strategy: str,
    costs: StepCosts,
    network: Network,
    *,
    num_devices: int,
    batch_size: float,
    num_micro_batches: int = 1,
    overlap: float = 1.0,
    ahead: int = 1,
) -> Prediction:
    """Simulate a step.

    Args:
        batch_size: samples per device.
        num_micro_batches: that each device's samples are split into (data parallel), or all samples (`branch`).
        overlap: share of hidden communication that costs the computation nothing; 1 if it has hardware of its own.
        ahead: micro-batches that the image device may be ahead (`branch`).

    Raises:
        OptionError: an unknown strategy, or a number of devices that it cannot use.
    """
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if num_devices < 1:
        raise OptionError(f"num_devices must be at least 1, found {num_devices}")
    if strategy == "branch" and num_devices > 1:
        samples = num_devices * batch_size
        options = [
            (group, cut)
            for group in range(2, num_devices + 1)
            if not num_devices % group
            for cut in (None, *(range(1, len(costs.image_layers)) if group == 2 else ()))
        ]
        return min(
            (
                _branch(costs, network, samples, num_devices, *how, num_micro_batches, ahead)
                for how in options
            ),
            key=lambda found: found.step_s,
        )
    num_devices = 1 if strategy == "single" else num_devices
    return _data_parallel(strategy, costs, network, num_devices, batch_size, num_micro_batches, overlap)


def _data_parallel(
    strategy: str,
    costs: StepCosts,
    network: Network,
    num_devices: int,
    batch_size: float,
    num_micro_batches: int,
    overlap: float,
) -> Prediction:
    schedule, size = _Schedule(), batch_size / num_micro_batches
    forward_s = sum(costs.forward_s(part, size) for part in _PARTS)
    backward_s = sum(costs.backward_s(part, size) for part in _PARTS)
    gradient_bytes, update_s = costs.gradient_bytes, costs.optimizer_s
    sent_bytes = ring("all_reduce", gradient_bytes, num_devices)[1]
    if strategy == "fsdp" and num_devices > 1:
        for left in reversed(range(num_micro_batches)):
            _sharded_pass(schedule, network, forward_s, gradient_bytes, num_devices, scatters=False)
            _sharded_pass(schedule, network, backward_s, gradient_bytes, num_devices, scatters=not left)
        update_s /= num_devices
        sent_bytes *= num_micro_batches + 0.5
    else:
        schedule.add("device", (num_micro_batches - 1) * (forward_s + backward_s) + forward_s)
        if strategy == "ddp":
            for seconds, num_bytes in _buckets(costs, size):
                ready_s = schedule.add("device", seconds)
                schedule.add("link", network.seconds("all_reduce", num_bytes, num_devices), ready_s)
        else:
            ready_s = schedule.add("device", backward_s)
            schedule.add("link", network.seconds("all_reduce", gradient_bytes, num_devices), ready_s)
    exposed_s = schedule.end_s - schedule.busy_s["device"]
    exposed_s += (1 - overlap) * (schedule.busy_s["link"] - exposed_s)  # hidden, but slowing the computation
    return Prediction(
        strategy=strategy,
        num_devices=num_devices,
        num_samples=num_devices * batch_size,
        step_s=schedule.busy_s["device"] + exposed_s + update_s + costs.other_s,
        exposed_s=exposed_s,
        sent_bytes=sent_bytes,
    )


def _sharded_pass(
    schedule: _Schedule, network: Network, seconds: float, size: float, num_devices: int, *, scatters: bool
) -> None:
    """A forward or backward pass of `fsdp`: each block is gathered while the one before it computes."""
    gather_s, scatter_s = (
        network.seconds(name, size / NUM_UNITS, num_devices) for name in ("all_gather", "reduce_scatter")
    )
    computed_s = schedule.add("device", 0.0)
    gathered_s = schedule.add("link", gather_s, computed_s)
    for unit in range(NUM_UNITS):
        next_s = schedule.add("link", gather_s, computed_s) if unit + 1 < NUM_UNITS else gathered_s
        computed_s = schedule.add("device", seconds / NUM_UNITS, gathered_s)
        gathered_s = next_s
        if scatters:
            schedule.add("link", scatter_s, computed_s)


def _buckets(costs: StepCosts, num_samples: float) -> list[tuple[float, float]]:
    """(seconds of the backward pass, bytes) until each bucket of gradients is full; fusion first, images last."""
    parts = ("fusion", "text", "image")
    ends = np.cumsum([0.0, *(getattr(costs, f"{part}_bytes") for part in parts)])
    times = np.cumsum([0.0, *(costs.backward_s(part, num_samples) for part in parts)])
    first = min(FIRST_BUCKET_BYTES, ends[-1])
    num_more = ceil((ends[-1] - first) / BUCKET_BYTES - 1e-9)
    marks = [0.0, first, *(min(ends[-1], first + (index + 1) * BUCKET_BYTES) for index in range(num_more))]
    ready = np.interp(marks, ends, times)
    ready[-1] = times[-1]
    return [
        (float(ready[place + 1] - ready[place]), after - before)
        for place, (before, after) in enumerate(pairwise(marks))
    ]


def _branch(
    costs: StepCosts,
    network: Network,
    num_samples: float,
    num_devices: int,
    group_size: int,
    cut: int | None,
    num_micro_batches: int,
    ahead: int,
) -> Prediction:
    """Groups of devices; in each the last has texts and fusion, the others share the images."""
    num_groups, num_image = num_devices // group_size, group_size - 1
    size = num_samples / num_groups / num_micro_batches
    lower = 1.0 if cut is None else sum(costs.image_layers[:cut])
    send_s = network.seconds(
        "send", size * (costs.image_output_bytes if cut is None else costs.image_layer_bytes)
    )
    forward_s, backward_s = costs.forward_s("image", size), costs.backward_s("image", size)
    upper_s = (1 - lower) * (forward_s + backward_s)
    fusion_s = costs.forward_s("fusion", size) + costs.backward_s("fusion", size)
    schedule, grads_s = _Schedule(), list[float]()
    for number in range(num_micro_batches + ahead):
        if number < num_micro_batches:
            encoded_s = schedule.add("images", lower * forward_s / num_image)
            received_s = schedule.add("features", send_s, encoded_s)
            schedule.add("texts", costs.forward_s("text", size))
            joined_s = schedule.add("texts", upper_s + fusion_s, received_s)
            grads_s.append(schedule.add("gradients", send_s, joined_s))
            schedule.add("texts", costs.backward_s("text", size))
        if number >= ahead:
            schedule.add("images", lower * backward_s / num_image, grads_s[number - ahead])
    image_bytes = lower * costs.image_bytes
    sizes = {"images": image_bytes, "texts": costs.gradient_bytes - image_bytes}
    shared_by = {"images": num_groups * num_image, "texts": num_groups}
    for place, gradient_bytes in sizes.items():
        schedule.add(place, network.seconds("all_reduce", gradient_bytes, shared_by[place]))
        schedule.add(place, costs.optimizer_s * gradient_bytes / max(1.0, costs.gradient_bytes))
    step_s = schedule.end_s + costs.other_s
    per_sample = costs.image_output_bytes if cut is None else costs.image_layer_bytes
    return Prediction(
        strategy="branch",
        num_devices=num_devices,
        num_samples=num_samples,
        step_s=step_s,
        exposed_s=step_s - costs.other_s - max(schedule.busy_s[place] for place in sizes),
        sent_bytes=num_samples / num_groups * per_sample / num_image
        + max(ring("all_reduce", sizes[place], shared_by[place])[1] for place in sizes),
        image_layers=cut,
    )


def scaling_rows(
    costs: StepCosts, network: Network, strategies: Sequence[str], *, batch_size: float, **options: Any
) -> list[dict[str, Any]]:
    """A row for each strategy and number of devices, with `batch_size` samples per device."""
    alone = predict("single", costs, network, num_devices=1, batch_size=batch_size, **options).samples_per_s
    rows = []
    for strategy in strategies:
        for count in (1,) if strategy == "single" else DEVICES:
            found = predict(strategy, costs, network, num_devices=count, batch_size=batch_size, **options)
            rows.append(
                {
                    "strategy": strategy,
                    "num_devices": count,
                    "step_s": found.step_s,
                    "exposed_s": found.exposed_s,
                    "sent_bytes": found.sent_bytes,
                    "samples_per_s": found.samples_per_s,
                    "efficiency": found.samples_per_s / (count * alone),
                }
            )
    return rows


def winners(
    costs: StepCosts,
    network: Network,
    strategies: Sequence[str],
    *,
    num_devices: int,
    batch_size: float,
    **options: Any,
) -> list[dict[str, Any]]:
    """Which `strategy` is fastest `from` which bandwidth `to` which (bytes/s of `send`), the lowest first.

    `single` leaves the other devices idle and takes all their samples.
    """

    def best(log_bandwidth: float) -> str:
        links = network.with_bandwidth(10**log_bandwidth)

        def rate(strategy: str) -> float:
            count = 1 if strategy == "single" else num_devices
            size = batch_size * num_devices / count
            return predict(
                strategy, costs, links, num_devices=count, batch_size=size, **options
            ).samples_per_s

        return max(strategies, key=rate)

    grid = np.linspace(np.log10(LOWEST), np.log10(HIGHEST), 121)
    names = [best(place) for place in grid]
    changes = [place for place in range(1, len(grid)) if names[place] != names[place - 1]]
    edges = [LOWEST, *(float(10 ** ((grid[place - 1] + grid[place]) / 2)) for place in changes), HIGHEST]
    return [
        {"strategy": names[place], "from": low, "to": high}
        for place, (low, high) in zip([0, *changes], pairwise(edges), strict=True)
    ]
