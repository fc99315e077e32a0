"""Seconds as linear functions: of samples for a computation, of messages and bytes for communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a computation over a number of samples.

    >>> Line(0.5, 0.25)(4)
    1.5
    """

    fixed_s: float
    each_s: float

    def __call__(self, num_samples: float) -> float:
        return self.fixed_s + self.each_s * num_samples

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Fit (samples, seconds) by least squares of relative errors; neither part is negative."""
        return cls(*_fit([(1.0, number, seconds) for number, seconds in points]))


@dataclass(frozen=True, slots=True)
class Link:
    """What carries the messages of one kind of collective."""

    latency_s: float  # of one message
    bytes_per_s: float

    @classmethod
    def fit(cls, probes: Sequence[tuple[float, float, float]]) -> Link:
        """Fit (messages, bytes, seconds), as `Line.fit` does."""
        latency_s, each_s = _fit(probes)
        return cls(latency_s, 1 / max(each_s, 1e-15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between devices by collective; collectives go round a ring of all devices."""

    all_reduce: Link
    all_gather: Link
    reduce_scatter: Link
    send: Link

    def seconds(self, collective: str, num_bytes: float, num_devices: int = 2) -> float:
        """Of one collective over a tensor of `num_bytes`."""
        if num_devices < 2 or not num_bytes:
            return 0.0
        link: Link = getattr(self, collective)
        num_messages, sent_bytes = ring(collective, num_bytes, num_devices)
        return num_messages * link.latency_s + sent_bytes / link.bytes_per_s

    def with_bandwidth(self, bytes_per_s: float) -> Network:
        """The same with another bandwidth of `send`; the other links change in proportion."""
        factor = bytes_per_s / self.send.bytes_per_s
        links = {item.name: getattr(self, item.name) for item in fields(self)}
        return Network(
            **{name: replace(link, bytes_per_s=factor * link.bytes_per_s) for name, link in links.items()}
        )


def ring(collective: str, num_bytes: float, num_devices: int) -> tuple[float, float]:
    """Messages and bytes that each device sends for one collective over a tensor of `num_bytes`.

    >>> ring("all_reduce", 1000, 4)
    (6, 1500.0)
    """
    if collective == "send":
        return 1, num_bytes
    rounds = (num_devices - 1) * (2 if collective == "all_reduce" else 1)
    return rounds, rounds * num_bytes / num_devices


def _fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Non-negative a, b of a x + b y = z, by least squares of relative errors."""
    table = np.array(rows, dtype=float)
    scaled = table[:, :2] / table[:, 2:]
    candidates = [np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)[0]]
    for column in (
        0,
        1,
    ):  # the best fit on either axis: one of these is the answer where the free fit is negative
        axis = np.zeros(2)
        axis[column] = scaled[:, column].sum() / (scaled[:, column] @ scaled[:, column])
        candidates.append(axis)
    allowed = [pair for pair in candidates if (pair >= 0).all()]
    best = min(allowed, key=lambda pair: float(((scaled @ pair - 1) ** 2).sum()))
    return float(best[0]), float(best[1])
