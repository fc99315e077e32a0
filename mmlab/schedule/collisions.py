"""The collision rule: no batch holds two samples of one image, which a contrastive loss would take for negatives.

Captions of one image change places with near neighbours of other batches; those that find none are returned, to be
cut into batches of their own. Costs about a microsecond for each colliding sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmlab.schedule.columns import Block
from mmlab.schedule.metrics import cells

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.cost import MaxPolynomial
    from mmlab.types import SampleSizes

_REACH = 256  # places on either side among which a partner is sought
_MOST_OF_ONE = 32  # samples of one image in a block that are moved about; more are put out at once


def resolve_collisions(
    sizes: SampleSizes, batches: Block, cost: MaxPolynomial, budget: float, *, reach: int = _REACH
) -> tuple[Block, NDArray[np.int64]]:
    """Part samples of one image.

    Args:
        batches: neighbouring batches should have samples of like size.
        cost: what a batch costs, at most `budget` after an exchange.
        reach: places on either side among which a partner is sought; 0 exchanges nothing.

    Returns:
        Batches without collisions, and the rows that had to leave them, which may still collide among themselves.
    """
    from mmlab.schedule._dense_loops import part_images
    from mmlab.schedule._groups import number_groups

    order, batch_of_place = batches.order, batches.batch_of_place
    image, occurrence, num_images = number_groups(sizes.group[order])
    if not occurrence.any():
        return batches, np.empty(0, np.int64)
    crowded = order[occurrence >= _MOST_OF_ONE]
    if len(crowded):
        few = occurrence < _MOST_OF_ONE
        order, batch_of_place, image = order[few], batch_of_place[few], image[few]
    held = part_images(
        sizes.num_tokens[order].astype(np.int64),
        cells(sizes.height[order], cost.patch),
        cells(sizes.width[order], cost.patch),
        image,
        num_images,
        batch_of_place,
        len(batches.ends),
        cost.coefficients,
        cost.exponents,
        budget,
        reach,
    )
    kept = held >= 0
    ends = np.cumsum(np.bincount(batch_of_place[kept], minlength=len(batches.ends)))
    left = np.ones(len(order), dtype=bool)
    left[held[kept]] = False
    rest = Block(order[held[kept]], ends[np.diff(ends, prepend=0) > 0])
    return rest, np.concatenate((order[left], crowded))


def occurrences(sizes: SampleSizes, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) how many earlier rows have the same image; rows of one number never collide."""
    from mmlab.schedule._groups import number_groups

    return number_groups(sizes.group[rows])[1]
