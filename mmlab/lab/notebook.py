"""What the notebooks need and the library does not: sizes for a quick run, a stopwatch, a large set of sizes to plan.

Costs nothing to import. Nothing here is used by the rest of mmlab.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from mmlab.data.synthetic.scenes import draw_size
from mmlab.types import SampleSizes

Value = TypeVar("Value")


def smoke(small: Value, full: Value) -> Value:
    """`small` where the environment says MMLAB_SMOKE=1, as it does when notebooks are tested, else `full`."""
    return small if os.environ.get("MMLAB_SMOKE") == "1" else full


class Stopwatch:
    """Seconds by name; a name that comes again adds up.

    >>> watch = Stopwatch()
    >>> for _ in range(2):
    ...     with watch("sleep"):
    ...         time.sleep(0.01)
    >>> 0.02 <= watch.seconds["sleep"] < 1
    True
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def draw_sizes(num_images: int, *, captions_per_image: int = 5, seed: int = 0) -> SampleSizes:
    """Sizes and lengths as COCO has them, for planning at a scale that needs no files.

    Image sizes are those of `mmlab data make`. Text lengths follow 8 + a gamma distribution with COCO's mean (13.4
    tokens), deviation (2.6) and 99th percentile (22); the tail above it is thinner than COCO's.

    >>> len(draw_sizes(20))
    100

    Args:
        captions_per_image: samples that share an image.
    """
    rng = random.Random(seed)
    width, height = np.array([draw_size(rng) for _ in range(num_images)], dtype=np.int32).reshape(-1, 2).T
    image = np.repeat(np.arange(num_images), captions_per_image)
    text = 8 + np.random.default_rng(seed).gamma(4.3, 1.25, size=len(image))
    return SampleSizes(num_tokens=np.rint(text), height=height[image], width=width[image], group=image)
