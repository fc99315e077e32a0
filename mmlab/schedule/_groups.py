"""Compiled counting of images: which samples of a block share one."""

from __future__ import annotations

import numpy as np

from mmlab.schedule._compiled import compiled


@compiled
def number_groups(group):
    """Number the groups of a block in order of appearance; O(n), one open-addressed table.

    Args:
        group: (n,) int64; a negative value is a group of its own.

    Returns:
        (n,) numbers from 0, (n,) how many earlier samples have the same group, and how many groups there are.
    """
    size = 16
    while size < 2 * len(group):
        size *= 2
    holder = np.full(size, -1, np.int64)  # a sample of the group that sits in each slot
    number = np.empty(len(group), np.int64)
    occurrence = np.zeros(len(group), np.int64)
    seen = np.zeros(len(group), np.int64)
    num_groups = 0
    for sample in range(len(group)):
        if group[sample] >= 0:
            slot = (np.uint64(group[sample]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
            place = np.int64(slot) & (size - 1)
            while holder[place] >= 0 and group[holder[place]] != group[sample]:
                place = (place + 1) & (size - 1)
            if holder[place] >= 0:
                number[sample] = number[holder[place]]
                occurrence[sample] = seen[number[sample]]
                seen[number[sample]] += 1
                continue
            holder[place] = sample
        number[sample] = num_groups
        seen[num_groups] = 1
        num_groups += 1
    return number, occurrence, num_groups


@compiled
def starts_of(number, num_groups):
    """(num_groups + 1,) where each group begins in a list of samples sorted by group, and that list."""
    starts = np.zeros(num_groups + 1, np.int64)
    for sample in range(len(number)):
        starts[number[sample] + 1] += 1
    starts = np.cumsum(starts)
    filled = starts[:-1].copy()
    members = np.empty(len(number), np.int64)
    for sample in range(len(number)):
        members[filled[number[sample]]] = sample
        filled[number[sample]] += 1
    return starts, members
