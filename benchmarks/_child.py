"""A process that measures when asked: arms that differ in their environment take turns, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Child:
    """Runs this Python with `arguments`; its environment is this one's, changed by `variables` (None removes one)."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str | None]) -> None:
        merged = {**os.environ, **variables}
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in merged.items() if value is not None},
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self) -> None:
        """Let it measure once; `answer` waits for what it found."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line that it writes; the first one is "ready"."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def answer_each_line(measure: Callable[[], Any]) -> None:
    """The child's part: say that it is ready, then measure once for each line of standard input."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(measure(), flush=True)
