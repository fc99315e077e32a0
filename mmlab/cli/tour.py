"""`mmlab tour DIR`: the notebooks, with the sample, examples and pages that they name, copied to where one can work on them.

A wheel has them in `mmlab/tour` (setup.py puts them there), a checkout beside the package.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Annotated, Any

from mmlab.errors import DataError

_FOLDERS = ("notebooks", "data", "examples", "docs")  # as in setup.py


@dataclass(frozen=True, kw_only=True)
class Tour:
    """What was copied, and where to."""

    folder: str
    num_files: int
    notebooks: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        start = f"cd {self.folder}\njupyter lab {self.notebooks[0]}"
        return f"Copied {len(self.notebooks)} notebooks and what they use to {self.folder}. Begin with:\n\n{start}"


def copy_tour(folder: Annotated[str, "a new or empty folder"]) -> Tour:
    """Copy the notebooks, with a sample and examples, into a folder to work in; one with something in it is left alone."""
    target, package = Path(folder), Path(__file__).parents[1]
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(
            f"{folder} is not an empty folder; nothing was copied. Name a new one: mmlab tour NEW"
        )
    source = package / "tour" if (package / "tour").is_dir() else package.parent
    for name in _FOLDERS:
        if not (source / name).is_dir():
            raise DataError(
                f"{source / name} is missing: install mmlab again, from a wheel or a whole checkout"
            )
    for name in _FOLDERS:
        copytree(source / name, target / name, ignore=ignore_patterns(".*", "__pycache__", "site"))
    files = [path for path in target.rglob("*") if path.is_file()]
    notebooks = sorted(str(path.relative_to(target)) for path in target.glob("notebooks/*.ipynb"))
    return Tour(folder=str(folder), num_files=len(files), notebooks=notebooks)
