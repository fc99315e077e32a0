"""How long a step would take under any strategy, on any number of devices, from what one probe measured.

single   one device computes everything
reduce   gradients are summed after the backward pass
ddp      gradients are summed in buckets; all but the last hide behind the backward pass
fsdp     blocks are gathered one ahead, forward and backward, and their gradients reduced and scattered; all
         but the first gather of each pass hide behind the computation
branch   images on one device, texts and fusion on another, with the best cut of the image branch: simulated piece by
         piece. More than two devices are predicted as data parallel pairs, which mmlab does not run

Not modelled: memory, caches, and devices that slow each other down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from mmlab.errors import OptionError, check_name, check_numbers

STRATEGIES = ("single", "reduce", "ddp", "fsdp", "branch")
PARTS = ("image", "text", "fusion")  # of a step; "fusion" includes the heads and the losses
_BUCKET_BYTES = 25 * 2**20  # of torch's DistributedDataParallel
_NUM_UNITS = 12  # blocks that `fsdp` gathers one by one


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a linear function: of samples for a computation, of bytes and messages for communication.

    >>> Line(0.5, 0.25)(4)
    1.5
    """

    fixed_s: float  # of a pass, or of a message
    each_s: float  # of a sample, or of a byte

    def __call__(self, number: float, pieces: float = 1) -> float:
        return pieces * self.fixed_s + number * self.each_s

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float, float]]) -> Line:
        """Fit (pieces, number, seconds) by least squares of relative errors; neither coefficient is negative."""
        from scipy.optimize import nnls

        table = np.array(points, dtype=float)
        found, _ = nnls(table[:, :2] / table[:, 2:], np.ones(len(table)))
        return cls(*map(float, found))


Network = Mapping[str, Line]  # by collective: all_reduce, all_gather, reduce_scatter and send


def exchange_s(
    network: Network, collective: str, num_bytes: float, num_devices: int = 2, num_parts: int = 1
) -> float:
    """Seconds of a collective over a tensor of `num_bytes` that is sent in `num_parts` parts."""
    if num_devices < 2 or not num_bytes:
        return 0.0
    messages, sent_bytes = ring(collective, num_bytes, num_devices)
    return network[collective](sent_bytes, num_parts * messages)


def ring(collective: str, num_bytes: float, num_devices: int) -> tuple[int, float]:
    """Messages and bytes that each device sends for one collective over a tensor of `num_bytes`, in a ring of devices.

    >>> ring("all_reduce", 1000, 4)
    (6, 1500.0)
    """
    if collective == "send":
        return 1, num_bytes
    rounds = (num_devices - 1) * (2 if collective == "all_reduce" else 1)
    return rounds, rounds * num_bytes / num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one device's work in a step, part by part, and the sizes of what is sent."""

    forward: Mapping[str, Line]  # by part, over the samples of a micro-batch
    backward: Mapping[str, Line]
    gradient_bytes: Mapping[str, float]  # by part
    optimizer_s: float  # for all parameters
    other_s: float  # of the trainer itself: counting, clipping, the event
    image_output_bytes: float  # per sample, from the image branch to fusion and losses
    image_layer_bytes: float  # per sample, between two layers of the image encoder
    num_image_layers: int = 0  # layers between which the image branch can be cut; 0 if it cannot

    def part_s(self, part: str, num_samples: float) -> float:
        """Seconds of the forward and backward pass of one part."""
        return self.forward[part](num_samples) + self.backward[part](num_samples)

    def step_s(self, num_samples: float) -> float:
        """Seconds of a step of one micro-batch on one device."""
        return sum(self.part_s(part, num_samples) for part in PARTS) + self.optimizer_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of one strategy."""

    strategy: str
    num_devices: int
    num_samples: float  # of the step, over all devices
    step_s: float
    sent_bytes: float  # by the device that sends most
    image_layers: int | None = None  # best cut of `branch`; None leaves the image branch whole

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s


def predict(
    strategy: str,
    costs: StepCosts,
    network: Network,
    *,
    num_devices: int,
    batch_size: float,
    num_micro_batches: int = 1,
    hides: bool = True,
    ahead: int = 1,
) -> Prediction:
    """Predict a step.

    Args:
        batch_size: samples per device.
        num_micro_batches: number of micro-batches of each device (data parallel), or of a pair of devices
            (`branch`).
        hides: whether gradients are sent while a device computes, as on GPUs. On a CPU both need the same
            cores.
        ahead: number of micro-batches that the image device may be ahead (`branch`).

    Raises:
        OptionError: an unknown strategy, a number out of range, or a number of devices that it cannot use.
    """
    check_name("strategy", strategy, STRATEGIES)
    check_numbers({"num_devices": num_devices, "micro_batches": num_micro_batches, "ahead": ahead})
    if not batch_size > 0:
        raise OptionError(f"batch_size must be above 0, found {batch_size}")
    if strategy == "branch" and num_devices > 1:
        if num_devices % 2:
            raise OptionError(f"branch takes pairs of devices: num_devices must be even, found {num_devices}")
        cuts = (None, *range(1, costs.num_image_layers))
        pair = (num_devices // 2, 2 * batch_size, num_micro_batches, ahead)
        return min((_branch(costs, network, *pair, cut) for cut in cuts), key=lambda found: found.step_s)
    num_devices = 1 if strategy == "single" else num_devices
    size, gradient_bytes = batch_size / num_micro_batches, sum(costs.gradient_bytes.values())
    forward_s = sum(line(size) for line in costs.forward.values())
    backward_s = sum(line(size) for line in costs.backward.values())
    computing_s, update_s = num_micro_batches * (forward_s + backward_s), costs.optimizer_s
    sent_bytes = ring("all_reduce", gradient_bytes, num_devices)[1]

    def seconds(collective: str, num_parts: int) -> float:
        return exchange_s(network, collective, gradient_bytes, num_devices, num_parts)

    # time of all sending, the part that nothing hides, and the computation that hides the rest
    if strategy == "fsdp" and num_devices > 1:
        gathers_s = 2 * num_micro_batches * seconds("all_gather", _NUM_UNITS)
        sending_s = gathers_s + seconds("reduce_scatter", _NUM_UNITS)
        shown_s, behind_s = gathers_s / _NUM_UNITS, computing_s
        update_s /= num_devices
        sent_bytes *= num_micro_batches + 0.5  # a gather or a scatter is half an all-reduce
    else:
        num_buckets = ceil(gradient_bytes / _BUCKET_BYTES) if strategy == "ddp" else 1
        sending_s = seconds("all_reduce", num_buckets)
        shown_s, behind_s = sending_s / max(1, num_buckets), backward_s
    exposed_s = sending_s if not hides or strategy == "reduce" else max(shown_s, sending_s - behind_s)
    return Prediction(
        strategy=strategy,
        num_devices=num_devices,
        num_samples=num_devices * batch_size,
        step_s=computing_s + exposed_s + update_s + costs.other_s,
        sent_bytes=sent_bytes,
    )


def _branch(
    costs: StepCosts,
    network: Network,
    num_pairs: int,
    pair_size: float,
    num_micro_batches: int,
    ahead: int,
    cut: int | None,
) -> Prediction:
    """Pairs of devices: one has the image branch up to the cut, the other the rest of it, texts and fusion.

    Each device and each link does its work in order, and a piece of work starts when its inputs have arrived.
    """
    size = pair_size / num_micro_batches
    # when each device and link becomes free
    free_s = dict.fromkeys(("images", "texts", "features", "gradients"), 0.0)

    def add(place: str, seconds: float, after_s: float = 0.0) -> float:
        free_s[place] = max(free_s[place], after_s) + seconds
        return free_s[place]

    lower = 1.0 if cut is None else cut / costs.num_image_layers  # all layers cost about the same
    sample_bytes = costs.image_output_bytes if cut is None else costs.image_layer_bytes
    send_s = exchange_s(network, "send", size * sample_bytes)
    upper_s = (1 - lower) * costs.part_s("image", size) + costs.part_s("fusion", size)
    grads_s: list[float] = []
    for number in range(num_micro_batches + ahead):
        if number < num_micro_batches:
            encoded_s = add("images", lower * costs.forward["image"](size))
            received_s = add("features", send_s, encoded_s)
            add("texts", costs.forward["text"](size))
            joined_s = add("texts", upper_s, received_s)
            grads_s.append(add("gradients", send_s, joined_s))
            add("texts", costs.backward["text"](size))
        if number >= ahead:
            add("images", lower * costs.backward["image"](size), grads_s[number - ahead])
    all_bytes, image_bytes = sum(costs.gradient_bytes.values()), lower * costs.gradient_bytes["image"]
    own_bytes = {"images": image_bytes, "texts": all_bytes - image_bytes}
    for place, num_bytes in own_bytes.items():
        add(place, exchange_s(network, "all_reduce", num_bytes, num_pairs))
        add(place, costs.optimizer_s * num_bytes / max(1.0, all_bytes))
    return Prediction(
        strategy="branch",
        num_devices=2 * num_pairs,
        num_samples=num_pairs * pair_size,
        step_s=max(free_s.values()) + costs.other_s,
        sent_bytes=pair_size * sample_bytes
        + max(ring("all_reduce", num_bytes, num_pairs)[1] for num_bytes in own_bytes.values()),
        image_layers=cut,
    )
