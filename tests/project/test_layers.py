"""Imports point only upward in the table of ARCHITECTURE.md, without circles, and light commands load no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import mmlab
from tests.project.checkout import ROOT, read, tracked

IMPORT_BOUND_S = 0.3
MOST_GROUPS = 7


def groups() -> dict[str, int]:
    """Room -> group, from the rows `| 3 | `a`, `b` | ... |` of ARCHITECTURE.md."""
    rows = re.findall(r"^\| (\d+) \| (`.+?) \|", read(Path("ARCHITECTURE.md")), re.MULTILINE)
    return {room: int(group) for group, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}


def imported_modules(source: str, package: str) -> set[str]:
    """Every module of mmlab that a module of `package` imports anywhere, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            found |= {module if (module := f"{base}.{alias.name}") in PATHS else base for alias in node.names}
    return {name for name in found if name.startswith("mmlab.")}


def room_of(module: str) -> str:
    """`mmlab.schedule.plan` -> `schedule`."""
    return module.split(".")[1]


PATHS = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
    for path in tracked("mmlab/*.py")
    if path not in (Path("mmlab/__init__.py"), Path("mmlab/__main__.py"))
}


def test_the_table_names_exactly_the_rooms_of_the_package() -> None:
    assert set(groups()) == {room_of(module) for module in PATHS}
    assert max(groups().values()) <= MOST_GROUPS


@pytest.mark.parametrize("module", PATHS)
def test_imports_point_upward(module: str) -> None:
    room, path = room_of(module), PATHS[module]
    imported = imported_modules(read(path), ".".join(path.parent.parts)) & set(PATHS)
    below = {name for name in imported if room_of(name) != room and groups()[room_of(name)] >= groups()[room]}
    if groups()[room] == 1:  # the first row stands in order itself
        first = [name for name, group in groups().items() if group == 1]
        below = {name for name in imported if first.index(room_of(name)) > first.index(room)}
    assert not below, (
        f"{module} (group {groups()[room]}) imports {below}, which are at or below its own group"
    )


def without_annotations(source: str) -> str:
    """The source without its `if TYPE_CHECKING:` blocks, which no program runs."""
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return ast.unparse(tree)


def test_no_imports_go_in_a_circle() -> None:
    run = {
        module: imported_modules(without_annotations(read(path)), ".".join(path.parent.parts)) & set(PATHS)
        for module, path in PATHS.items()
    }
    assert list(TopologicalSorter(run).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import mmlab.runs.events", "mmlab.runs.events"),
        ("def f():\n    from mmlab.schedule.plan import Block", "mmlab.schedule.plan"),
        ("if TYPE_CHECKING:\n    from mmlab.data import readers", "mmlab.data.readers"),
        ("from ..types import PATCH", "mmlab.types"),
        ("from .. import types", "mmlab.types"),
        ("from .plan import Block", "mmlab.schedule.plan"),
    ],
)
def test_every_way_to_import_is_seen(source: str, module: str) -> None:
    assert imported_modules(source, "mmlab.schedule") == {module}


def in_fresh_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


TORCH_FREE = ("data.readers", "loading.cache", "schedule.preview", "runs.watch", "cli.parser", "lab.lab")


def test_planning_watching_and_the_command_line_load_no_torch() -> None:
    modules = ", ".join(f"mmlab.{module}" for module in TORCH_FREE)
    loaded = set(in_fresh_python(f"import sys, {modules}; print(*sys.modules)").split())
    assert not loaded & {"torch", "transformers", "ipywidgets"}


def test_training_loads_no_widgets() -> None:
    loaded = set(in_fresh_python("import sys, mmlab.comparison.train; print(*sys.modules)").split())
    assert "torch" in loaded
    assert "ipywidgets" not in loaded


@pytest.mark.serial
def test_import_mmlab_is_light_and_quick() -> None:
    code = "import sys, time; t = time.perf_counter(); import mmlab; print(time.perf_counter() - t, *sys.modules)"
    runs = [in_fresh_python(code).split() for _ in range(3)]
    assert not {"torch", "ipywidgets", "pandas", "numpy"} & set(runs[0])
    assert min(float(seconds) for seconds, *_ in runs) < IMPORT_BOUND_S


def test_no_public_name_is_that_of_a_module() -> None:
    assert not set(mmlab.__all__) & set(groups()), "importing the module would hide the public name"


ROOM_FACES = [f"mmlab.{room}" for room in groups() if Path(f"mmlab/{room}").is_dir()]


@pytest.mark.parametrize("room", ROOM_FACES)
def test_every_name_of_a_rooms_face_resolves(room: str) -> None:
    face = import_module(room)
    assert face.__doc__
    assert face.__all__
    for name in face.__all__:
        assert getattr(face, name) is not None


@pytest.mark.parametrize("name", mmlab.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(mmlab, name).__doc__
