"""Filling a cache with Ray Data: blocks of images go to actors, on this machine or on a Ray cluster.

For existing Ray clusters, and for machines without a GPU, which decoding does not need. All machines must
share the folder. The result is bitwise that of `build_cache`: actors call the same code and write the same
file. Needs the extra `ray`; see docs/decisions/0005-ray-builds-through-ray-data.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmlab.errors import OptionError, RunError
from mmlab.loading.cache.build import BLOCK, BuildReport, check_build, image_rows, join_outcomes, make_rows
from mmlab.machine import num_usable_cores, place_in_launch, progress_bar

if TYPE_CHECKING:
    from mmlab.data.dataset import MultimodalDataset


def build_cache_on_ray(dataset: MultimodalDataset, *, num_actors: int | None = None) -> BuildReport:
    """Decode every image that the data set's cache lacks, with Ray; call it in one process.

    A cluster that is connected, or that RAY_ADDRESS names, is used; else one is started on this machine and
    stopped afterwards.

    Args:
        dataset: a `MultimodalDataset` with a `cache`; it is sent to every actor.
        num_actors: actors that decode, with one CPU each; None takes as many as the cluster has CPUs.

    Returns:
        As `build_cache`; `made_by_rank` is by actor.

    Raises:
        OptionError: Ray is not installed, the data set has no cache, `num_actors` is below 1, or `torchrun`
            has started this process.
        RunError: Ray did not start.
    """
    cache, _ = check_build(dataset, num_actors)
    if place_in_launch()[1] > 1:
        raise OptionError("engine 'ray' has own workers: start it once, without torchrun, or leave it out")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OptionError(
            f"engine 'ray' needs Ray, which is not installed ({error}): pip install 'mmlab[ray]'"
        ) from error
    rows = image_rows(cache)
    blocks = [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
    with _cluster(num_actors):
        ray.data.DataContext.get_current().enable_progress_bars = False
        decoders = num_actors or int(ray.cluster_resources()["CPU"])
        # held in memory: tasks that read blocks would wait for the CPUs that the actors occupy
        items = [{"rows": json.dumps(block)} for block in blocks]
        found = ray.data.from_items(items, override_num_blocks=max(1, len(blocks))).map_batches(
            _Maker,
            fn_constructor_args=(ray.put(dataset),),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=min(decoders, max(1, len(blocks)))),
        )
        outcomes: dict[str, dict[str, Any]] = {}  # by actor; counts add up, and so do lists
        with progress_bar(total=len(rows), name="Caching") as bar:
            for row in found.iter_rows() if blocks else ():
                outcome, actor = json.loads(row["outcome"]), row["actor"]
                bar.update(row["num_rows"])
                if (before := outcomes.get(actor)) is not None:
                    outcome = {name: before[name] + value for name, value in outcome.items()}
                outcomes[actor] = outcome
    return join_outcomes(cache, list(outcomes.values()))


class _Maker:
    """One actor: decodes blocks with its own copy of the data set."""

    def __init__(self, dataset: Any) -> None:
        import ray

        self._dataset: MultimodalDataset = ray.get(dataset)
        self._actor = ray.get_runtime_context().get_actor_id()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        blocks = [json.loads(block) for block in batch["rows"]]
        return {
            "outcome": [json.dumps(make_rows(self._dataset, rows, progress=False)) for rows in blocks],
            "num_rows": [len(rows) for rows in blocks],
            "actor": [self._actor] * len(blocks),
        }


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
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports usage to its developers
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
