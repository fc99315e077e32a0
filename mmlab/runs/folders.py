"""The folder of a run or comparison: the files of an earlier one are moved aside, never overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TIME_MODEL = "time_model.json"
COMPARISON_FILES = ("comparison.json", "table.csv", "figure.png", "report.html", TIME_MODEL, "runs")
ASIDE = "previous-"  # what earlier runs left lies in previous-1, previous-2, ...


def fresh_folder(folder: Path, written: Iterable[str]) -> Path:
    """The folder, with what an earlier run wrote there moved to `previous-N` inside it.

    Args:
        written: names of the files and folders that a run writes, with wildcards.
    """
    old = [path for name in written for path in folder.glob(name)]
    if old:
        numbers = (path.name.removeprefix(ASIDE) for path in folder.glob(f"{ASIDE}*"))
        number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
        aside = folder / f"{ASIDE}{number}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
