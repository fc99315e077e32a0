"""What the project tests share: the root of the checkout and the files that git tracks."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tracked(*patterns: str) -> list[Path]:
    """Tracked files that match git's own patterns, relative to the root, without those deleted on disk."""
    # CI may run as another user than the one who cloned, which git refuses unless told otherwise.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in output.split("\0") if name and (ROOT / (path := Path(name))).is_file()]


def read(path: Path) -> str:
    """The text of a tracked file."""
    return (ROOT / path).read_text(encoding="utf-8")
