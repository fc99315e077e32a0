"""What tests ask of processes that may end meanwhile."""

from __future__ import annotations

import psutil

IGNORING_INTERRUPTS = (
    "sh",
    "-c",
    'trap "" INT; exec "$@"',
    "sh",
)  # as nohup and many CI runners start a program


def command_line(process: psutil.Process) -> str:
    """Its words; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one too
        return ""
