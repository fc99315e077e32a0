"""Execute notebooks in full and write the executed copies that a reader without Jupyter sees: `make docs` runs this.

    python docs/site/execute_notebooks.py notebooks/*.ipynb

Sources in `notebooks/` stay stripped; the copies go to `docs/notebooks/`. A cell that fails ends the whole with its error.
In a copy, each live panel is replaced by the table and the picture that it leaves when its run has ended.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
COPIES = ROOT / "docs" / "notebooks"
SAVED = re.compile(r'<div class="mmlab-saved">(.*)</div>', re.DOTALL)
PICTURE = re.compile(r'<img[^>]*src="data:image/png;base64,([^"]+)"[^>]*>')
PLACES = {
    Path(sys.prefix).resolve(): ".venv/",
    sys.prefix: ".venv/",
    ROOT: "",
    Path.home(): "~/",
}  # of this machine
NOTHING_YET, ANOTHER = "No run had ended", ROOT / "docs/images/live_panel.png"
WAIT = "import time; time.sleep(10)"  # a panel draws its last picture after its run has ended
CELL_TIMEOUT_S = 1200


def execute(path: Path) -> Path:
    """Run one notebook in its own folder; returns the path of the executed copy."""
    import nbformat  # takes a CPU second or two, and every process of the tests reads this file
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(WAIT))
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": path.parent}}).execute()
    notebook.cells.pop()
    COPIES.mkdir(exist_ok=True)
    nbformat.write(tidy(notebook), COPIES / path.name)
    return COPIES / path.name


def tidy(notebook: NotebookNode) -> NotebookNode:
    """The executed notebook without progress bars, widgets and this machine's paths, its links seen from `docs/notebooks`."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../", "](../../")
        else:
            cell.outputs = [kept for output in cell.outputs for kept in _kept(output)]
    return notebook


def _kept(output: NotebookNode) -> list[NotebookNode]:
    from nbformat.v4 import new_output

    if output.get("name") == "stderr" or "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
        return []
    output.get("metadata", {}).clear()
    for texts in (output, output.get("data", {})):
        for mime in ("text", "text/plain", "text/html"):
            if mime in texts:
                for path, short in PLACES.items():
                    texts[mime] = texts[mime].replace(f"{path}/", short)
    saved = SAVED.search(output.get("data", {}).get("text/html", ""))
    if not saved:
        return [output]
    pictures = PICTURE.findall(saved[1])
    table = PICTURE.sub("", saved[1]).strip()
    if not pictures and NOTHING_YET in table:
        pictures, table = (
            [base64.b64encode(ANOTHER.read_bytes()).decode()],
            "The live panel, in a picture of another run:",
        )
    found = [new_output("display_data", {"text/html": table})] if table else []
    return found + [
        new_output("display_data", {"image/png": data, "text/plain": "the panel"}) for data in pictures
    ]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(execute(Path(name).resolve()).relative_to(ROOT), flush=True)
