"""The packed planner's compiled loop: fill packs under two budgets at once."""

from __future__ import annotations

import numpy as np

from mmlab.schedule._compiled import compiled


@compiled
def fill_packs(text, image, group, num_groups, text_room, image_room, pool_size, patience, reach, sweeps):
    """Pack samples, in order of arrival, so that no pack holds more than `text_room` tokens and `image_room` patches.

    A pool of the oldest samples is kept twice, by arrival and by size. Each pack takes the oldest sample and the next
    ones that fit, until `patience` have not; then its members are exchanged for (or joined by) those pool members that
    leave the least room, until no exchange helps. A sample put back keeps its age, so none waits for more packs than
    the pool has samples. One that is too large for any pack gets one to itself. No pack holds two samples of one group.

    Args:
        text, image: (n,) tokens and patches in order of arrival.
        group: (n,) number of the image, below `num_groups`.
        pool_size: samples looked at together.
        reach: pool members examined for each exchange.
        sweeps: passes over a pack's members at most.

    Returns:
        (n,) samples pack after pack, and (b,) where each pack ends.
    """
    num = len(text)
    order = np.empty(num, np.int64)
    ends = np.empty(num, np.int64)
    by_arrival = np.empty(pool_size, np.int64)
    by_size = np.empty(pool_size, np.int64)
    fresh = np.empty(pool_size, np.int64)
    members = np.empty(pool_size, np.int64)
    taken = np.zeros(num, np.bool_)
    pack_of_group = np.full(num_groups, -1, np.int64)
    pooled = 0
    arrived = 0
    packed = 0
    num_packs = 0
    text_unit = 1.0 / max(1, text_room)
    image_unit = 1.0 / max(1, image_room)
    while arrived < num or pooled > 0:
        num_fresh = 0
        while pooled + num_fresh < pool_size and arrived < num:
            by_arrival[pooled + num_fresh] = arrived
            place = num_fresh
            while place > 0 and (
                image[fresh[place - 1]] > image[arrived]
                or (image[fresh[place - 1]] == image[arrived] and text[fresh[place - 1]] > text[arrived])
            ):
                fresh[place] = fresh[place - 1]
                place -= 1
            fresh[place] = arrived
            num_fresh += 1
            arrived += 1
        old = pooled - 1
        new = num_fresh - 1
        pooled += num_fresh
        place = pooled - 1
        while new >= 0:  # merge the fresh ones into the order by size, from the back
            if old >= 0 and (
                image[by_size[old]] > image[fresh[new]]
                or (image[by_size[old]] == image[fresh[new]] and text[by_size[old]] > text[fresh[new]])
            ):
                by_size[place] = by_size[old]
                old -= 1
            else:
                by_size[place] = fresh[new]
                new -= 1
            place -= 1

        count = 0
        text_left = text_room
        image_left = image_room
        misses = 0
        for place in range(pooled):
            sample = by_arrival[place]
            if place == 0 or (
                text[sample] <= text_left
                and image[sample] <= image_left
                and pack_of_group[group[sample]] != num_packs
            ):
                text_left -= text[sample]
                image_left -= image[sample]
                pack_of_group[group[sample]] = num_packs
                taken[sample] = True
                members[count] = sample
                count += 1
            else:
                misses += 1
                if misses == patience:
                    break

        turn = 0
        idle = 0
        tries = sweeps * count
        while (
            idle < count
            and tries > 0
            and text_left >= 0
            and image_left >= 0
            and (text_left > 0 or image_left > 0)
        ):
            tries -= 1
            out = members[turn] if turn > 0 else -1  # turn 0 adds, and so keeps the oldest
            text_open = text_left + (text[out] if turn > 0 else 0)
            image_open = image_left + (image[out] if turn > 0 else 0)
            low = 0
            high = pooled
            while low < high:
                middle = (low + high) // 2
                sample = by_size[middle]
                if image[sample] < image_open or (image[sample] == image_open and text[sample] <= text_open):
                    low = middle + 1
                else:
                    high = middle
            best = text_left * text_unit + image_left * image_unit - 1e-9
            chosen = -1
            for place in range(low - 1, max(-1, low - 1 - reach), -1):
                sample = by_size[place]
                image_gap = (image_open - image[sample]) * image_unit
                if image_gap >= best:
                    break
                if taken[sample] or text[sample] > text_open:
                    continue
                gap = image_gap + (text_open - text[sample]) * text_unit
                if gap < best and (
                    pack_of_group[group[sample]] != num_packs or (turn > 0 and group[sample] == group[out])
                ):
                    best = gap
                    chosen = sample
            if chosen >= 0:
                idle = 0
                if turn > 0:
                    taken[out] = False
                    pack_of_group[group[out]] = -1
                    members[turn] = chosen
                else:
                    members[count] = chosen
                    count += 1
                taken[chosen] = True
                pack_of_group[group[chosen]] = num_packs
                text_left = text_open - text[chosen]
                image_left = image_open - image[chosen]
            else:
                idle += 1
            turn = turn + 1 if turn + 1 < count else 0

        for place in range(count):
            order[packed] = members[place]
            packed += 1
        ends[num_packs] = packed
        num_packs += 1
        kept = 0
        for place in range(pooled):
            if not taken[by_arrival[place]]:
                by_arrival[kept] = by_arrival[place]
                kept += 1
        kept = 0
        for place in range(pooled):
            if not taken[by_size[place]]:
                by_size[kept] = by_size[place]
                kept += 1
        pooled = kept
    return order, ends[:num_packs].copy()
