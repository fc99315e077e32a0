"""The collision rule: no batch holds two samples of one image, which a contrastive loss would take for negatives.

Captions of one image change places with near neighbours of other batches, or move there; those that can do neither are
returned, to be cut into batches of their own. Costs about a microsecond for each colliding sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mmlab.schedule.columns import Block, Ints, images_apart, stable_order
from mmlab.schedule.cost import FREE, MaxPolynomial
from mmlab.schedule.metrics import sides
from mmlab.types import SampleSizes

_MOST_OF_ONE = 32  # samples of one image in a block that may be exchanged; any more are removed at once


class Images(NamedTuple):
    """Which of n samples share an image."""

    number: Ints  # (n,) of the image, from 0 in order of appearance
    occurrence: Ints  # (n,) how many earlier samples have the same image
    members: Ints  # (n,) the samples, image after image
    starts: Ints  # (images + 1,) where each image begins in `members`


def images_of(sizes: SampleSizes, rows: Ints) -> Images:
    """Group samples by image."""
    import pandas as pd

    places, number = np.arange(len(rows)), pd.factorize(images_apart(sizes.group[rows]))[0]
    members, starts = stable_order(number), np.append(0, np.cumsum(np.bincount(number)))
    occurrence = np.empty_like(members)
    occurrence[members] = places - starts[number[members]]
    return Images(number, occurrence, members, starts)


def resolve_collisions(
    sizes: SampleSizes,
    batches: Block,
    objective: MaxPolynomial,
    cut: Callable[[Ints, Ints], Block],
    *,
    limit: MaxPolynomial = FREE,
    budget: float = np.inf,
    max_size: int = 0,
) -> Block:
    """Separate samples of one image.

    Args:
        batches: neighbouring batches should have samples of similar size.
        objective: the cost that should grow little.
        cut: makes batches of the rows that were removed from theirs, given a turn (n,) for each: samples of
            one turn are all of different images.
        limit: what a batch costs, at most `budget` afterwards.
        max_size: samples that a batch may grow to; 0 lets samples only change places.
    """
    from mmlab.schedule._dense_loops import separate_samples

    order, batch_of, images = batches.order, batches.batch_of_place, images_of(sizes, batches.order)
    if not images.occurrence.any():
        return batches
    few = images.occurrence < _MOST_OF_ONE
    crowded = order[~few]
    if len(crowded):
        order, batch_of = order[few], batch_of[few]
        images = images_of(sizes, order)
    size = np.stack(sides(sizes, objective.patch, order), axis=1)
    separate_samples(
        size, images.number, images.members, images.starts, batch_of, len(batches.ends),
        limit.columns, objective.columns, budget, max_size,
    )  # fmt: skip
    by_batch = stable_order(batch_of)
    num_out = int((batch_of < 0).sum())
    ends = np.cumsum(np.bincount(batch_of[batch_of >= 0], minlength=len(batches.ends)))
    rest = Block(order[by_batch[num_out:]], ends[np.diff(ends, prepend=0) > 0])
    removed = np.concatenate((order[by_batch[:num_out]], crowded))
    return Block.join([rest, cut(removed, images_of(sizes, removed).occurrence)]) if len(removed) else rest
