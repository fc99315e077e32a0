"""Notebooks are committed clean, hold prose and short cells, and define nothing that belongs in the library."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.project.checkout import read, tracked

MAX_CELL_LINES = 15
IMPORTS = {"mmlab", "IPython", "ipywidgets", "matplotlib", "pandas", "pathlib", "transformers"}
NOTEBOOK_METADATA = {"kernelspec", "language_info"}
NOTEBOOKS = tracked(":(glob)notebooks/*.ipynb")


def problems(notebook: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a notebook, one line each, cells counted from 1."""
    found = []
    if extra := set(notebook["metadata"]) - NOTEBOOK_METADATA:
        found.append(f"notebook metadata {sorted(extra)}")
    if notebook["cells"][0]["cell_type"] != "markdown":
        found.append("cell 1 is not prose")
    for number, cell in enumerate(notebook["cells"], start=1):
        if extra := set(cell["metadata"]) - {"tags"}:
            found.append(f"cell {number}: metadata {sorted(extra)}")
        if cell["cell_type"] == "code":
            found += [f"cell {number}: {problem}" for problem in code_problems(cell)]
    return found


def code_problems(cell: dict[str, Any]) -> list[str]:
    """What is wrong with one code cell."""
    source = "".join(cell["source"])
    found = []
    if "keep_output" in cell["metadata"].get("tags", []):
        if "# NBVAL_CHECK_OUTPUT" not in source:
            found.append("keeps its output but does not check it (# NBVAL_CHECK_OUTPUT)")
        if cell["execution_count"] is None:
            found.append("keeps its output without an execution count, so nbval does not compare it")
        if {mime.split("/")[0] for output in cell["outputs"] for mime in output.get("data", {})} - {"text"}:
            found.append("keeps an output that is not text")
    elif cell["outputs"] or cell["execution_count"] is not None:
        found.append("output or execution count is not stripped")
    if (lines := len(source.splitlines())) > MAX_CELL_LINES:
        found.append(f"{lines} lines, at most {MAX_CELL_LINES}")
    for node in ast.walk(ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.MULTILINE))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(f"defines {node.name}, which belongs in the library")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            if foreign := {name.split(".")[0] for name in names} - IMPORTS:
                found.append(f"imports {sorted(foreign)}, allowed: {sorted(IMPORTS)}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebook_is_clean(path: Path) -> None:
    assert problems(json.loads(read(path))) == []


def test_notebooks_are_numbered_in_reading_order() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(len(NOTEBOOKS))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_a_notebook_asks_lets_predict_and_concludes(path: Path) -> None:
    cells = json.loads(read(path))["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    parts = ("**The question.**", "**Predict first.**", "What to take away", "**Exercises.**", "<details>")
    places = [prose.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_the_first_notebook_lists_all() -> None:
    first = read(NOTEBOOKS[0])
    assert [path.name for path in NOTEBOOKS[1:] if f"]({path.name})" not in first] == []


MOST_BYTES = 6_000_000  # of all executed copies together, which a repository page loads


def test_executed_copies_show_outputs_and_stay_small() -> None:
    copies = tracked("docs/notebooks/*.ipynb")
    assert {path.name for path in copies} <= {path.name for path in NOTEBOOKS}
    assert sum(len(read(path).encode()) for path in copies) < MOST_BYTES
    for path in copies:
        outputs = [output for cell in json.loads(read(path))["cells"] for output in cell.get("outputs", [])]
        assert any("image/png" in output.get("data", {}) for output in outputs), f"{path} shows no figure"
        assert not any(
            output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs
        )


def code_cell(source: str, **fields: Any) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "metadata": {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    } | fields


CLEAN = {"metadata": {}, "cells": [{"cell_type": "markdown", "metadata": {}, "source": "# Title"}]}
CHECKED = "# NBVAL_CHECK_OUTPUT\n1"
PICTURE = [{"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}}]


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (code_cell("x = 1\n" * 16), "cell 2: 16 lines, at most 15"),
        (code_cell("def f():\n    pass"), "cell 2: defines f, which belongs in the library"),
        (code_cell("%matplotlib inline\nimport torch.nn"), "cell 2: imports ['torch'], allowed:"),
        (code_cell("1", execution_count=3), "cell 2: output or execution count is not stripped"),
        (code_cell("1", metadata={"scrolled": True}), "cell 2: metadata ['scrolled']"),
        (
            code_cell("1", metadata={"tags": ["keep_output"]}, execution_count=1),
            "cell 2: keeps its output but does not check it",
        ),
        (
            code_cell(CHECKED, metadata={"tags": ["keep_output"]}),
            "cell 2: keeps its output without an execution count",
        ),
        (
            code_cell(CHECKED, metadata={"tags": ["keep_output"]}, outputs=PICTURE, execution_count=1),
            "cell 2: keeps an output that is not text",
        ),
    ],
)
def test_each_fault_is_found(cell: dict[str, Any], problem: str) -> None:
    notebook = copy.deepcopy(CLEAN)
    assert problems(notebook) == []
    notebook["cells"].append(cell)
    assert [found[: len(problem)] for found in problems(notebook)] == [problem]
