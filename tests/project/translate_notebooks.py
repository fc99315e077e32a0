"""Write the Chinese notebooks: the code cells of `notebooks/NAME.ipynb` between the prose of `notebooks/zh/NAME.md`.

    python tests/project/translate_notebooks.py

`make zh` runs this. A section of the prose begins with `<!-- ID HASH -->`: the id of the English cell that it translates, and
the hash of that cell's text when it was translated. So a cell that changed since, or has no translation, is named.
"""

from __future__ import annotations

import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ZH = Path("notebooks/zh")
SECTION = re.compile(r"^<!-- (\S+) (\w+) -->\n", re.MULTILINE)
MOVE = """# The cells below find files from the folder above.
import os

if os.path.basename(os.getcwd()) == "zh":
    os.chdir("..")"""


def text_of(cell: dict[str, Any]) -> str:
    """The source of a cell, which is stored as a text or as a list of lines."""
    return "".join(cell["source"])


def hash_of(text: str) -> str:
    """What tells whether a text has changed.

    >>> hash_of("A batch is a rectangle.")
    '95e655cd'
    """
    return sha256(text.encode()).hexdigest()[:8]


def translate(notebook: dict[str, Any], prose: str) -> tuple[dict[str, Any], list[str]]:
    """The notebook with translated prose, and what is wrong with the translation: what is missing, stale or left over."""
    _, *parts = SECTION.split(prose)
    sections = {name: (known, text.strip("\n")) for name, known, text in zip(*[iter(parts)] * 3, strict=True)}
    wrong, cells = [], []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            known, text = sections.pop(cell["id"], ("", ""))
            if known != (now := hash_of(text_of(cell))) or not text:
                wrong.append(f"translate the cell {cell['id']} anew, below <!-- {cell['id']} {now} -->")
            cell = cell | {"source": text.splitlines(keepends=True)}
        elif all(other["cell_type"] == "markdown" for other in cells):
            move = {
                "cell_type": "code",
                "id": "zh-folder",
                "metadata": {},
                "execution_count": None,
                "outputs": [],
            }
            cells.append(move | {"source": MOVE.splitlines(keepends=True)})
        cells.append(cell)
    wrong += [f"no English cell {name}: delete its translation" for name in sections]
    return notebook | {"cells": cells}, wrong


def generate(source: Path) -> tuple[str, list[str]]:
    """The text of the Chinese notebook for a source of prose (relative to the root), and what is wrong with that source."""
    english = json.loads((ROOT / "notebooks" / f"{source.stem}.ipynb").read_text("utf-8"))
    notebook, wrong = translate(english, (ROOT / source).read_text("utf-8"))
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n", wrong


def main() -> int:
    """Write them all; 1 where something is wrong."""
    found = []
    for path in sorted((ROOT / ZH).glob("*.md")):
        text, wrong = generate(ZH / path.name)
        path.with_suffix(".ipynb").write_text(text, "utf-8")
        found += [f"{ZH / path.name}: {problem}" for problem in wrong]
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
