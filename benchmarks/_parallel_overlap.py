"""How much of the shorter branch runs while the other one does: `branch` with a clock around each branch's passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from mmlab.parallel import branch
from mmlab.parallel.bench import Arm, BenchOptions, train_arm

Span = tuple[float, float]


def timed_branch(options: BenchOptions, rank: int, cut: int | None) -> Arm:
    """The strategy `branch`; its steps return when this rank's branch computed, in seconds of the machine's clock."""
    arm, spans = train_arm("branch", options, rank, cut), list[Span]()
    model = arm.held[0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **options)
            spans.append((started, time.perf_counter()))
            return result

        return call

    def step() -> dict[str, Any]:
        spans.clear()
        with ExitStack() as stack:
            for place, name in (
                (model, "encode_image"),
                (model, "begin_image"),
                (model, "encode_text"),
                (branch, "backward_features"),
            ):
                stack.enter_context(patch.object(place, name, timed(getattr(place, name))))
            return {**arm.step(), "spans": [*spans]}

    return Arm(step, arm.held)


def overlap(image: Sequence[Span], text: Sequence[Span]) -> float:
    """Share of the shorter branch's computing time in which the other branch computed too.

    >>> overlap([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)])
    0.6666666666666666
    """
    both_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in image for b in text)
    return both_s / min(sum(end - start for start, end in spans) for spans in (image, text))
