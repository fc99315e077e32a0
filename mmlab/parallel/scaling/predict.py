"""One step of one strategy on any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from mmlab.errors import OptionError, unknown_name
from mmlab.parallel.scaling.links import Network, ring
from mmlab.parallel.scaling.work import Work

STRATEGIES = ("single", "reduce", "ddp", "fsdp", "branch")
_MIB = 2**20
_FIRST_BUCKET_BYTES = _MIB  # of torch's DistributedDataParallel, so that reducing starts early


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of one strategy."""

    strategy: str
    num_devices: int
    batch_size: float  # samples a device
    step_s: float
    exposed_s: float  # of it, communication that no computation hides
    sent_bytes: float  # by the device that sends most

    @property
    def samples_per_s(self) -> float:
        return self.num_devices * self.batch_size / self.step_s


def predict(
    strategy: str,
    work: Work,
    network: Network,
    *,
    num_devices: int,
    batch_size: float,
    overlap: float = 1.0,
    straggler: float = 0.0,
    bucket_bytes: float = 25 * _MIB,
    num_units: int = 12,
) -> Prediction:
    """Step time of a strategy.

    Args:
        batch_size: samples a device; a pair of branches shares those of two devices.
        overlap: share of hidden communication that costs the computation nothing; 1 where a link of its own carries it.
        straggler: share of the step that ranks wait for the fullest batch, as plans report it.
        bucket_bytes: of `ddp`.
        num_units: blocks that `fsdp` gathers one by one.

    Raises:
        OptionError: an unknown strategy, or a number of devices that it cannot use.
    """
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if num_devices < 1 or (strategy == "branch" and num_devices > 1 and num_devices % 2):
        raise OptionError(f"{strategy} cannot use {num_devices} devices; branch takes them in pairs")
    if strategy == "single" or num_devices == 1:
        step_s, exposed_s, sent = work.step_s(batch_size), 0.0, 0.0
        return Prediction(
            strategy=strategy,
            num_devices=1,
            batch_size=batch_size,
            step_s=step_s,
            exposed_s=0.0,
            sent_bytes=0.0,
        )
    if strategy == "branch":
        step_s, exposed_s, sent = min(
            _branches(work, network, 2 * batch_size, num_devices // 2, overlap, bucket_bytes, host)
            for host in ("image", "text")
        )
    else:
        slower = work.scaled(1 / (1 - straggler))
        step_s, exposed_s, sent = _data_parallel(
            strategy, slower, network, batch_size, num_devices, overlap, bucket_bytes, num_units
        )
    return Prediction(
        strategy=strategy,
        num_devices=num_devices,
        batch_size=batch_size,
        step_s=step_s,
        exposed_s=exposed_s,
        sent_bytes=sent,
    )


def _data_parallel(
    strategy: str,
    work: Work,
    network: Network,
    batch_size: float,
    num_devices: int,
    overlap: float,
    bucket_bytes: float,
    num_units: int,
) -> tuple[float, float, float]:
    """Seconds of the step, of them exposed, bytes sent."""
    forward_s = sum(getattr(work, f"{part}_forward")(batch_size) for part in ("image", "text", "fusion"))
    size = work.gradient_bytes
    if strategy == "fsdp":
        backward_s = sum(work.branches_s(batch_size).values()) - forward_s
        gather_s = num_units * network.seconds("all_gather", size / num_units, num_devices)
        scatter_s = num_units * network.seconds("reduce_scatter", size / num_units, num_devices)
        copy_s = num_units * network.seconds(
            "copy", size / num_units, num_devices
        )  # out of, or into, flat buffers
        first = _hidden(forward_s, gather_s, num_units, overlap) + copy_s
        second = _hidden(backward_s, gather_s + scatter_s, num_units, overlap) + 2 * copy_s
        exposed_s = first + second
        sent = 2 * ring("all_gather", size, num_devices)[1] + ring("reduce_scatter", size, num_devices)[1]
        return (
            forward_s + backward_s + exposed_s + work.optimizer_s / num_devices + work.other_s,
            exposed_s,
            sent,
        )
    backward = [
        (part_bytes, getattr(work, f"{part}_backward")(batch_size))
        for part, part_bytes in (
            ("fusion", work.fusion_bytes),
            ("text", work.text_bytes),
            ("image", work.image_bytes),
        )
    ]
    backward_s = sum(seconds for _, seconds in backward)
    exposed_s = (
        network.seconds("all_reduce", size, num_devices) + 2 * network.seconds("copy", size, num_devices)
        if strategy == "reduce"
        else _reduced_behind(backward, network, num_devices, overlap, bucket_bytes)
    )
    step_s = forward_s + backward_s + exposed_s + work.optimizer_s + work.other_s
    return step_s, exposed_s, ring("all_reduce", size, num_devices)[1]


def _hidden(compute_s: float, comm_s: float, num_units: int, overlap: float) -> float:
    """What communication adds to a pass, when all but the first unit's may run beside the computation."""
    first = comm_s / num_units
    hidden = min(compute_s, comm_s - first)
    return comm_s - hidden + (1 - overlap) * hidden


def _reduced_behind(
    backward: Sequence[tuple[float, float]],
    network: Network,
    num_devices: int,
    overlap: float,
    bucket_bytes: float,
) -> float:
    """What reducing in buckets adds to a backward pass, given as (gradient bytes, seconds) of its parts in order."""
    total_bytes, total_s = sum(size for size, _ in backward), sum(seconds for _, seconds in backward)
    ends = np.cumsum([0.0, *(size for size, _ in backward)])
    times = np.cumsum([0.0, *(seconds for _, seconds in backward)])
    first = min(_FIRST_BUCKET_BYTES, bucket_bytes, total_bytes)
    num_more = ceil((total_bytes - first) / bucket_bytes - 1e-9)
    marks = [first, *(min(total_bytes, first + (index + 1) * bucket_bytes) for index in range(num_more))]
    link_free_s, done, comm_s = 0.0, 0.0, 0.0
    for mark in marks:
        ready_s = float(np.interp(mark, ends, times))
        seconds = network.seconds("all_reduce", mark - done, num_devices)
        link_free_s = max(link_free_s, ready_s) + seconds
        comm_s, done = comm_s + seconds, mark
    exposed_s = max(0.0, link_free_s - total_s)
    return exposed_s + (1 - overlap) * (comm_s - exposed_s)


def _branches(
    work: Work,
    network: Network,
    batch_size: float,
    num_pairs: int,
    overlap: float,
    bucket_bytes: float,
    host: str,
) -> tuple[float, float, float]:
    """The same of a pair of devices, the fusion beside `host`."""
    guest = "text" if host == "image" else "image"
    feature_bytes = batch_size * getattr(work, f"{guest}_feature_bytes")
    send_s = network.seconds("send", feature_bytes, 2)
    forward_s = {part: getattr(work, f"{part}_forward")(batch_size) for part in ("image", "text")}
    backward_s = {part: getattr(work, f"{part}_backward")(batch_size) for part in ("image", "text")}
    fusion_s = work.fusion_forward(batch_size) + work.fusion_backward(batch_size)
    sizes = {host: getattr(work, f"{host}_bytes") + work.fusion_bytes, guest: getattr(work, f"{guest}_bytes")}

    def step_s(send_s: float, pairs: int) -> float:
        fused_s = max(forward_s[host], forward_s[guest] + send_s) + fusion_s
        starts = {host: fused_s, guest: fused_s + send_s}
        return work.other_s + max(
            starts[part]
            + backward_s[part]
            + work.optimizer_s * sizes[part] / work.gradient_bytes
            + _reduced_behind([(sizes[part], backward_s[part])], network, pairs, overlap, bucket_bytes)
            for part in sizes
        )

    found_s = step_s(send_s, num_pairs)
    sent = feature_bytes + max(ring("all_reduce", size, num_pairs)[1] for size in sizes.values())
    return found_s, found_s - step_s(0.0, 1), sent
