"""Sharing a plan between ranks: as many batches on each, of nearly equal cost in each step."""

from __future__ import annotations

import numpy as np

from mmlab.errors import OptionError
from mmlab.schedule.plan import Block


def split_evenly(block: Block, world_size: int) -> Block:
    """Halve the largest batches until their number is a multiple of `world_size`; no sample is dropped or repeated.

    Raises:
        OptionError: fewer samples than ranks.
    """
    ends = block.ends
    while missing := -len(ends) % world_size:
        counts = np.diff(ends, prepend=0)
        largest = np.argsort(-counts, kind="stable")[:missing]
        largest = largest[counts[largest] > 1]
        if not len(largest):
            raise OptionError(
                f"{len(block.order)} samples cannot give {world_size} ranks a batch each; "
                f"use a world_size of at most {len(block.order)}"
            )
        ends = np.sort(np.concatenate((ends, ends[largest] - counts[largest] // 2)))
    return Block(block.order, ends)
