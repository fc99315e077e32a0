"""The dense planner's compiled loops: the best cut of an ordered window, and swaps that part captions of one image.

A cost is `max over k of sum over m of coefficients[k, m] * B**b * T**t * P**p`, quadratic in the batch size B, so that
each shape needs one evaluation: `price[k, 0] + B * (price[k, 1] + B * price[k, 2])`.
"""

from __future__ import annotations

import numpy as np

from mmlab.schedule._compiled import compiled
from mmlab.schedule._groups import starts_of


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


@compiled
def _price(count, price):
    """The cost of `count` samples of the shape that `price` was filled for."""
    cost = price[0, 0] + count * (price[0, 1] + count * price[0, 2])
    for row in range(1, len(price)):
        cost = max(cost, price[row, 0] + count * (price[row, 1] + count * price[row, 2]))
    return cost


@compiled
def cut_optimally(
    text, high, wide, part, coefficients, exponents, budget, overhead, min_size, max_size, multiple, penalty
):
    """Ends of the contiguous batches that pad least, each with cost <= `budget`.

    Minimises padded tokens + `overhead` a batch + `penalty` for each batch below `min_size` or off the `multiple`, by
    dynamic programming: O(n * batch size). `text`, `high`, `wide` are (n,) tokens and patches; batches stay in one
    `part`.
    """
    num = len(text)
    num_rows = len(coefficients)
    particular = min_size > 1 or multiple > 1
    price = np.zeros((len(coefficients), 3))
    best = np.full(num + 1, np.inf)
    previous = np.zeros(num + 1, np.int64)
    best[0] = 0.0
    for end in range(1, num + 1):
        longest = -1
        tallest = 0
        widest = 0
        area = 0
        fixed = slope = curve = 0.0
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
                fixed, slope, curve = price[0, 0], price[0, 1], price[0, 2]
            cost = fixed + count * (slope + count * curve)  # `_price`, with its usual only row at hand
            for row in range(1, num_rows):
                cost = max(cost, price[row, 0] + count * (price[row, 1] + count * price[row, 2]))
            if cost > budget:
                break
            total = best[start] + count * (longest + area) + overhead
            if particular and (count < min_size or count % multiple):
                total += penalty
            if total < best[end]:
                best[end] = total
                previous[end] = start
    num_batches = 0
    end = num
    while end > 0:
        num_batches += 1
        end = previous[end]
    ends = np.empty(num_batches, np.int64)
    end = num
    for batch in range(num_batches - 1, -1, -1):
        ends[batch] = end
        end = previous[end]
    return ends


@compiled
def _is_in(batch, image, itself, batch_of_place, place, members, starts):
    """Whether a batch holds a sample of the image other than `itself`."""
    for index in range(starts[image], starts[image + 1]):
        sample = members[index]
        if sample != itself and place[sample] >= 0 and batch_of_place[place[sample]] == batch:
            return True
    return False


@compiled
def part_images(
    text, high, wide, image, num_images, batch_of_place, num_batches, coefficients, exponents, budget, reach
):
    """Exchange samples between batches until no batch holds two of one image.

    A colliding sample changes places with the one of another batch, within `reach` places, that adds the least padding
    and keeps both batches within `budget`. Where there is none it is put out.

    Args:
        text, high, wide: (n,) tokens and patches, batch after batch.
        image: (n,) number of the image.
        batch_of_place: (n,) the batch that each place belongs to.

    Returns:
        (n,) which sample (by its first place) each place now holds, -1 where it was put out.
    """
    num = len(text)
    price = np.zeros((len(coefficients), 3))
    starts, members = starts_of(image, num_images)
    held = np.arange(num)
    place = np.arange(num)
    count = np.zeros(num_batches, np.int64)
    longest = np.zeros(num_batches, np.int64)
    tallest = np.zeros(num_batches, np.int64)
    widest = np.zeros(num_batches, np.int64)
    for here in range(num):
        batch = batch_of_place[here]
        count[batch] += 1
        longest[batch] = max(longest[batch], text[here])
        tallest[batch] = max(tallest[batch], high[here])
        widest[batch] = max(widest[batch], wide[here])
    for here in range(num):
        sample = held[here]
        batch = batch_of_place[here]
        if not _is_in(batch, image[sample], sample, batch_of_place, place, members, starts):
            continue
        best = np.inf
        chosen = -1
        for step in range(2, 2 * reach + 2):
            there = here + step // 2 if step % 2 else here - step // 2
            if there < 0 or there >= num or held[there] < 0 or batch_of_place[there] == batch:
                continue
            other_batch = batch_of_place[there]
            other = held[there]
            if image[other] == image[sample]:
                continue
            added = 0
            fits = True
            for target, comer in ((batch, other), (other_batch, sample)):
                new_longest = max(longest[target], text[comer])
                new_area = max(tallest[target], high[comer]) * max(widest[target], wide[comer])
                added += count[target] * (new_longest + new_area)
                added -= count[target] * (longest[target] + tallest[target] * widest[target])
                if added >= best:
                    fits = False
                    break
                _price_shape(new_longest, new_area, coefficients, exponents, price)
                if _price(count[target], price) > budget:
                    fits = False
                    break
            if (
                fits
                and not _is_in(batch, image[other], other, batch_of_place, place, members, starts)
                and not _is_in(other_batch, image[sample], sample, batch_of_place, place, members, starts)
            ):
                best = added
                chosen = there
                if added == 0:
                    break
        if chosen < 0:
            held[here] = -1
            place[sample] = -1
            count[batch] -= 1
            continue
        other = held[chosen]
        other_batch = batch_of_place[chosen]
        held[here] = other
        place[other] = here
        held[chosen] = sample
        place[sample] = chosen
        for target, comer in ((batch, other), (other_batch, sample)):
            longest[target] = max(longest[target], text[comer])
            tallest[target] = max(tallest[target], high[comer])
            widest[target] = max(widest[target], wide[comer])
    return held
