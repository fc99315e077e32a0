"""What the scheduler tests share: sizes to plan, strategies that draw adversarial ones, schedulers in small blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from mmlab.errors import OptionError
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import MaxPolynomial
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler
from mmlab.types import BatchShape, SampleSizes

COCO_LENGTHS = Path(__file__).parents[2] / "data/coco_val2017_lengths.parquet"
BYTES = MaxPolynomial(
    [[5000.0, 3.0, 0.5, 2.0, 0.0], [0.0, 1.0, 1.5, 3.0, 0.25]],
    [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 1), (1, 1, 1)],
    unit="bytes",
)
PAIRS = MaxPolynomial(
    [[3000.0, 2.0, 0.5, 8.0], [9000.0, 1.0, 0.7, 0.0]],
    [(0, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0)],
    unit="bytes",
)
TIME = MaxPolynomial(  # a small model on two cores
    [[0.034, 0.0009, 21e-6, 21e-6]], [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1)], unit="seconds"
)


def make_sizes(num_samples: int, *, seed: int = 0, captions: int = 5, most_patches: int = 24) -> SampleSizes:
    """Sizes as an image-text data set has them: captions of one image share its size."""
    rng = np.random.default_rng(seed)
    image = np.arange(num_samples) // captions
    height, width = (16 * rng.integers(4, most_patches + 1, num_samples)[image] for _ in range(2))
    tokens = np.clip(rng.lognormal(2.6, 0.5, num_samples), 3, 200)
    return SampleSizes(num_tokens=tokens.astype(np.int32), height=height, width=width, group=image)


@st.composite
def any_sizes(draw: st.DrawFn, min_samples: int = 0, max_samples: int = 120) -> SampleSizes:
    """All equal, 1 x 1 images, missing texts or images, few images with many captions, unknown groups, one giant."""
    num_samples = draw(st.integers(min_samples, max_samples))
    column = st.lists(st.integers(0, 60), min_size=num_samples, max_size=num_samples)
    same = st.integers(0, 60).map(lambda value: [value] * num_samples)
    sides = st.lists(st.sampled_from([0, 1, 16, 17, 100, 224]), min_size=num_samples, max_size=num_samples)
    tokens, height, width = draw(column | same), draw(sides), draw(sides)
    most = draw(st.sampled_from([0, 1, 7, 10**12]))
    group = draw(st.lists(st.integers(-1, most), min_size=num_samples, max_size=num_samples))
    if num_samples and draw(st.booleans()):
        tokens[0], height[0], width[0] = 500, 1000, 1000
    height = [side if other else 0 for side, other in zip(height, width, strict=True)]
    width = [side if other else 0 for side, other in zip(width, height, strict=True)]
    return SampleSizes(num_tokens=tokens, height=height, width=width, group=group)


def any_scheduler(name: str, sizes: SampleSizes, **options: object) -> Scheduler:
    """A scheduler of this name with a budget that the sizes respect."""
    if name == "memory":
        options |= {"cost": BYTES, "budget": 1.1 * BYTES(largest_shape(sizes)) + 20_000}
    elif name == "fastest":
        options |= {"cost": BYTES, "budget": 1.1 * BYTES(largest_shape(sizes)) + 20_000, "time": TIME}
    elif name in ("budget", "packed"):
        options |= {"budget": 4200 + 300}
    return make_scheduler(name, **options)


def largest_shape(sizes: SampleSizes) -> BatchShape:
    """A batch of one sample that is as large as the largest in every dimension."""
    columns = (sizes.num_tokens, sizes.height, sizes.width)
    return BatchShape(1, *(int(column.max(initial=0)) for column in columns))


def in_blocks(scheduler: Scheduler, block_size: int) -> Scheduler:
    """The same scheduler, planning so many samples at a time."""
    kind = type(scheduler)
    small = type(kind.__name__, (kind,), {"block_size": lambda self, num_samples: block_size})
    return small(**{name: getattr(scheduler, name) for name in kind.__dataclass_fields__})


def rows_of(batches: Sequence[Sequence[int]]) -> list[int]:
    """Every row in every batch, in order."""
    return [row for batch in batches for row in batch]


NAMES = sorted(SCHEDULERS)


def assume_even(plan: BatchPlan) -> None:
    """Give up on an example whose samples are too few, too large or too alike for the same number of batches a rank."""
    try:
        len(plan)
    except OptionError as error:
        assert "cannot be split into" in str(error)  # noqa: PT017
        reject()
