"""The dense planner's compiled loops: the best cut of an ordered window, and the moves that separate captions.

A polynomial comes as (coefficients, exponents) and is `max over k of sum over m of coefficients[k, m] * B**b * T**t *
P**p`, quadratic in the batch size B, so that each shape needs one evaluation: `price[k, 0] + B * (price[k, 1] + B *
price[k, 2])`. There are two of them: `limit`, which must not exceed `budget` in any batch, and `objective`,
whose sum over all batches should be small.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmlab.schedule._compiled import compiled, inlined

_REACH = 256  # places on either side among which a partner is sought


@compiled
def _price_shape(text, area, coefficients, exponents, price):
    """Fill `price` (K, 3): what each polynomial costs at this shape, by power of the batch size."""
    price[:] = 0.0
    for row in range(coefficients.shape[0]):
        for term in range(coefficients.shape[1]):
            value = coefficients[row, term]
            for _ in range(exponents[term, 1]):
                value *= text
            for _ in range(exponents[term, 2]):
                value *= area
            price[row, exponents[term, 0]] += value


@inlined
def _price(count, price):
    """The cost of `count` samples of the shape that `price` was filled for."""
    cost = price[0, 0] + count * (price[0, 1] + count * price[0, 2])
    for row in range(1, len(price)):
        cost = max(cost, price[row, 0] + count * (price[row, 1] + count * price[row, 2]))
    return cost


@compiled
def cut_optimally(text, high, wide, part, limit, objective, budget, max_size):
    """Ends and total `objective` of the contiguous batches that minimise it within `budget` and `max_size`.

    `text`, `high`, `wide` are (n,) tokens and patches; batches stay in one `part`.

    Dynamic programming. `best[end]` is the least total of any cut of the first `end` samples, and `previous[end]` is
    where the last batch of that cut starts. The last batch grows backwards from `end`, one sample at a time, so its
    shape grows, too, and as no cost falls when a shape grows, the first batch above the budget ends the search:
    O(n * batch size).
    """
    num = len(text)
    limit_price, price = np.zeros((len(limit[0]), 3)), np.zeros((len(objective[0]), 3))
    best = np.full(num + 1, np.inf)
    previous = np.zeros(num + 1, np.int64)
    best[0] = 0.0
    for end in range(1, num + 1):
        longest = -1
        tallest = widest = area = 0
        for count in range(1, min(end, max_size) + 1):
            start = end - count
            if part[start] != part[end - 1]:
                break
            if text[start] > longest or high[start] > tallest or wide[start] > widest:
                longest = max(longest, text[start])
                tallest = max(tallest, high[start])
                widest = max(widest, wide[start])
                area = tallest * widest
                _price_shape(longest, area, limit[0], limit[1], limit_price)
                _price_shape(longest, area, objective[0], objective[1], price)
            if count > 1 and _price(count, limit_price) > budget:  # each sample alone was checked
                break
            total = best[start] + _price(count, price)
            if total < best[end]:
                best[end] = total
                previous[end] = start
    ends = np.empty(num, np.int64)
    first = end = num
    while end > 0:  # the batches of the best cut, from the last to the first
        first -= 1
        ends[first] = end
        end = previous[end]
    return ends[first:].copy(), best[num]


class _State(NamedTuple):
    """Which sample is in which batch, and each batch's shape, size and objective."""

    size: np.ndarray  # (n, 3) tokens, patch rows and patch columns of each sample
    batch_of: np.ndarray  # (n,) of each sample, -1 if it was removed
    image: np.ndarray  # (n,) number of each sample's image
    members: np.ndarray  # (n,) samples, image after image
    starts: np.ndarray  # (images + 1,) where each image begins in `members`
    most: np.ndarray  # (batches, 3) the largest of each batch so far; it never shrinks
    num_samples: np.ndarray  # (batches,) of each batch
    value: np.ndarray  # (batches,) the objective of each batch


@compiled
def _would_collide(state, batch, sample):
    """Whether a batch holds another sample of this one's image."""
    image = state.image[sample]
    for index in range(state.starts[image], state.starts[image + 1]):
        other = state.members[index]
        if other != sample and state.batch_of[other] == batch:
            return True
    return False


@compiled
def _value(state, batch, count, objective, price):
    """The objective of a batch with `count` samples of its shape."""
    area = state.most[batch, 1] * state.most[batch, 2]
    _price_shape(state.most[batch, 0], area, objective[0], objective[1], price)
    return _price(count, price)


@compiled
def _put(state, sample, batch, change, objective, price):
    """Put a sample into a batch, which grows to hold it and has `change` samples more than before."""
    state.batch_of[sample] = batch
    for side in range(3):
        state.most[batch, side] = max(state.most[batch, side], state.size[sample, side])
    state.num_samples[batch] += change
    state.value[batch] = _value(state, batch, state.num_samples[batch], objective, price)


@inlined
def _added(state, batch, sample, change, less_than, limit, objective, budget, limit_price, price):
    """By how much the objective grows if a batch takes this sample and has `change` samples more.

    Infinite if that is not below `less_than`, or if the batch would cost more than `budget`.
    """
    most, size = state.most, state.size
    text = max(most[batch, 0], size[sample, 0])
    area = max(most[batch, 1], size[sample, 1]) * max(most[batch, 2], size[sample, 2])
    if change == 0 and text == most[batch, 0] and area == most[batch, 1] * most[batch, 2]:
        return 0.0
    count = state.num_samples[batch] + change
    _price_shape(text, area, objective[0], objective[1], price)
    added = _price(count, price) - state.value[batch]
    if added >= less_than:
        return np.inf
    _price_shape(text, area, limit[0], limit[1], limit_price)
    return np.inf if _price(count, limit_price) > budget else added


@compiled
def _find_place(state, sample, limit, objective, budget, max_size, tried, limit_price, price):
    """(batch to move to, -1) or (batch, sample to exchange with) of least added objective; (-1, -1) if there is none.

    Looks at the samples within `_REACH` places, nearest first, and at the batches that hold them.
    """
    batch = state.batch_of[sample]
    left = _value(state, batch, state.num_samples[batch] - 1, objective, price) - state.value[batch]
    best = np.inf
    chosen_batch = chosen = -1
    for step in range(2, 2 * _REACH + 2):  # one place back, one forward, two back, two forward, ...
        if best <= 0:
            break
        other = sample + step // 2 if step % 2 else sample - step // 2
        if other < 0 or other >= len(state.batch_of):
            continue
        there = state.batch_of[other]
        if there < 0 or there == batch:
            continue
        if tried[there] != sample:
            tried[there] = sample
            if state.num_samples[there] < max_size:
                added = left + _added(
                    state, there, sample, 1, best - left, limit, objective, budget, limit_price, price
                )
                if added < best and not _would_collide(state, there, sample):
                    best, chosen_batch, chosen = added, there, -1
        if state.image[other] == state.image[sample]:
            continue
        added = _added(state, batch, other, 0, best, limit, objective, budget, limit_price, price)
        if added < best:
            added += _added(
                state, there, sample, 0, best - added, limit, objective, budget, limit_price, price
            )
        if (
            added < best
            and not _would_collide(state, batch, other)
            and not _would_collide(state, there, sample)
        ):
            best, chosen_batch, chosen = added, there, other
    return chosen_batch, chosen


@compiled
def separate_samples(size, image, members, starts, batch_of, num_batches, limit, objective, budget, max_size):
    """Exchange and move samples between batches until no batch holds two of one image.

    Goes through the samples once. A colliding sample changes places with one of another batch within `_REACH` places,
    or moves to that batch, whichever adds least to the objective; if neither is possible, it is removed from
    its batch. Two invariants hold after every step: each batch costs at most `budget`, because no change that
    would exceed it is made; and no sample that was visited collides, because no sample goes where another of
    its image is.

    Args:
        size: (n, 3) tokens, patch rows and patch columns, batch after batch.
        image, members, starts: which samples share an image.
        batch_of: (n,) the batch of each sample, changed in place: -1 if it was removed.
        max_size: samples that a batch may grow to; 0 lets samples only change places.
    """
    limit_price, price = np.zeros((len(limit[0]), 3)), np.zeros((len(objective[0]), 3))
    most, num_samples = np.zeros((num_batches, 3), np.int64), np.zeros(num_batches, np.int64)
    value, tried = np.zeros(num_batches), np.full(num_batches, -1, np.int64)
    state = _State(size, batch_of, image, members, starts, most, num_samples, value)
    for sample in range(len(image)):
        _put(state, sample, batch_of[sample], 1, objective, price)
    for sample in range(len(image)):
        batch = batch_of[sample]
        if not _would_collide(state, batch, sample):
            continue
        there, other = _find_place(
            state, sample, limit, objective, budget, max_size, tried, limit_price, price
        )
        if other >= 0:
            _put(state, other, batch, 0, objective, price)
            _put(state, sample, there, 0, objective, price)
            continue
        num_samples[batch] -= 1
        value[batch] = _value(state, batch, num_samples[batch], objective, price)
        batch_of[sample] = -1
        if there >= 0:
            _put(state, sample, there, 1, objective, price)
