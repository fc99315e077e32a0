"""When each branch computed: spans of a step, to draw them and to say what share of the work overlapped.

Clocks are `time.perf_counter` (on Linux the same clock in every process of a machine), read where the work runs: on a
CPU a span is the time of the computation, on CUDA it would be that of the launches, so spans are taken on CPUs only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

IMAGE, TEXT, FUSION = "image", "text", "fusion"
FORWARD, BACKWARD, WAIT, SEND = "forward", "backward", "wait", "send"


class Span(NamedTuple):
    """One piece of work, or of waiting."""

    number: int  # micro-batch, from 0 over the timeline's life
    branch: str  # image, text or fusion
    phase: str  # forward, backward, send or wait
    start_s: float
    end_s: float


class Timeline:
    """Collects spans from any thread.

    >>> timeline = Timeline()
    >>> with timeline.span(0, "image", "forward"):
    ...     pass
    >>> [(span.branch, span.phase) for span in timeline.spans]
    [('image', 'forward')]
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, number: int, branch: str, phase: str) -> Iterator[None]:
        """Around one piece of work."""
        start_s = time.perf_counter()
        yield
        self.spans.append(Span(number, branch, phase, start_s, time.perf_counter()))

    def clear(self) -> None:
        """Forget all spans."""
        self.spans.clear()


def overlap(
    spans: Iterable[Span], first: str | Sequence[str] = IMAGE, second: str | Sequence[str] = TEXT
) -> float:
    """Share of the shorter branch's computing time in which the other branch computed too.

    >>> overlap([Span(0, "image", "forward", 0.0, 4.0), Span(0, "text", "forward", 1.0, 3.0)])
    1.0

    Args:
        first, second: a branch each, or several that count as one (text and fusion, where a process has both).

    Returns:
        In [0, 1]; NaN where a branch has no span.
    """
    spans = [span for span in spans if span.phase in (FORWARD, BACKWARD)]
    one, other = (
        _merged(span for span in spans if span.branch in ((names,) if isinstance(names, str) else names))
        for names in (first, second)
    )
    both_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)
    shorter_s = min(sum(end - start for start, end in busy) for busy in (one, other))
    return both_s / shorter_s if shorter_s else float("nan")


def busy_s(spans: Iterable[Span], branch: str | Sequence[str]) -> float:
    """Seconds in which a branch, or one of several, computed."""
    names = (branch,) if isinstance(branch, str) else branch
    kept = (span for span in spans if span.branch in names and span.phase in (FORWARD, BACKWARD))
    return sum(end - start for start, end in _merged(kept))


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Busy intervals, those that touch or overlap as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
