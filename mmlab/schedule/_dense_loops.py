"""The dense planner's compiled loops: the best cut of an ordered window, and exchanges that separate captions.

A cost is `max over k of sum over m of coefficients[k, m] * B**b * T**t * P**p`, quadratic in the batch size B, so that
each shape needs one evaluation: `price[k, 0] + B * (price[k, 1] + B * price[k, 2])`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmlab.schedule._compiled import compiled, inlined


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
def cut_optimally(text, high, wide, part, coefficients, exponents, budget, overhead, max_size):
    """Ends of the contiguous batches that pad least, each of at most `max_size` samples with cost <= `budget`.

    Minimises padded tokens + `overhead` a batch. `text`, `high`, `wide` are (n,) tokens and patches; batches stay in
    one `part`.

    Dynamic programming. `best[end]` is the least total of any cut of the first `end` samples, and `previous[end]` is
    where the last batch of that cut starts. The last batch grows backwards from `end`, one sample at a time, so its
    shape grows, too, and as no cost falls when a shape grows, the first batch above the budget ends the search:
    O(n * batch size).
    """
    num = len(text)
    price = np.zeros((len(coefficients), 3))
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
                _price_shape(longest, area, coefficients, exponents, price)
            if _price(count, price) > budget:
                break
            total = best[start] + count * (longest + area) + overhead
            if total < best[end]:
                best[end] = total
                previous[end] = start
    ends = np.empty(num, np.int64)
    first = end = num
    while end > 0:  # the batches of the best cut, from the last to the first
        first -= 1
        ends[first] = end
        end = previous[end]
    return ends[first:].copy()


class _Layout(NamedTuple):
    """Which sample is where. `held` and `place` are inverse to each other wherever neither is -1."""

    size: np.ndarray  # (n, 3) tokens, patch rows and patch columns of each sample
    most: np.ndarray  # (batches, 3) the largest of each batch so far; it never shrinks
    num_samples: np.ndarray  # (batches,) of each batch
    batch_of_place: np.ndarray  # (n,)
    held: np.ndarray  # (n,) sample at each place, -1 where it was put out
    place: np.ndarray  # (n,) place of each sample, -1 where it was put out
    image: np.ndarray  # (n,) number of each sample's image
    members: np.ndarray  # (n,) samples, image after image
    starts: np.ndarray  # (images + 1,) where each image begins in `members`


@compiled
def _would_collide(layout, batch, sample):
    """Whether a batch holds another sample of this one's image."""
    image = layout.image[sample]
    for index in range(layout.starts[image], layout.starts[image + 1]):
        other = layout.members[index]
        place = layout.place[other]
        if other != sample and place >= 0 and layout.batch_of_place[place] == batch:
            return True
    return False


@compiled
def _put(layout, sample, place):
    """Let a place hold a sample, and its batch grow to the sample's size."""
    layout.held[place] = sample
    layout.place[sample] = place
    batch = layout.batch_of_place[place]
    for side in range(3):
        layout.most[batch, side] = max(layout.most[batch, side], layout.size[sample, side])


@inlined
def _added_padding(layout, batch, sample, less_than, coefficients, exponents, budget, price):
    """Padded tokens that a batch gains if this sample takes another's place.

    Infinite if they are not below `less_than`, or if the batch would cost more than `budget`.
    """
    most, size = layout.most, layout.size
    text = max(most[batch, 0], size[sample, 0])
    area = max(most[batch, 1], size[sample, 1]) * max(most[batch, 2], size[sample, 2])
    count = layout.num_samples[batch]
    added = float(count * (text + area - most[batch, 0] - most[batch, 1] * most[batch, 2]))
    if added >= less_than:
        return np.inf
    _price_shape(text, area, coefficients, exponents, price)
    return np.inf if _price(count, price) > budget else added


@compiled
def _find_partner(layout, here, reach, coefficients, exponents, budget, price):
    """The place whose sample is best exchanged for the one at `here`, or -1: nearest first, least padding wins."""
    sample, batch = layout.held[here], layout.batch_of_place[here]
    best = np.inf
    chosen = -1
    for step in range(2, 2 * reach + 2):  # one place back, one forth, two back, two forth, ...
        there = here + step // 2 if step % 2 else here - step // 2
        if there < 0 or there >= len(layout.held) or layout.held[there] < 0:
            continue
        other, other_batch = layout.held[there], layout.batch_of_place[there]
        if other_batch == batch or layout.image[other] == layout.image[sample]:
            continue
        added = _added_padding(layout, batch, other, best, coefficients, exponents, budget, price)
        if added < best:
            left = best - added
            added += _added_padding(layout, other_batch, sample, left, coefficients, exponents, budget, price)
        if (
            added < best
            and not _would_collide(layout, batch, other)
            and not _would_collide(layout, other_batch, sample)
        ):
            best = added
            chosen = there
            if added == 0:
                break
    return chosen


@compiled
def exchange_samples(
    size, image, members, starts, batch_of_place, num_batches, coefficients, exponents, budget, reach
):
    """Exchange samples between batches until no batch holds two of one image.

    Goes through the places once. A colliding sample changes places with the one of another batch, within `reach`
    places, that adds the least padding; where there is none it is put out. Two invariants hold after every step: each
    batch costs at most `budget`, because an exchange that would raise a cost above it is not made; and no place that
    was passed collides, because no sample goes where another of its image is.

    Args:
        size: (n, 3) tokens, patch rows and patch columns, batch after batch.
        image, members, starts: which samples share an image.
        batch_of_place: (n,) the batch that each place belongs to.

    Returns:
        (n,) which sample (by its first place) each place now holds, -1 where it was put out.
    """
    num = len(image)
    price = np.zeros((len(coefficients), 3))
    most, num_samples = np.zeros((num_batches, 3), np.int64), np.zeros(num_batches, np.int64)
    held, place = np.empty(num, np.int64), np.empty(num, np.int64)
    layout = _Layout(size, most, num_samples, batch_of_place, held, place, image, members, starts)
    for here in range(num):
        layout.num_samples[batch_of_place[here]] += 1
        _put(layout, here, here)
    for here in range(num):
        sample = layout.held[here]
        if not _would_collide(layout, batch_of_place[here], sample):
            continue
        there = _find_partner(layout, here, reach, coefficients, exponents, budget, price)
        if there >= 0:
            other = layout.held[there]
            _put(layout, other, here)
            _put(layout, sample, there)
        else:
            layout.held[here] = layout.place[sample] = -1
            layout.num_samples[batch_of_place[here]] -= 1
    return layout.held
