"""Imports point only upward in the table of ARCHITECTURE.md, and a layer loads no more than the table allows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, read, tracked

import mmlab

IMPORT_BOUND_S = 0.3
NOT_LOADED = {"numpy": ("torch", "transformers", "ipywidgets"), "torch": ("ipywidgets",)}


def layer_table() -> dict[str, tuple[int, str]]:
    """Room -> (layer, what it may load), from the rows `| 3 | numpy | `a`, `b` | ... |` of ARCHITECTURE.md."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+?) \|", read(Path("ARCHITECTURE.md")), re.MULTILINE)
    return {
        room: (int(layer), loads) for layer, loads, rooms in rows for room in re.findall(r"`(\w+)`", rooms)
    }


def room_of(dotted: str) -> str:
    """`mmlab.schedule.plan` -> `schedule`; a name that `mmlab` exports lazily -> the room it lives in."""
    name = [*dotted.split("."), ""][1]
    return mmlab._PUBLIC.get(name, name).split(".")[0]


def imported_rooms(source: str, package: str) -> set[str]:
    """Every room that a module of `package` imports anywhere in its text, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "mmlab" else {base}
    return {room_of(name) for name in found if name.startswith("mmlab.")} - {"__version__"}


MODULES = [path for path in tracked("mmlab/*.py") if path != Path("mmlab/__init__.py")]
ROOMS = {path: path.parts[1].removesuffix(".py") for path in MODULES}


def test_the_table_names_exactly_the_rooms_of_the_package() -> None:
    assert set(layer_table()) == set(ROOMS.values())


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_upward(path: Path) -> None:
    layers = {room: layer for room, (layer, _) in layer_table().items()}
    room = ROOMS[path]
    downward = {
        name
        for name in imported_rooms(read(path), ".".join(path.parent.parts)) - {room}
        if layers[name] >= layers[room]
    }
    assert not downward, f"{path} (layer {layers[room]}) imports {downward} at or below its own layer"


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("import mmlab.events", "events"),
        ("def f():\n    from mmlab.schedule.plan import Block", "schedule"),
        ("if TYPE_CHECKING:\n    from mmlab import readers", "readers"),
        ("from mmlab import BatchShape", "types"),
        ("from ..cost import PATCH", "cost"),
        ("from .. import cost", "cost"),
        ("from .plan import Block", "schedule"),
    ],
)
def test_every_way_to_import_is_seen(source: str, room: str) -> None:
    assert imported_rooms(source, "mmlab.schedule") == {room}


def in_fresh_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("loads", sorted(NOT_LOADED))
def test_a_layer_loads_no_more_than_it_says(loads: str) -> None:
    rooms = [f"mmlab.{room}" for room, (_, allowed) in layer_table().items() if allowed == loads]
    loaded = set(in_fresh_python(f"import sys, {', '.join(rooms)}; print(*sys.modules)").split())
    assert not loaded & set(NOT_LOADED[loads]), f"one of {rooms} loads more than {loads}"


def test_import_mmlab_is_light_and_quick() -> None:
    code = "import sys, time; t = time.perf_counter(); import mmlab; print(time.perf_counter() - t, *sys.modules)"
    runs = [in_fresh_python(code).split() for _ in range(3)]
    assert not {"torch", "ipywidgets", "pandas", "numpy"} & set(runs[0])
    assert min(float(seconds) for seconds, *_ in runs) < IMPORT_BOUND_S


def test_no_public_name_is_that_of_a_module() -> None:
    assert not set(mmlab.__all__) & set(ROOMS.values()), "importing the module would hide the public name"


@pytest.mark.parametrize("name", mmlab.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(mmlab, name).__doc__
