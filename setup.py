"""Puts what `mmlab tour` copies into the wheel, below `mmlab/tour`; everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

TOUR = ("notebooks", "data", "examples", "docs", "benchmarks/results")  # as in mmlab/cli/tour.py


class BuildWithTour(build_py):
    """Copies the folders beside the package into it, unless it is installed as a link to its checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            skip = ignore_patterns(".*", "__pycache__", "site", "notebooks")  # those below docs
            for name in TOUR:
                copytree(name, Path(self.build_lib, "mmlab", "tour", name), ignore=skip, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithTour})
