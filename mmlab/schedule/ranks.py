"""Sharing a plan between ranks: the same number of batches for each, and little waiting in each step.

The batches of one step, one per rank, are neighbours in the plan. Nothing is communicated: every rank makes
the same plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError
from mmlab.schedule.columns import Block, Ints
from mmlab.schedule.metrics import correlation

_TRIED_ORDERS = 4


def split_evenly(batches: Block, world_size: int) -> Block:
    """Halve the largest batches until their number is a multiple of `world_size`; no sample is dropped or repeated.

    Raises:
        OptionError: too few samples to split.
    """
    return split_steps(batches, -(-len(batches.ends) // world_size) * world_size)


def split_steps(batches: Block, num_steps: int, world_size: int = 1) -> Block:
    """Halve every batch of the largest steps, which makes two steps of each, until there are `num_steps`.

    So the batches that ranks train in one step stay as alike in cost, and in modality, as they were.

    Args:
        batches: step after step, `world_size` batches each.

    Raises:
        OptionError: too few samples to split.
    """
    while missing := num_steps - len(batches.ends) // world_size:
        smallest = batches.counts.reshape(-1, world_size).min(axis=1)
        largest = np.argsort(-smallest, kind="stable")[:missing]
        largest = largest[smallest[largest] > 1]
        if not len(largest):
            raise OptionError(
                f"{len(batches.order)} samples in {len(batches.ends)} batches cannot be split into {num_steps * world_size}, "
                "the same number for each rank; use fewer ranks, or give more samples"
            )
        num_parts = np.ones_like(smallest)
        num_parts[largest] = 2
        num_parts = num_parts.repeat(world_size)
        middles = (batches.ends - batches.counts // 2)[num_parts == 2]
        # (steps, ranks) the first part of each batch
        firsts = (np.cumsum(num_parts) - num_parts).reshape(-1, world_size)
        parts = np.concatenate((firsts, firsts[largest] + 1))
        halved = Block(batches.order, np.sort(np.concatenate((batches.ends, middles))))
        batches = halved.pick(parts[np.argsort(parts[:, 0])].ravel())
    return batches


def shorten_last_step(packs: Block, sample_work: Ints, world_size: int) -> Block:
    """Split the emptiest packs until the number of packs is a multiple of `world_size`; the parts make one short step.

    A part holds samples of one pack only, so it exceeds no room and holds no collision that its pack did not.

    Args:
        sample_work: (n,) work of each sample, in the packs' order.
    """
    num_over = len(packs.ends) % world_size
    if not num_over:
        return packs
    pack_work = packs.totals(sample_work)
    split = np.argsort(pack_work, kind="stable")[:num_over]
    parts = np.ones(num_over, dtype=np.int64)
    for _ in range(world_size - num_over):
        parts[np.argmax(np.where(parts < packs.counts[split], pack_work[split] / parts, 0))] += 1
    if (parts > packs.counts[split]).any():
        return packs  # too few samples in them; `split_evenly` finds others
    pieces = []
    for pack, num_parts in zip(split, parts, strict=True):
        places = np.arange(packs.starts[pack], packs.ends[pack])
        heaviest_first = places[np.argsort(-sample_work[places], kind="stable")]
        dealt = np.arange(len(places)) % (2 * num_parts)  # 0, 1, 2, 2, 1, 0, ...: parts of nearly equal work
        part = np.minimum(dealt, 2 * num_parts - 1 - dealt)
        by_part = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=num_parts))
        pieces.append(Block(packs.order[heaviest_first[by_part]], ends))
    return Block.join([packs.pick(np.delete(np.arange(len(packs.ends)), split)), *pieces])


def balance(
    batches: Block,
    batch_work: NDArray[np.number],
    sample_work: Ints,
    world_size: int,
    rng: np.random.Generator,
) -> Block:
    """Group batches of nearly equal work into steps, and shuffle the steps.

    Of a few random orders of the steps, the one with the least correlation between neighbours is taken, so
    that no run of similar samples biases the optimizer.

    Args:
        batches: b of them, a multiple of `world_size`.
        batch_work: (b,) the work of each for its rank, padding included.
        sample_work: (b,) the work of all samples in each without padding.
    """
    steps = np.argsort(batch_work, kind="stable").reshape(-1, world_size)
    means = sample_work[steps].sum(axis=1) / batches.counts[steps].sum(axis=1)
    orders = [rng.permutation(len(steps)) for _ in range(_TRIED_ORDERS)]
    likeness = [abs(correlation(means[order[:-1]], means[order[1:]])) for order in orders]
    return batches.pick(rng.permuted(steps[orders[int(np.argmin(likeness))]], axis=1).ravel())
