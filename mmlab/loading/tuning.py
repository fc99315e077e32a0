"""Choosing the backend, and finding the number of workers and of batches ahead, by measuring.

The search runs in training itself: nothing is loaded for its sake alone. A change is compared with the best setting so
far in alternation, three windows of about half a second each. It is kept where batches come 5 % faster by the medians,
and in each window faster than before in any, or 30 % by the medians: what other programs do to the speed is rarely
taken for a gain. Nothing is tried that reads further ahead than half an epoch. The search ends when training no longer
waits for data, or when no change helps or fits into memory: some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np

from mmlab.loading.backends import Setting
from mmlab.loading.batches import BatchRequest, SampleLoader
from mmlab.loading.stages import as_html, as_text
from mmlab.machine import num_usable_cores

_WINDOW_S = 0.5
_MIN_BATCHES = 4  # in a window
_NUM_WINDOWS = 3  # of each setting in a comparison: by luck alone, one in 20 is better in every window
_MAX_SKIPPED = 20  # after a change
_MAX_PREFETCH = 64
_MIN_GAIN = 1.05
_SURE_GAIN = 1.3  # of the medians, though a window was worse: other programs do not make that
_NO_WAIT_RATIO = 0.01
_MIN_SAMPLES = 256  # a smaller data set is loaded before a measurement would pay
_PROBE_S = 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting that was measured."""

    num_workers: int
    prefetch: int
    samples_per_s: float
    wait_ratio: float  # share of the time that training waited
    ram_bytes: int  # that the setting may take
    verdict: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """The trace of a search, in order."""

    trials: list[Trial]
    backend: str  # the one in use, and why

    def __str__(self) -> str:
        return f"{as_text(Trial.__slots__, [asdict(trial) for trial in self.trials])}\n{self.backend}"

    def _repr_html_(self) -> str:
        return f"{as_html(Trial.__slots__, [asdict(trial) for trial in self.trials])}<p>backend: {self.backend}</p>"


class Tuner:
    """Climbs from a setting to better ones, by doubling.

    Args:
        start: the setting in use.
        names: of the fields to tune, those of `Setting`.
        ram_bytes: memory that a setting may take.
        max_bytes: its limit.
    """

    def __init__(
        self,
        start: Setting,
        names: Sequence[str],
        *,
        ram_bytes: Callable[[Setting], int],
        max_bytes: int,
    ) -> None:
        self.trials: list[Trial] = []
        self.done = not names
        self._names = list(names)
        self._ram_bytes, self._max_bytes = ram_bytes, max_bytes
        self._most = Setting(max(8, 2 * num_usable_cores()), _MAX_PREFETCH)
        self._best, self._candidate = start, start
        self._rates: dict[Setting, list[float]] = {}
        self._setting = start
        self._num_to_skip = 0
        self._measure(start)

    def begin_epoch(self, num_batches: int | None = None) -> None:
        """Leave out the first batch, for which the pipeline has to fill.

        Args:
            num_batches: of the epoch, where that is known.
        """
        self._num_to_skip = max(1, self._num_to_skip)
        prefetch = _MAX_PREFETCH if num_batches is None else max(1, min(_MAX_PREFETCH, num_batches // 2))
        self._most = self._most._replace(prefetch=prefetch)

    def observe(self, num_samples: int, wait_s: float) -> Setting | None:
        """Count a batch that training got after waiting; gives the setting to be put to use now, if another."""
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
        """Begin a window; what was prepared under the former setting is left out."""
        self._num_batches = self._num_samples = 0
        self._wait_s = self._elapsed_s = 0.0
        self._num_to_skip = min(_MAX_SKIPPED, max(self._setting.prefetch, setting.prefetch) + 1)
        self._setting = setting

    def _conclude(self, samples_per_s: float, wait_ratio: float) -> Setting:
        """Take the result of a window; gives the setting of the next."""
        self._rates.setdefault(self._setting, []).append(samples_per_s)
        if wait_ratio <= _NO_WAIT_RATIO:
            self.done = True
            self._note(samples_per_s, wait_ratio, "training no longer waits")
            return self._setting
        num_measured = len(self._rates.get(self._candidate, ()))
        if self._candidate != self._best and (self._setting == self._best or num_measured < _NUM_WINDOWS):
            self._note(samples_per_s, wait_ratio, "compared")
            return self._candidate if self._setting == self._best else self._best
        if self._candidate != self._best:
            rates, before = self._rates[self._candidate], self._rates[self._best]
            gain = np.median(rates) / np.median(before)
            kept = gain >= _SURE_GAIN or (gain >= _MIN_GAIN and min(rates) > max(before))
            if kept:
                self._best = self._candidate
            else:
                self._names.pop(0)
            self._note(samples_per_s, wait_ratio, f"{'kept' if kept else 'dropped'}: x {gain:.2f}")
        else:
            self._note(samples_per_s, wait_ratio, "start")
        self._rates = {self._best: self._rates[self._best][-1:]}
        return self._next()

    def _next(self) -> Setting:
        while self._names:
            name = self._names[0]
            wider = self._best._replace(**{name: 2 * getattr(self._best, name)})
            wider = Setting(*map(max, self._best, map(min, wider, self._most)))
            if wider != self._best and self._ram_bytes(wider) <= self._max_bytes:
                self._candidate = wider
                return wider
            self._names.pop(0)
        self.done = True
        self._candidate = self._best
        return self._best

    def _note(self, samples_per_s: float, wait_ratio: float, verdict: str) -> None:
        self.trials.append(
            Trial(*self._setting, samples_per_s, wait_ratio, self._ram_bytes(self._setting), verdict)
        )


def choose_backend(loader: SampleLoader, num_workers: int) -> tuple[str, str]:
    """`threads` unless they get in each other's way, as they do where Python code does the decoding; and why.

    A few samples are made by one thread and then by several (about a third of a second in all).
    """
    num_threads = min(num_workers, num_usable_cores(), 4)
    num_samples = len(loader.dataset)
    if num_threads < 2 or num_samples < _MIN_SAMPLES:
        return "threads", "threads (too little to gain by measuring)"
    rows = np.linspace(0, num_samples - 1, 32).astype(int).tolist()

    def load(part: list[int]) -> None:
        loader.load(BatchRequest(0, 0, part))

    started = perf_counter()
    load(rows[:2])
    sample_s = (perf_counter() - started) / 2
    num_rows = num_threads * max(1, min(len(rows), int(_PROBE_S / sample_s)) // num_threads)
    parts = [rows[number:num_rows:num_threads] for number in range(num_threads)]
    gains = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(3):
            started = perf_counter()
            for part in parts:
                load(part)
            one_s, started = perf_counter() - started, perf_counter()
            list(pool.map(load, parts))
            gains.append(one_s / (perf_counter() - started))
    return judge_threads(gains, num_threads)


def judge_threads(gains: Sequence[float], num_threads: int) -> tuple[str, str]:
    """The backend, and why, from how many times as fast as one thread several were, round by round.

    The best round counts: what disturbs one, on a busy machine, makes threads look worse than they are.
    """
    gain = max(gains)
    measured = f"{num_threads} threads were {gain:.2f} times as fast as one"
    if gain < max(1.1, num_threads / 2):
        return "torch", f"torch ({measured})"
    return "threads", f"threads ({measured})"
