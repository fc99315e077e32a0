"""The schedulers by name.

`make_scheduler("budget", budget=8192).plan(records)` gives a `BatchPlan`, which a torch DataLoader takes as its
`batch_sampler`. `Weighted` is not in the table, because its weights are a column of the data and not an option.
"""

from __future__ import annotations

from typing import Any

from mmlab.errors import OptionError, unknown_name
from mmlab.schedule.base import Scheduler
from mmlab.schedule.classic import AspectBucket, BatchScheduler, Bucket, LengthGrouped, Random
from mmlab.schedule.dense import Budget, Memory
from mmlab.schedule.mixing import Mixed
from mmlab.schedule.packed import Packed

SCHEDULERS: dict[str, type[Scheduler]] = {
    "random": Random,
    "sorted": BatchScheduler,
    "bucket": Bucket,
    "length_grouped": LengthGrouped,
    "aspect_bucket": AspectBucket,
    "budget": Budget,
    "memory": Memory,
    "packed": Packed,
    "mixed": Mixed,
}


def scheduler_type(name: str) -> type[Scheduler]:
    """The class behind a name in `SCHEDULERS`.

    Raises:
        OptionError: an unknown name.
    """
    if name not in SCHEDULERS:
        raise unknown_name("scheduler", name, SCHEDULERS)
    return SCHEDULERS[name]


def make_scheduler(name: str, **options: Any) -> Scheduler:
    """A scheduler by its name in `SCHEDULERS`.

    `inner` of `mixed` is a scheduler or the name of one, which then takes the options that `mixed` does not have.

    >>> make_scheduler("random", batch_size=4)
    Random(seed=0, world_size=1, batch_size=4, allow_collisions=True)
    >>> make_scheduler("mixed", inner="bucket", batch_size=16).inner.batch_size
    16

    Raises:
        OptionError: an unknown name, an option that this scheduler does not have, or a value out of range.
    """
    kind = scheduler_type(name)
    known = kind.__dataclass_fields__
    own = {option: value for option, value in options.items() if option in known}
    others = {option: value for option, value in options.items() if option not in known}
    inner = own.get("inner", "budget")
    if "inner" in known and isinstance(inner, str):
        own["inner"] = make_scheduler(inner, **others)
    elif others:
        raise OptionError(
            f"scheduler {name!r} has no option {next(iter(others))!r}; it has {', '.join(sorted(known))}"
        )
    return kind(**own)
