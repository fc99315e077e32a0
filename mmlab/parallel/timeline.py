"""When each branch computed: the spans of a step, to draw them and to say how much of the work overlapped.

The clock is `time.perf_counter` (on Linux the same one in every process of a machine). On a CPU a span is the time of the
computation; on CUDA it would be that of the kernel launches, so spans are taken on CPUs only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

IMAGE, TEXT, FUSION = "image", "text", "fusion"
FORWARD, BACKWARD, WAIT = "forward", "backward", "wait"


class Span(NamedTuple):
    """One piece of work, or of waiting."""

    number: int  # of the micro-batch, since the timeline began
    branch: str  # image, text or fusion
    phase: str  # forward, backward or wait
    start_s: float
    end_s: float


class Timeline:
    """Collects spans.

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


def overlap(spans: Sequence[Span]) -> float:
    """Share of the less busy rank's computing time in which the other rank computed too; NaN where one did nothing.

    >>> overlap([Span(0, "image", "forward", 0.0, 4.0), Span(0, "text", "forward", 1.0, 3.0)])
    1.0
    """
    computing = [span for span in spans if span.phase != WAIT]
    image = _merged(span for span in computing if span.branch == IMAGE)
    other = _merged(span for span in computing if span.branch != IMAGE)
    both_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in image for b in other)
    shorter_s = min(sum(end - start for start, end in busy) for busy in (image, other))
    return both_s / shorter_s if shorter_s else float("nan")


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Busy intervals; those that touch or overlap become one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
