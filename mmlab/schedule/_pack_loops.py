"""The packed planner's compiled loop: fill packs under two budgets at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmlab.schedule._compiled import compiled

_PATIENCE = 4  # samples that may fail to fit before a pack's first filling ends
_REACH = 128  # pool members examined for each exchange
_SWEEPS = 16  # rounds of exchanges at most


class _Pool(NamedTuple):
    """The samples that are looked at together, and which of them the present pack has taken."""

    text: np.ndarray  # (n,) tokens of each sample
    image: np.ndarray  # (n,) patches
    group: np.ndarray  # (n,) number of the image
    by_arrival: np.ndarray  # (pool size,) the pooled samples, the oldest first
    by_size: np.ndarray  # (pool size,) the same, ordered by patches, then tokens
    taken: np.ndarray  # (n,) whether a sample is in a pack
    pack_of_group: np.ndarray  # (n,) by number of the image: the last pack that took a sample of the group


@compiled
def _num_not_larger(pool, pooled, text, image):
    """How many of the `pooled` samples come before or with (image, text) in the order by size."""
    low = 0
    high = pooled
    while low < high:
        middle = (low + high) // 2
        sample = pool.by_size[middle]
        if pool.image[sample] < image or (pool.image[sample] == image and pool.text[sample] <= text):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _add_to_pool(pool, pooled, sample):
    """Add a sample to the `pooled` ones, in both orders."""
    pool.by_arrival[pooled] = sample
    rank = _num_not_larger(pool, pooled, pool.text[sample], pool.image[sample])
    for place in range(pooled, rank, -1):
        pool.by_size[place] = pool.by_size[place - 1]
    pool.by_size[rank] = sample


@compiled
def _drop_taken(pool, samples, pooled):
    """Keep those of the first `pooled` samples that are not taken, in their order; returns how many."""
    kept = 0
    for place in range(pooled):
        if not pool.taken[samples[place]]:
            samples[kept] = samples[place]
            kept += 1
    return kept


@compiled
def _take_oldest(pool, pooled, pack, members, room):
    """Fill a pack with the oldest sample and the next ones that fit, until `_PATIENCE` did not.

    Returns:
        The number of members, and the room left in the two streams.
    """
    count = misses = 0
    text_left, image_left = room
    for place in range(pooled):
        sample = pool.by_arrival[place]
        fits = pool.text[sample] <= text_left and pool.image[sample] <= image_left
        if place == 0 or (fits and pool.pack_of_group[pool.group[sample]] != pack):
            text_left -= pool.text[sample]
            image_left -= pool.image[sample]
            pool.pack_of_group[pool.group[sample]] = pack
            pool.taken[sample] = True
            members[count] = sample
            count += 1
        elif not fits:  # one beside another of its image says nothing of the room
            misses += 1
            if misses == _PATIENCE:
                break
    return count, text_left, image_left


@compiled
def _best_fit(pool, pooled, pack, out, text_open, image_open, best, text_unit, image_unit):
    """The pooled sample that leaves the least of the open room, less than `best`; -1 where there is none.

    The order by size is walked down from the largest image that fits. Images only get smaller from there, so the walk
    ends where the gap in the image stream alone is as large as the best gap so far, or after `_REACH` samples.
    """
    chosen = -1
    start = _num_not_larger(pool, pooled, text_open, image_open) - 1
    for place in range(start, max(-1, start - _REACH), -1):
        sample = pool.by_size[place]
        image_gap = (image_open - pool.image[sample]) * image_unit
        if image_gap >= best:
            break
        if pool.taken[sample] or pool.text[sample] > text_open:
            continue
        gap = image_gap + (text_open - pool.text[sample]) * text_unit
        group = pool.group[sample]
        if gap < best and (pool.pack_of_group[group] != pack or (out >= 0 and group == pool.group[out])):
            best = gap
            chosen = sample
    return chosen


@compiled
def _close_gaps(pool, pooled, pack, members, count, text_left, image_left, room):
    """Exchange members of a pack for pooled samples, or add some, while that leaves less room.

    Returns the number of members.

    Members take turns. At turn 0 a sample is added, so the oldest, which is member 0, stays; at any other turn the
    member may go back to the pool for one that fits better. Every step leaves less room than before, and the loop ends
    when a whole round of turns has changed nothing, when no room is left, or after `_SWEEPS` rounds.
    """
    text_unit, image_unit = 1.0 / max(1, room[0]), 1.0 / max(1, room[1])
    turn = idle = 0
    tries = _SWEEPS * count
    if text_left < 0 or image_left < 0:  # one oversize sample
        return count
    while idle < count and tries > 0 and (text_left > 0 or image_left > 0):
        tries -= 1
        out = members[turn] if turn > 0 else -1
        text_open = text_left + (pool.text[out] if turn > 0 else 0)
        image_open = image_left + (pool.image[out] if turn > 0 else 0)
        gap = text_left * text_unit + image_left * image_unit - 1e-9
        chosen = _best_fit(pool, pooled, pack, out, text_open, image_open, gap, text_unit, image_unit)
        idle += 1
        if chosen >= 0:
            idle = 0
            if turn > 0:
                pool.taken[out] = False
                pool.pack_of_group[pool.group[out]] = -1
                members[turn] = chosen
            else:
                members[count] = chosen
                count += 1
            pool.taken[chosen] = True
            pool.pack_of_group[pool.group[chosen]] = pack
            text_left = text_open - pool.text[chosen]
            image_left = image_open - pool.image[chosen]
        turn = turn + 1 if turn + 1 < count else 0
    return count


@compiled
def fill_packs(text, image, group, text_room, image_room, pool_size):
    """Pack samples, in order of arrival, so that no pack holds more than `text_room` tokens and `image_room` patches.

    A pool holds the oldest samples. Each pack takes the oldest one and others that fit, and then its gaps are closed by
    exchanges with the pool. Two invariants: a pack of several samples never exceeds either room, and never holds two
    samples of one group. As every pack takes the oldest sample, and one that was put back keeps its age, no sample
    waits for more packs than the pool has samples. One that is too large for any pack gets one to itself.

    Args:
        text, image: (n,) tokens and patches in order of arrival.
        group: (n,) number of the image, below n.
        pool_size: samples looked at together.

    Returns:
        (n,) samples pack after pack, and (b,) where each pack ends.
    """
    num = len(text)
    order, ends = np.empty(num, np.int64), np.empty(num, np.int64)
    members = np.empty(pool_size, np.int64)
    by_arrival, by_size = np.empty(pool_size, np.int64), np.empty(pool_size, np.int64)
    taken, pack_of_group = np.zeros(num, np.bool_), np.full(num, -1, np.int64)
    pool = _Pool(text, image, group, by_arrival, by_size, taken, pack_of_group)
    room = text_room, image_room
    pooled = arrived = packed = pack = 0
    while arrived < num or pooled > 0:
        while pooled < pool_size and arrived < num:
            _add_to_pool(pool, pooled, arrived)
            pooled += 1
            arrived += 1
        count, text_left, image_left = _take_oldest(pool, pooled, pack, members, room)
        count = _close_gaps(pool, pooled, pack, members, count, text_left, image_left, room)
        order[packed : packed + count] = members[:count]
        packed += count
        ends[pack] = packed
        pack += 1
        _drop_taken(pool, by_arrival, pooled)
        pooled = _drop_taken(pool, by_size, pooled)
    return order, ends[:pack].copy()
