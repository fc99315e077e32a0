"""The schedulers by name.

`make_scheduler("budget", budget=8192).plan(records)` gives a `BatchPlan`, which a torch DataLoader takes as its
`batch_sampler`. `Mixed` and `Weighted` are not in the table: they choose the samples of an epoch, and any scheduler of
the table then forms the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.errors import check_name
from mmlab.schedule.base import Scheduler
from mmlab.schedule.classic import AspectBucket, BatchScheduler, Bucket, LengthGrouped, Random
from mmlab.schedule.dense import Budget, Fastest, Memory
from mmlab.schedule.packed import Packed

SCHEDULERS: dict[str, type[Scheduler]] = {
    "random": Random,
    "sorted": BatchScheduler,
    "bucket": Bucket,
    "length_grouped": LengthGrouped,
    "aspect_bucket": AspectBucket,
    "budget": Budget,
    "memory": Memory,
    "fastest": Fastest,
    "packed": Packed,
}


def scheduler_type(name: str) -> type[Scheduler]:
    """The class behind a name in `SCHEDULERS`.

    Raises:
        OptionError: an unknown name.
    """
    check_name("scheduler", name, SCHEDULERS)
    return SCHEDULERS[name]


def make_scheduler(name: str, **options: Any) -> Scheduler:
    """A scheduler by its name in `SCHEDULERS`.

    >>> make_scheduler("random", batch_size=4)
    Random(seed=0, world_size=1, batch_size=4, allow_collisions=True)

    Raises:
        OptionError: an unknown name, an option that this scheduler does not have, or a value out of range.
    """
    kind = scheduler_type(name)
    for option in options:
        check_name(f"option of the {name} scheduler", option, kind.__dataclass_fields__)
    return kind(**options)


def scheduler_among(name: str, options: Mapping[str, Any]) -> Scheduler:
    """A scheduler by its name, with those of the options that it has; the others are for other schedulers.

    >>> scheduler_among("sorted", {"batch_size": 4, "temperature": 0.5})
    BatchScheduler(seed=0, world_size=1, batch_size=4, allow_collisions=True)

    Raises:
        OptionError: an unknown name, or a value out of range.
    """
    kind = scheduler_type(name)
    return kind(**{option: value for option, value in options.items() if option in kind.__dataclass_fields__})
