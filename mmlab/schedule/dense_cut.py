"""The dense planner's inner loop: the best way to cut an ordered window into batches under a hard budget."""

from __future__ import annotations

import numpy as np

from mmlab.schedule._compiled import compiled


@compiled
def cut_optimally(text, high, wide, coefficients, exponents, budget, overhead, max_batch_size):
    """Ends of the contiguous batches that minimise padded tokens + `overhead` a batch, each with cost <= `budget`.

    Dynamic programming over the window; a batch is extended backwards until it breaks the budget, so the time is
    O(n * batch size). `text`, `high`, `wide` are (n,) tokens and patches in window order; the cost is
    max over k of sum over m of coefficients[k, m] * B**b * T**t * P**p.
    """
    num = len(text)
    num_rows, num_terms = coefficients.shape
    fixed = np.zeros(num_rows)
    slope = np.zeros(num_rows)
    best = np.full(num + 1, np.inf)
    previous = np.zeros(num + 1, np.int64)
    best[0] = 0.0
    for end in range(1, num + 1):
        longest = -1
        tallest = 0
        widest = 0
        area = 0
        for count in range(1, min(end, max_batch_size) + 1):
            start = end - count
            if text[start] > longest or high[start] > tallest or wide[start] > widest:
                longest = max(longest, text[start])
                tallest = max(tallest, high[start])
                widest = max(widest, wide[start])
                area = tallest * widest
                for row in range(num_rows):
                    fixed[row] = 0.0
                    slope[row] = 0.0
                    for term in range(num_terms):
                        value = coefficients[row, term]
                        for _ in range(exponents[term, 1]):
                            value *= longest
                        for _ in range(exponents[term, 2]):
                            value *= area
                        if exponents[term, 0]:
                            slope[row] += value
                        else:
                            fixed[row] += value
            cost = fixed[0] + count * slope[0]
            for row in range(1, num_rows):
                cost = max(cost, fixed[row] + count * slope[row])
            if cost > budget:
                break
            total = best[start] + count * (longest + area) + overhead
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
