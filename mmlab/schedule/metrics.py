"""The figures by which plans are judged, each a pure function of columns: O(N log N) at most, nothing decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.schedule.columns import Block, Ints
from mmlab.types import SampleSizes

_LINEAR_WORK = 6 * 768


def cells(side: NDArray[np.integer], patch: int) -> Ints:
    """Patches along a side, the last one perhaps padded."""
    return -(-side.astype(np.int64) // patch)


def sides(sizes: SampleSizes, patch: int, rows: Any = slice(None)) -> tuple[Ints, Ints, Ints]:
    """(n,) text tokens, patch rows and patch columns of these samples."""
    text = sizes.num_tokens[rows].astype(np.int64)
    return text, cells(sizes.height[rows], patch), cells(sizes.width[rows], patch)


def lengths(sizes: SampleSizes, patch: int, rows: Any = slice(None)) -> tuple[Ints, Ints]:
    """(n,) text tokens and image patches of these samples."""
    text, high, wide = sides(sizes, patch, rows)
    return text, high * wide


def waste(real: float, padded: float) -> float:
    """Share of the padded amount that is padding."""
    return float(1 - real / padded) if padded else 0.0


def work(length: NDArray[np.integer]) -> Ints:
    """Arithmetic of a transformer layer of width 768 over a sequence this long: linear part plus attention.

    24 * 768^2 * L + 4 * 768 * L^2 operations, in units of 4 * 768; whole numbers, so that every machine gets
    the same sums.
    """
    length = length.astype(np.int64)
    return length * (_LINEAR_WORK + length)


def straggler(batch_work: NDArray[np.number], num_ranks: int) -> float:
    """1 - mean / max over each `num_ranks` consecutive batches, weighted by time: the share of time that ranks idle."""
    num_whole = len(batch_work) // num_ranks * num_ranks
    steps = batch_work[:num_whole].reshape(-1, num_ranks)
    return waste(steps.sum(), steps.max(axis=1).sum() * num_ranks) if num_whole else 0.0


def padded_streams(text: Ints, image: Ints, room: tuple[int, int], num_ranks: int) -> tuple[Ints, Ints]:
    """What each pack's streams are padded to: their room, halved as often as every pack of the step still fits.

    So there are few shapes, and the short step that makes a plan even for its ranks costs little. A pack of
    one oversize sample keeps its own length.

    Args:
        text, image: (b,) tokens and patches of each pack; `num_ranks` consecutive packs are one step.
        room: of the two streams.

    Returns:
        (b,) padded tokens and patches.
    """
    fill = np.maximum(text / max(1, room[0]), image / max(1, room[1]))
    step = np.arange(len(text)) // num_ranks
    fullest = np.zeros(len(text))
    np.maximum.at(fullest, step, fill)
    share = 0.5 ** np.floor(-np.log2(np.clip(fullest[step], 2.0**-20, 1.0)))
    padded_text, padded_image = (np.ceil(share * most).astype(np.int64) for most in room)
    return np.maximum(text, padded_text), np.maximum(image, padded_image)


def collision_ratio(batches: Block, group: Ints) -> float:
    """Share of samples that have another sample of their image in their batch (a negative group has no image)."""
    image, batch = group[batches.order], batches.batch_of_place
    batch, image = batch[image >= 0], np.unique(image[image >= 0], return_inverse=True)[1]
    _, together = np.unique(batch * len(image) + image, return_counts=True)
    return float(together[together > 1].sum() / max(1, len(batches.order)))


def randomness(first: Block, second: Block, sample_work: Ints, num_ranks: int) -> float:
    """R = (1 - mates)(1 - |place|)(1 - |lag|) of two epochs: 1 is as random as shuffling, 0 is frozen.

    mates: share of pairs of batch-mates that are mates again; place: correlation of a sample's places in the two
    epochs; lag: autocorrelation of the mean work of a sample from one step of `num_ranks` batches to the next. The two
    correlations count only above two standard errors.

    Args:
        first, second: the epochs' batches.
        sample_work: (N,) work of each sample.
    """
    if not len(first.ends) or not len(second.ends):
        return 0.0
    before, after = _places(first, len(sample_work)), _places(second, len(sample_work))
    kept = (before >= 0) & (after >= 0)
    before, after = before[kept], after[kept]
    _, together = np.unique(before * len(second.ends) + after, return_counts=True)
    mates = _num_pairs(together) / max(1, _num_pairs(first.counts))
    means = first.totals(sample_work[first.order]) / first.counts
    steps = means[: len(means) // num_ranks * num_ranks].reshape(-1, num_ranks).mean(axis=1)
    place = abs(correlation(before, after)) - 2 / np.sqrt(len(first.ends))
    lag = abs(correlation(steps[:-1], steps[1:])) - 2 / np.sqrt(max(4, len(steps)))
    return float((1 - mates) * (1 - max(0.0, place)) * (1 - max(0.0, lag)))


def correlation(left: NDArray[np.number], right: NDArray[np.number]) -> float:
    """Pearson's correlation, 0 where a side does not vary."""
    if len(left) < 2 or left.min() == left.max() or right.min() == right.max():
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def _places(batches: Block, num_samples: int) -> Ints:
    """(N,) the batch that each sample is in, -1 where it is in none."""
    place = np.full(num_samples, -1, np.int64)
    place[batches.order] = batches.batch_of_place
    return place


def _num_pairs(counts: Ints) -> int:
    return int((counts * (counts - 1)).sum())
