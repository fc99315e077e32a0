"""Holding back signals until what is in hand is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_held(*numbers: int) -> Iterator[list[int]]:
    """Note the first of these signals and deliver it when the block is done; a second one goes through at once.

    Signals reach the main thread only: in any other, and for signals that the process ignores, nothing is held.

    Returns:
        A list, empty until a signal has come: look at it to end the block early.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        received.append(number)
        put_back()

    def put_back() -> None:
        while previous:
            signal.signal(*previous.popitem())

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        put_back()
    if received:
        signal.raise_signal(received[0])
