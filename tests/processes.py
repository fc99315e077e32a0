"""What tests ask of processes that may end meanwhile."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> str:
    """Its words; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one too
        return ""
