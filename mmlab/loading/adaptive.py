"""`AdaptiveDataLoader`: difficult samples count for more, by being drawn more often or by a weight on their loss.

A sample's difficulty is 0.3 x image complexity + 0.7 x text length, as in article C, each divided by its mean over the
data, so that the coefficients are the shares they claim to be and the mean difficulty is 1. The effect is
reported (`report()`) and can be corrected for: if samples are drawn in proportion to difficulty and weighted
by its inverse, the expected loss and gradient are those of the data as they are.

The first use on a data set decodes every image once at low resolution (`mmlab.data.complexity`: 1 to 2 ms of a core each);
later ones read a sidecar file. Difficulty is estimated from image and text alone: it does not follow the
loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.data.complexity import image_complexity
from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import OptionError, check_is, check_name, check_numbers
from mmlab.loading.loader import PlannedLoader
from mmlab.schedule.base import Scheduler
from mmlab.schedule.classic import Random
from mmlab.schedule.mixing import Weighted

_IMAGE_PART, _TEXT_PART = 0.3, 0.7  # of the difficulty
_UNIFORM_SHARE = 0.1  # of the mean weight, given to every sample: so no correction exceeds 10


class AdaptiveDataLoader(PlannedLoader):
    """Iterates over batches in which difficult samples count for more.

    In `mode="sampling"` samples are drawn in proportion to their difficulty (`mmlab.schedule.Weighted`): some come more
    than once in an epoch, some not at all. With `correct=True` each batch carries `weights` that make up for it:
    1 / (N p) where p is a sample's share of the draws. In `mode="loss"` each sample comes once, and `weights` are the
    difficulties. The objectives of `mmlab.training.losses` multiply each sample's loss by its weight; in a contrastive loss a
    sample is also a negative of the others, and as such it is not weighted.

    Args:
        dataset: what to load, a `MultimodalDataset`.
        batch_size: samples per batch, in random batches; 32 if neither this nor a scheduler is given.
        shuffle: as in the article's call; False needs a scheduler, which then sets the order.
        mode: "sampling" or "loss".
        correct: with sampling, weight each loss so that the expected loss is that of the data as they are.
        num_samples: samples drawn per epoch; None draws as many as there are. Sampling only.
        scheduler: forms the batches, instead of `batch_size`.
        seed: of the draw and the order.
        progress: show a bar while images are measured, on stderr.
        options: of `PlannedLoader`.

    Raises:
        OptionError: an unknown mode, a number out of range, or options that exclude each other.
        DataError: an image cannot be decoded.

    Source: article C, where the weights, (0.3 x complexity + 0.7 x length) / 100, were computed and never used.
    """

    def __init__(
        self,
        dataset: MultimodalDataset,
        batch_size: int | None = None,
        shuffle: bool = True,
        *,
        mode: str = "sampling",
        correct: bool = False,
        num_samples: int | None = None,
        scheduler: Scheduler | None = None,
        seed: int = 0,
        progress: bool = True,
        **options: Any,
    ) -> None:
        check_name("mode", mode, ("sampling", "loss"))
        if not shuffle and scheduler is None:
            raise OptionError("batches come at random; for a fixed order give scheduler=BatchScheduler()")
        check_numbers({"batch_size": batch_size})
        if batch_size is not None and scheduler is not None:
            raise OptionError("give batch_size or a scheduler, not both: the scheduler sets the sizes")
        if mode == "loss" and (correct or num_samples is not None):
            raise OptionError("correct and num_samples need mode='sampling'; 'loss' has each sample once")
        complexity = image_complexity(dataset.records, progress=progress)
        self.difficulty = difficulty(complexity, dataset.records.num_tokens)  # (N,) mean 1
        inner = scheduler or Random(batch_size=batch_size or 32, seed=seed)
        if mode == "loss" or correct:
            self.weights = self.difficulty if mode == "loss" else 1 / self.difficulty
        if mode == "sampling":
            check_is("scheduler", inner, Scheduler, "a scheduler, as make_scheduler() gives")
            shared = {"seed": seed, "world_size": inner.world_size}
            inner = Weighted(weights=self.difficulty, num_samples=num_samples, inner=inner, **shared)
        super().__init__(dataset, inner, **options)

    @property
    def batch_weights(self) -> list[NDArray[np.float64]]:
        """The article's name: the difficulties of the samples, (B,) for each batch of this epoch's plan."""
        return [self.difficulty[list(rows)] for rows in self.plan]

    def report(self) -> dict[str, float]:
        """What the weights do in this epoch; "counted" means times drawn x loss weight.

        Returns:
            `num_drawn`; `coverage`, the share of the samples that are drawn; `max_times_drawn`; `effective_ratio`, 1
            where all samples count alike (Kish: (sum of counts)^2 / sum of squared counts / samples);
            `mean_num_tokens` of the texts, and the same as the epoch counts them, `counted_num_tokens`.
        """
        # a plan that follows memory use has each sample once
        times = getattr(self.plan, "times_drawn", np.ones(len(self.difficulty)))
        counted = times * (1.0 if self.weights is None else self.weights)
        num_tokens = self.dataset.records.num_tokens
        found = {
            "num_drawn": times.sum(),
            "coverage": (times > 0).mean(),
            "max_times_drawn": times.max(),
            "effective_ratio": counted.sum() ** 2 / (counted**2).sum() / len(times),
        }
        present = num_tokens > 0
        if counted[present].any():
            found["mean_num_tokens"] = num_tokens[present].mean()
            found["counted_num_tokens"] = np.average(num_tokens[present], weights=counted[present])
        return {name: float(value) for name, value in found.items()}


def difficulty(complexity: NDArray[np.float64], num_tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Difficulty of each sample in units of the mean; a tenth of it is the same for all.

    >>> difficulty(np.array([2.0, 4.0, np.nan]), np.array([10, 30, 20])).round(3).tolist()
    [0.595, 1.405, 1.0]

    Args:
        complexity: (N,) bits, NaN without an image.
        num_tokens: (N,) zero without a text. A sample without image (or text) gets the mean in its place.

    Returns:
        (N,) with a mean of one.
    """
    image = _relative(complexity, ~np.isnan(complexity))
    text = _relative(num_tokens, np.asarray(num_tokens) > 0)
    return _UNIFORM_SHARE + (1 - _UNIFORM_SHARE) * (_IMAGE_PART * image + _TEXT_PART * text)


def _relative(values: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Values in units of their mean; one where they are absent, or all zero."""
    mean = values[present].mean() if present.any() else 0.0
    return np.where(present & (mean > 0), np.nan_to_num(values) / (mean or 1.0), 1.0)
