"""Seconds as lines in what is done: samples of a computation, messages and bytes of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of so many samples: a fixed part and a part for each.

    >>> Line(0.5, 0.25)(4)
    1.5
    """

    fixed_s: float
    each_s: float

    def __call__(self, num_samples: float) -> float:
        return self.fixed_s + self.each_s * num_samples

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Least squares, relative, with neither part below zero, on (number, seconds)."""
        fixed, each = _fit([(1.0, number, seconds) for number, seconds in points])
        return cls(fixed, each)


@dataclass(frozen=True, slots=True)
class Link:
    """What carries the messages of one kind of collective."""

    latency_s: float  # of one message
    bytes_per_s: float

    def seconds(self, num_messages: float, num_bytes: float) -> float:
        """Of so many messages, one after the other, that carry so many bytes together."""
        return num_messages * self.latency_s + num_bytes / self.bytes_per_s

    @classmethod
    def fit(cls, probes: Sequence[tuple[float, float, float]]) -> Link:
        """Least squares, relative, on (messages, bytes, seconds)."""
        latency, each = _fit(probes)
        return cls(latency, 1 / max(each, 1e-15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links by collective; a ring of n devices sends in n - 1 or 2 (n - 1) messages."""

    all_reduce: Link
    all_gather: Link
    reduce_scatter: Link
    send: Link
    copy: Link  # inside a device

    def seconds(self, collective: str, num_bytes: float, num_devices: int) -> float:
        """Of one collective over `num_bytes`, the whole tensor's."""
        if num_devices < 2 or not num_bytes:
            return 0.0
        link: Link = getattr(self, collective)
        return link.seconds(*ring(collective, num_bytes, num_devices))

    def with_bandwidth(self, bytes_per_s: float) -> Network:
        """The same latencies and ratios between the collectives, at another bandwidth of `send`."""
        factor = bytes_per_s / self.send.bytes_per_s
        links = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "copy"}
        faster = {name: replace(link, bytes_per_s=factor * link.bytes_per_s) for name, link in links.items()}
        return Network(**faster, copy=self.copy)


def ring(collective: str, num_bytes: float, num_devices: int) -> tuple[float, float]:
    """Messages and bytes that each device sends for one collective over a tensor of `num_bytes`.

    >>> ring("all_reduce", 1000, 4)
    (6, 1500.0)
    """
    if collective in ("send", "copy"):
        return 1, num_bytes
    rounds = (num_devices - 1) * (2 if collective == "all_reduce" else 1)
    return rounds, rounds * num_bytes / num_devices


def _fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Non-negative a, b of a x + b y = z, by least squares of relative errors."""
    table = np.array(rows, dtype=float)
    scaled = table[:, :2] / table[:, 2:]
    both, *_ = np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)
    if (both >= 0).all() and np.linalg.matrix_rank(scaled) == 2:
        return float(both[0]), float(both[1])
    candidates = []
    for column in (0, 1):
        x = scaled[:, column]
        factor = float(x.sum() / (x @ x))
        pair = (factor, 0.0) if column == 0 else (0.0, factor)
        candidates.append((float(((scaled @ np.array(pair) - 1) ** 2).sum()), pair))
    return min(candidates)[1]
