"""Which strategy is predicted to be the fastest, by the bandwidth between devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from mmlab.parallel.predict import Network, StepCosts, predict

LOWEST, HIGHEST = 1e6, 1e12  # bytes/s between which winners are searched


def with_bandwidth(network: Network, bytes_per_s: float) -> Network:
    """The same links with another bandwidth of `send`; the others change in proportion."""
    factor = 1 / (bytes_per_s * network["send"].each_s)
    return {name: replace(line, each_s=factor * line.each_s) for name, line in network.items()}


def rates(costs: StepCosts, network: Network, strategies: Sequence[str], **sizes: Any) -> dict[str, float]:
    """Samples/s by strategy; `single` leaves the other devices idle and takes all their samples."""
    alone = {**sizes, "num_devices": 1, "batch_size": sizes["batch_size"] * sizes["num_devices"]}
    return {
        name: predict(name, costs, network, **(alone if name == "single" else sizes)).samples_per_s
        for name in strategies
    }


def winners(
    costs: StepCosts, network: Network, strategies: Sequence[str], **sizes: Any
) -> list[dict[str, Any]]:
    """Which of `strategies` is the fastest `from` which bandwidth `to` which (bytes/s of `send`), the lowest first.

    Args:
        sizes: of `predict`.
    """
    grid = np.linspace(np.log10(LOWEST), np.log10(HIGHEST), 121)
    found = [rates(costs, with_bandwidth(network, 10**place), strategies, **sizes) for place in grid]
    names = [max(rate, key=rate.__getitem__) for rate in found]
    changes = [place for place in range(1, len(grid)) if names[place] != names[place - 1]]
    edges = [LOWEST, *(float(10 ** ((grid[place - 1] + grid[place]) / 2)) for place in changes), HIGHEST]
    return [
        {"strategy": names[place], "from": low, "to": high}
        for place, (low, high) in zip([0, *changes], pairwise(edges), strict=True)
    ]
