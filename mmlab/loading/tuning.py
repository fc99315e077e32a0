"""Finding the number of workers by measuring during training itself: nothing is loaded only for the search.

Twice as many workers are compared with the best number so far, in alternating windows of about half a second,
three for each. They are kept if the median rate is 5 % higher and every window is faster than any of the best
so far, or if the median rate is 30 % higher: so the influence of other programs is rarely taken for a gain.
The search ends, after some seconds, when training no longer waits for data, or when twice the workers do not
help or do not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np

from mmlab.loading.backends import Setting
from mmlab.loading.stages import NO_WAIT_RATIO, as_table
from mmlab.machine import num_usable_cores

_WINDOW_S = 0.5
_MIN_BATCHES = 4  # in a window
_NUM_WINDOWS = 3  # of each setting in a comparison: by luck alone, one in 20 is better in every window
_MAX_SKIPPED = 20  # batches, after a change of setting
_MIN_GAIN = 1.05
_SURE_GAIN = 1.3  # of the medians, even if a window was worse: other programs do not cause that


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting that was measured."""

    num_workers: int
    prefetch: int
    samples_per_s: float
    wait_ratio: float  # share of the time that training waited
    ram_bytes: int  # that the setting may take
    verdict: str


class Tuning(list[Trial]):
    """The trace of a search, in order; printing it gives a table."""

    def __str__(self) -> str:
        return as_table(Trial.__slots__, list(map(asdict, self))).to_string(index=False)

    def _repr_html_(self) -> str:
        return as_table(Trial.__slots__, list(map(asdict, self))).to_html(index=False)


class Tuner:
    """Doubles the workers for as long as that pays.

    Args:
        start: the setting in use.
        ram_bytes: memory that a setting may take.
        max_bytes: its limit.
        keeps_prefetch: only the workers are doubled; else `prefetch` is as well, up to half an epoch.
    """

    def __init__(
        self, start: Setting, ram_bytes: Callable[[Setting], int], max_bytes: int, *, keeps_prefetch: bool
    ) -> None:
        self.trials = Tuning()
        self.done = False
        self._ram_bytes, self._max_bytes = ram_bytes, max_bytes
        self._most_workers = max(8, 2 * num_usable_cores())
        self._keeps_prefetch, self._half_epoch = keeps_prefetch, start.prefetch
        self._best = self._candidate = self._setting = start
        self._rates: dict[Setting, list[float]] = {start: []}
        self._num_to_skip = 0
        self._measure(start)

    def begin_epoch(self, num_batches: int) -> None:
        """Leave out the first batch of an epoch, for which the pipeline has to fill."""
        self._num_to_skip = max(1, self._num_to_skip)
        self._half_epoch = num_batches // 2

    def observe(self, num_samples: int, wait_s: float) -> Setting | None:
        """Count a batch that training received after waiting; returns the setting to change to, if any."""
        now = perf_counter()
        if self.done:
            return None
        if self._num_to_skip:
            self._num_to_skip, self._last_s = self._num_to_skip - 1, now
            return None
        self._elapsed_s += now - self._last_s
        self._last_s = now
        self._num_batches += 1
        self._num_samples += num_samples
        self._wait_s += wait_s
        if self._num_batches < _MIN_BATCHES or self._elapsed_s < _WINDOW_S:
            return None
        before = self._setting
        after = self._conclude(self._num_samples / self._elapsed_s, self._wait_s / self._elapsed_s)
        self._measure(after)
        return after if after != before else None

    def _measure(self, setting: Setting) -> None:
        """Begin a window; batches prepared under the previous setting are left out."""
        self._num_batches = self._num_samples = 0
        self._wait_s = self._elapsed_s = 0.0
        self._num_to_skip = min(_MAX_SKIPPED, max(self._setting.prefetch, setting.prefetch) + 1)
        self._setting = setting

    def _conclude(self, samples_per_s: float, wait_ratio: float) -> Setting:
        """Take the result of a window; gives the setting of the next."""
        setting, best, candidate = self._setting, self._best, self._candidate
        self._rates[setting].append(samples_per_s)
        after, verdict = candidate, "compared"
        if wait_ratio <= NO_WAIT_RATIO:
            self.done, after, verdict = True, setting, "training no longer waits"
        elif candidate == best:
            after, verdict = self._next_candidate(), "start"
        elif setting == candidate and len(self._rates[candidate]) < _NUM_WINDOWS:
            after = best
        elif setting == candidate:
            rates, before = self._rates[candidate], self._rates[best]
            gain = np.median(rates) / np.median(before)
            if gain >= _SURE_GAIN or (gain >= _MIN_GAIN and min(rates) > max(before)):
                self._best = candidate
                after, verdict = self._next_candidate(), f"kept: x {gain:.2f}"
            else:
                self.done, after, verdict = True, best, f"dropped: x {gain:.2f}"
        self.trials.append(Trial(*setting, samples_per_s, wait_ratio, self._ram_bytes(setting), verdict))
        return after

    def _next_candidate(self) -> Setting:
        """The setting to compare with the best; if none is left, ends the search and returns the best."""
        best = self._best
        workers = min(2 * best.num_workers, self._most_workers)
        ahead = best.prefetch if self._keeps_prefetch else min(2 * best.prefetch, self._half_epoch)
        self._candidate = Setting(workers, max(ahead, best.prefetch))
        if workers == best.num_workers or self._ram_bytes(self._candidate) > self._max_bytes:
            self.done, self._candidate = True, best
        self._rates = {best: self._rates[best][-1:], self._candidate: []}
        return self._candidate
