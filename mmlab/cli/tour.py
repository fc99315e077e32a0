"""`mmlab tour DIR`: copies the notebooks and the sample, examples and pages that they name to a new folder.

A wheel has them in `mmlab/tour` (setup.py puts them there), a checkout beside the package.
"""

from pathlib import Path
from shlex import quote
from shutil import Error, copytree, ignore_patterns, rmtree
from typing import Annotated

from mmlab.cli.printed import Printed
from mmlab.errors import DataError, RunError

_FOLDERS = ("notebooks", "data", "examples", "docs", "benchmarks/results")  # as in setup.py
_SKIPPED = ignore_patterns(".*", "__pycache__", "site", "notebooks")  # the last two: those below docs


def copy_tour(folder: Annotated[str, "a new or empty folder"]) -> Printed:
    """Copy the notebooks, with a sample and examples, into a new or empty folder to work in."""
    target, package = Path(folder), Path(__file__).parents[1]
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{folder} is not an empty folder; nothing was copied. Name a new one")
    source = package / "tour" if (package / "tour").is_dir() else package.parent
    try:
        for name in _FOLDERS:
            copytree(source / name, target / name, ignore=_SKIPPED)
    except Error as error:  # it lists every file that could not be copied
        rmtree(target)
        raise RunError(f"{folder}: nothing was copied: {error.args[0][0][2]}") from error
    names = sorted(path.relative_to(target).as_posix() for path in target.glob("notebooks/*.ipynb"))
    text = f"Copied {len(names)} notebooks. Begin with:\n\ncd {quote(str(folder))}\njupyter lab {names[0]}"
    return Printed(document={"folder": folder, "notebooks": names}, text=text)
