"""The output of a command that has no result of a library function to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A document for `--json`, and the same as text."""

    document: dict[str, Any]
    text: str
    ok: bool = True  # else the exit code is 1

    def as_dict(self) -> dict[str, Any]:
        return self.document

    def __str__(self) -> str:
        return self.text
