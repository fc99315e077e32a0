"""The figures by which plans are judged, each a pure function of columns. O(N log N) at most, compiled sorts only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.schedule.plan import Block

_WIDTH = 768  # model width of `work`


def cells(side: NDArray[np.integer], patch: int) -> NDArray[np.int64]:
    """Patches along a side, the last one perhaps padded."""
    return -(-side.astype(np.int64) // patch)


def waste(real: float, padded: float) -> float:
    """Share of the padded amount that is padding."""
    return float(1 - real / padded) if padded else 0.0


def work(length: NDArray[np.integer]) -> NDArray[np.float64]:
    """Multiply-adds of a transformer layer of width 768 over a sequence this long: linear part plus attention."""
    length = length.astype(np.float64)
    return 24 * _WIDTH**2 * length + 4 * _WIDTH * length**2


def straggler(step_work: NDArray[np.float64], num_ranks: int) -> float:
    """1 - mean / max over each `num_ranks` consecutive batches, weighted by time: the share of time that ranks idle."""
    num_whole = len(step_work) // num_ranks * num_ranks
    steps = step_work[:num_whole].reshape(-1, num_ranks)
    return waste(steps.sum(), steps.max(axis=1).sum() * num_ranks) if num_whole else 0.0


def collision_ratio(batches: Block, group: NDArray[np.int64]) -> float:
    """Share of samples that share their batch with another sample of the same image (a negative group has no image)."""
    image, batch = group[batches.order], batches.batch_of_sample
    batch, image = batch[image >= 0], image[image >= 0]
    if not len(image):
        return 0.0
    if int(image.max() + 1) * len(batches.ends) >= 2**63:
        image = np.unique(image, return_inverse=True)[1]
    pairs = np.sort(batch * (image.max() + 1) + image)
    same = np.diff(pairs) == 0
    num_colliding = int((np.append(same, False) | np.append(False, same)).sum())
    return num_colliding / len(batches.order)


def mate_ratio(first: Block, second: Block, num_samples: int) -> float:
    """Share of pairs of batch-mates in one epoch that are mates again in the next."""
    counts = np.diff(first.ends, prepend=0)
    num_pairs = int((counts * (counts - 1)).sum())
    before, after = _places(first, num_samples), _places(second, num_samples)
    kept = (before >= 0) & (after >= 0)
    cells_of_both = np.sort(before[kept] * (len(second.ends) + 1) + after[kept])
    edges = np.flatnonzero(np.diff(cells_of_both, prepend=-1, append=-1))
    together = np.diff(edges)
    return float((together * (together - 1)).sum() / num_pairs) if num_pairs else 0.0


def place_correlation(first: Block, second: Block, num_samples: int) -> float:
    """Correlation between a sample's places in two epochs."""
    before, after = _places(first, num_samples), _places(second, num_samples)
    kept = (before >= 0) & (after >= 0)
    return _correlation(before[kept], after[kept])


def lag_correlation(batches: Block, sample_work: NDArray[np.float64], num_ranks: int) -> float:
    """Autocorrelation of the mean work of a sample from one step (of `num_ranks` batches) to the next."""
    if not len(batches.ends):
        return 0.0
    mean = np.add.reduceat(sample_work[batches.order], batches.starts) / np.diff(batches.ends, prepend=0)
    steps = mean[: len(mean) // num_ranks * num_ranks].reshape(-1, num_ranks).mean(axis=1)
    return _correlation(steps[:-1], steps[1:])


def randomness(first: Block, second: Block, sample_work: NDArray[np.float64], num_ranks: int) -> float:
    """R = (1 - mates)(1 - |place|)(1 - |lag|) of two epochs: 1 is as random as shuffling, 0 is frozen.

    The two correlations count only above two standard errors.
    """
    num_samples = len(sample_work)
    num_batches = max(1, len(first.ends))
    num_steps = max(4, num_batches // num_ranks)
    place = abs(place_correlation(first, second, num_samples)) - 2 / np.sqrt(num_batches)
    lag = abs(lag_correlation(first, sample_work, num_ranks)) - 2 / np.sqrt(num_steps)
    mates = mate_ratio(first, second, num_samples)
    return float((1 - mates) * (1 - max(0.0, place)) * (1 - max(0.0, lag)))


def _places(batches: Block, num_samples: int) -> NDArray[np.int64]:
    place = np.full(num_samples, -1, np.int64)
    place[batches.order] = batches.batch_of_sample
    return place


def _correlation(left: NDArray[np.number], right: NDArray[np.number]) -> float:
    if len(left) < 2 or left.min() == left.max() or right.min() == right.max():
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])
