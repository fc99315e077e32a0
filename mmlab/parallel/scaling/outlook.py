"""The model over many devices and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmlab.parallel.scaling.links import Network
from mmlab.parallel.scaling.predict import predict
from mmlab.parallel.scaling.work import Work

DEVICES = (1, 2, 4, 8, 16, 32, 64)
LOWEST, HIGHEST = 1e6, 1e12  # bytes/s between which winners are looked for


def scaling_rows(
    work: Work, network: Network, strategies: Sequence[str], *, batch_size: float, **options: Any
) -> list[dict[str, Any]]:
    """A row for each strategy and number of devices: step, samples/s, share of linear."""
    alone = batch_size / work.step_s(batch_size)
    rows = []
    for strategy in strategies:
        for num_devices in (1,) if strategy == "single" else DEVICES:
            found = predict(
                strategy, work, network, num_devices=num_devices, batch_size=batch_size, **options
            )
            rows.append(
                {
                    "strategy": strategy,
                    "num_devices": num_devices,
                    "step_s": found.step_s,
                    "exposed_s": found.exposed_s,
                    "sent_bytes": found.sent_bytes,
                    "samples_per_s": found.samples_per_s,
                    "efficiency": found.samples_per_s / (num_devices * alone),
                }
            )
    return rows


def winners(
    work: Work,
    network: Network,
    strategies: Sequence[str],
    *,
    num_devices: int,
    batch_size: float,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    **options: Any,
) -> list[dict[str, Any]]:
    """Which `strategy` is fastest `from` which bandwidth `to` which (bytes/s of `send`), the lowest first.

    `single` stands for leaving the other devices idle.
    """

    def best(log_bandwidth: float) -> str:
        links = network.with_bandwidth(10**log_bandwidth)

        def rate(strategy: str) -> float:
            count = 1 if strategy == "single" else num_devices
            size = batch_size * num_devices / count  # the same samples a step
            return predict(strategy, work, links, num_devices=count, batch_size=size, **options).samples_per_s

        return max(strategies, key=rate)

    grid = np.linspace(np.log10(lowest), np.log10(highest), 81)
    names = [best(place) for place in grid]
    found = [{"strategy": names[0], "from": lowest, "to": highest}]
    for below, above, name, following in zip(grid[:-1], grid[1:], names[:-1], names[1:], strict=True):
        if name != following:
            low, high = float(below), float(above)
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if best(middle) == name else (low, middle)
            found[-1]["to"] = 10**high
            found.append({"strategy": following, "from": 10**high, "to": highest})
    return found
