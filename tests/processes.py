"""What tests ask of processes that may end meanwhile."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

import psutil

IGNORING_INTERRUPTS = (
    "sh",
    "-c",
    'trap "" INT; exec "$@"',
    "sh",
)  # as nohup and many CI runners start a program


def free_port() -> int:
    """A port that stays free until it is used: the system gives those below 32,768 to no connection of its own choice."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def command_line(process: psutil.Process) -> str:
    """Its words; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one too
        return ""
