"""How busy each stage of the pipeline is, and which one is the bottleneck.

A stage's threads either work or wait; work is timed per sample, waiting is the rest. Costs about a
microsecond per sample and stage. Time that a thread is kept off the processor by other programs counts as
work.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mmlab.schedule.report import shown

if TYPE_CHECKING:
    import pandas as pd

_REMEDIES = {
    "read": "a faster disk, or more workers to read at the same time",
    "decode": "more cores, workers and batches ahead, images stored smaller, or a cache",
    "collate": "smaller batches, or images of similar size together (less padding)",
    "copy": "pinned memory, or fewer pixels",
}
_FROM_CACHE = "smaller images (their pixels are copied from the cache), or more workers"
NO_WAIT_RATIO = 0.01  # training that waits for a smaller share of the time counts as not waiting
_COLUMNS = ("stage", "num_threads", "items_per_s", "busy_ratio", "wait_ratio", "queue_depth")


class StageMeter:
    """Sums up what the stages do; safe to call from any thread.

    Args:
        num_threads: of each stage, in order.
        shared: the same workers do all stages, one after the other.
    """

    def __init__(self, num_threads: Mapping[str, int], *, shared: bool) -> None:
        self.num_threads, self.shared = dict(num_threads), shared
        self._lock = threading.Lock()
        # "read finished" and so on; times in seconds
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._sums["until"] = time.perf_counter()  # of the last delivery
        self._first = self._last = self._sums.copy()

    def add(self, stage: str, num_samples: int, busy_s: float) -> None:
        """Record samples that a stage has finished."""
        with self._lock:
            self._sums[f"{stage} finished"] += num_samples
            self._sums[f"{stage} busy"] += busy_s

    def deliver(self, num_samples: int, wait_s: float, num_hits: int = 0) -> None:
        """Record a batch that training received after waiting; the cache had `num_hits` of its samples."""
        with self._lock:
            sums = self._sums
            for stage, following in pairwise([*self.num_threads, "train"]):
                sums[f"{stage} depth"] += sums[f"{stage} finished"] - sums[f"{following} finished"]
            sums["train finished"] += num_samples
            sums["deliveries"] += 1
            sums["hits"] += num_hits
            sums["wait"] += wait_s
            sums["until"] = time.perf_counter()

    def report(self) -> StageReport:
        """The report from the meter's creation to the last delivery."""
        return self._compare(self._copy(), self._first)

    def since_last(self, *, min_s: float = 0.0) -> StageReport | None:
        """The report since the last call that gave one; None before `min_s`, or without a batch since."""
        sums, last = self._copy(), self._last
        if sums["until"] - last["until"] < min_s or sums["deliveries"] == last["deliveries"]:
            return None
        self._last = sums
        return self._compare(sums, last)

    def _copy(self) -> defaultdict[str, float]:
        with self._lock:
            return self._sums.copy()

    def _compare(self, sums: defaultdict[str, float], before: defaultdict[str, float]) -> StageReport:
        change = defaultdict(float, {key: value - before[key] for key, value in sums.items()})
        duration_s = max(1e-9, change["until"])
        num_samples, num_deliveries = max(1, change["train finished"]), max(1, change["deliveries"])
        busy = {
            stage: min(1.0, change[f"{stage} busy"] / (duration_s * num_threads))
            for stage, num_threads in self.num_threads.items()
        }
        rows: list[tuple[Any, ...]] = []  # of `_COLUMNS`
        for stage, num_threads in self.num_threads.items():
            waits = max(0.0, 1 - (sum(busy.values()) if self.shared else busy[stage]))
            depth = None if self.shared else change[f"{stage} depth"] / num_deliveries
            per_s = change[f"{stage} finished"] / duration_s
            rows.append((stage, num_threads, per_s, busy[stage], waits, depth))
        waits = min(1.0, change["wait"] / duration_s)
        rows.append(("train", 1, change["train finished"] / duration_s, 1 - waits, waits, None))
        named = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        return StageReport(named, change["hits"] / num_samples)


@dataclass(frozen=True, slots=True)
class StageReport:
    """One row per stage, in order, training as the last; keys as in `mmlab.runs.events.EVENT_KEYS`."""

    rows: list[dict[str, Any]]
    cache_hit_ratio: float  # share of the samples that the cache had

    @property
    def wait_ratio(self) -> float:
        """Share of the time that training waited for data."""
        return self.rows[-1]["wait_ratio"]

    @property
    def bottleneck(self) -> str | None:
        """The busiest stage, if training waits for it; None if it idles too, as when an epoch starts."""
        busiest, wait_ratio = self._busiest, self.wait_ratio
        shared = busiest["queue_depth"] is None
        worked = sum(row["busy_ratio"] for row in self.rows[:-1]) if shared else busiest["busy_ratio"]
        # without workers, training waits while the stages work; with them, for some that are mostly busy
        in_turns = shared and busiest["num_threads"] == 1 and 0.5 * wait_ratio <= worked <= wait_ratio
        return busiest["stage"] if wait_ratio > NO_WAIT_RATIO and (in_turns or worked >= 0.5) else None

    @property
    def _busiest(self) -> dict[str, Any]:
        return max(self.rows[:-1], key=lambda row: row["busy_ratio"])

    @property
    def sentence(self) -> str:
        """Which stage is the bottleneck, and what would help."""
        stage, busiest = self.bottleneck, self._busiest
        waited, busy = f"{self.wait_ratio:.1%} of the time", f"{busiest['busy_ratio']:.0%}"
        if stage is None:
            why = f"although the busiest, {busiest['stage']}, worked only {busy} of it. The wait was for the first "
            why += "batch of an epoch, or other programs used the cores."
            if self.wait_ratio <= NO_WAIT_RATIO:
                why = "and a faster loader could save no more than that."
            return f"No stage of loading is the bottleneck: training waited for data {waited}, {why}"
        remedy = _FROM_CACHE if stage == "read" and self.cache_hit_ratio > 0.5 else _REMEDIES[stage]
        return (
            f"{stage} is the bottleneck: training waited {waited}, while its threads or processes "
            f"({busiest['num_threads']}) were busy {busy} of theirs; {remedy} would help."
        )

    def __str__(self) -> str:
        return f"{as_table(_COLUMNS, self.rows).to_string(index=False)}\n{self.sentence}"

    def _repr_html_(self) -> str:
        return f"{as_table(_COLUMNS, self.rows).to_html(index=False)}<p>{escape(self.sentence)}</p>"


def as_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Some columns, with numbers as people read them."""
    import pandas as pd

    cells = [["" if row[name] is None else shown(name, row[name]) for name in columns] for row in rows]
    return pd.DataFrame(cells, columns=list(columns), dtype=object)
