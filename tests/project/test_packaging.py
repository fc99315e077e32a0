"""The four files that say what to install agree: pyproject.toml, constraints.txt, environment.yml, LICENSE."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.checkout import read

CONDA_NAMES = {  # where conda-forge has another name
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "xxhash": "python-xxhash",
}
NOT_SET_UP = ("ray",)  # extras too heavy for everybody; neither `make` nor conda installs them


def project() -> dict:
    return tomllib.loads(read(Path("pyproject.toml")))["project"]


def requirements(*, but: tuple[str, ...] = ()) -> list[Requirement]:
    """Every direct dependency, those of the extras included, but for those named."""
    extras = project()["optional-dependencies"]
    extras = [line for name, lines in extras.items() if name not in but for line in lines]
    return [Requirement(line) for line in project()["dependencies"] + extras]


def pins() -> list[Requirement]:
    return [Requirement(line) for line in read(Path("constraints.txt")).splitlines()]


def test_constraints_are_exact_pins_without_addresses() -> None:
    for pin in pins():
        assert [spec.operator for spec in pin.specifier] == ["=="], f"{pin} is not pinned with one =="
        assert pin.url is None, f"{pin} names an address"


def test_constraints_pin_every_dependency_within_its_range() -> None:
    pinned: dict[str, list[str]] = {}
    for pin in pins():
        pinned.setdefault(canonicalize_name(pin.name), []).extend(spec.version for spec in pin.specifier)
    for wanted in requirements():
        versions = pinned.get(canonicalize_name(wanted.name), [])
        assert versions, f"{wanted} has no pin: run `make lock`"
        assert all(wanted.specifier.contains(version) for version in versions), (
            f"{wanted} is pinned to {versions}"
        )


def test_conda_environment_is_in_step_with_pyproject() -> None:
    listed = yaml.safe_load(read(Path("environment.yml")))["dependencies"]
    conda = [Requirement(line) for line in listed if isinstance(line, str)]
    pip = [line for section in listed if isinstance(section, dict) for line in section["pip"]]
    assert "-e ." in pip
    found = {
        item.name: item.specifier for item in [*conda, *(Requirement(line) for line in pip if line != "-e .")]
    }
    assert str(found.pop("python")) == project()["requires-python"]
    del found["pip"]
    wanted = requirements(but=NOT_SET_UP)
    assert found == {CONDA_NAMES.get(item.name, item.name): item.specifier for item in wanted}


def test_licence_text_is_the_one_that_pyproject_names() -> None:
    assert project()["license"] == "Apache-2.0"
    text = read(Path("LICENSE"))
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
