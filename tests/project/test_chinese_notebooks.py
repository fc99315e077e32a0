"""The Chinese notebooks have the code of the English ones, and all of their prose, as it is now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.project.checkout import read, tracked
from tests.project.translate_notebooks import MOVE, ZH, generate, hash_of, text_of, translate

HAN = "[\u4e00-\u9fff\u3001\u3002\uff01-\uff1f]"
BROKEN = re.compile(rf"{HAN}\n {{0,3}}{HAN}")
SOURCES = tracked(f"{ZH}/*.md")
GENERATED = tracked(f"{ZH}/*.ipynb")


def test_each_source_has_its_notebooks() -> None:
    english = {path.stem for path in tracked(":(glob)notebooks/*.ipynb")}
    assert {path.stem for path in SOURCES} == {path.stem for path in GENERATED} == english


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_all_prose_is_translated_and_the_notebook_is_up_to_date(source: Path) -> None:
    text, wrong = generate(source)
    assert wrong == []
    assert read(source.with_suffix(".ipynb")) == text, "run `make zh`"


@pytest.mark.parametrize("path", GENERATED, ids=str)
def test_code_cells_are_those_of_the_english_notebook(path: Path) -> None:
    ours, english = (
        [cell for cell in json.loads(read(file))["cells"] if cell["cell_type"] == "code"]
        for file in (path, Path("notebooks") / path.name)
    )
    assert text_of(ours[0]) == MOVE
    assert ours[1:] == english


@pytest.mark.parametrize("path", [*SOURCES, *tracked("*.zh-CN.md")], ids=str)
def test_no_line_ends_inside_a_paragraph_where_a_browser_would_show_a_space(path: Path) -> None:
    assert [broken[0] for broken in BROKEN.finditer(read(path))] == []


def test_what_is_missing_stale_or_left_over_is_named() -> None:
    cells = [{"cell_type": "markdown", "id": name, "source": name} for name in ("same", "new", "changed")]
    prose = f"<!-- same {hash_of('same')} -->\n相同\n<!-- changed 0123abcd -->\n变了\n<!-- gone 0123abcd -->\n没了\n"
    notebook, wrong = translate({"cells": cells}, prose)
    assert text_of(notebook["cells"][0]) == "相同"
    assert [line.split(",")[0] for line in wrong] == [
        "translate the cell new anew",
        "translate the cell changed anew",
        "no English cell gone: delete its translation",
    ]
