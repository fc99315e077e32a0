"""Filling a cache by Ray Data: blocks of images go to actors, on this machine or on a Ray cluster.

For clusters that Ray already runs, and for machines that are no GPU nodes: decoding needs none. The folder must be one
that all machines share. What is made is bitwise what `build_cache` makes: actors call the same code, and each writes
shards of its own. Needs the extra `ray`; see docs/decisions/0005-ray-builds-through-ray-data.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from mmlab.errors import OptionError, RunError
from mmlab.loading.cache.build import (
    Blocks,
    BuildReport,
    Cached,
    check_build,
    join_outcomes,
    make_rows,
    outcome_of,
)
from mmlab.machine import num_usable_cores


def build_cache_on_ray(
    dataset: Cached, *, num_actors: int | None = None, progress: bool = True
) -> BuildReport:
    """Make every sample that the data set's cache has not, by Ray; call it in one process.

    A cluster that is connected, or that RAY_ADDRESS names, is used; else one is started on this machine for the while.

    Args:
        dataset: a `MultimodalDataset` with a `cache`; it is sent to every actor.
        num_actors: decoders, of one CPU each; None takes as many as the cluster has CPUs.
        progress: show a bar if stderr is a terminal.

    Returns:
        As `build_cache`; `made_by_rank` is by actor.

    Raises:
        OptionError: Ray is not installed, the data set has no cache, not one actor is asked for, or `torchrun` has
            started this process.
        RunError: Ray did not start.
    """
    check_build(dataset, num_actors)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError(
            "engine 'ray' has its own workers: start it once, without torchrun, or leave the engine out"
        )
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OptionError(
            f"engine 'ray' needs Ray, which is not here ({error}): pip install 'mmlab[ray]'"
        ) from error
    blocks = Blocks(dataset.records)
    with _cluster(num_actors):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        decoders = num_actors or int(ray.cluster_resources()["CPU"])
        # held in memory: blocks that had to be read would wait for the CPUs that the actors have
        numbers = ray.data.from_items(range(len(blocks)), override_num_blocks=max(1, len(blocks)))
        found = numbers.map_batches(
            _Maker,
            fn_constructor_args=(ray.put(dataset),),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(decoders, max(1, len(blocks)))),
        )
        outcomes: dict[str, list[dict[str, Any]]] = {}
        with tqdm(total=len(dataset.records), desc="Caching", disable=None if progress else True) as bar:
            for row in found.iter_rows():
                outcome = json.loads(row["outcome"])
                bar.update(outcome.pop("num_samples"))
                outcomes.setdefault(outcome.pop("actor"), []).append(outcome)
    return join_outcomes(dataset, [_sum(parts) for parts in outcomes.values()])


class _Maker:
    """One actor: makes blocks with a data set of its own."""

    def __init__(self, dataset: Any) -> None:
        import ray

        self._dataset: Cached = ray.get(dataset)
        self._blocks = Blocks(self._dataset.records)
        self._actor = ray.get_runtime_context().get_actor_id()

    def __call__(self, batch: dict[str, NDArray[np.int64]]) -> dict[str, list[str]]:
        return {"outcome": [json.dumps(self._make(int(number))) for number in batch["item"]]}

    def _make(self, number: int) -> dict[str, Any]:
        cache, _ = check_build(self._dataset, None)
        before, rows = cache.stats(), self._blocks.rows(number)
        bad_samples = make_rows(self._dataset, rows)
        outcome = outcome_of(before, cache.stats(), bad_samples)
        return {**outcome, "num_samples": len(rows), "actor": self._actor}


def _sum(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """One actor's outcomes as one; counts add up, and so do lists."""
    return {name: sum((part[name] for part in outcomes[1:]), outcomes[0][name]) for name in outcomes[0]}


@contextmanager
def _cluster(num_actors: int | None) -> Iterator[None]:
    """The cluster that is connected or named, or else one on this machine for as long as it is needed."""
    import ray

    if ray.is_initialized():
        yield
        return
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers of this machine
        try:
            ray.init(
                address="local",
                num_cpus=num_actors or num_usable_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # Ray raises no narrower one when its processes are too slow
            raise RunError(f"Ray did not start: {error}; try again when the machine is less busy") from error
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        ray.shutdown()
