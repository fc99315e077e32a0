"""Notebooks as a user meets them: opened, all cells run, nothing raised, panels drawn."""

from __future__ import annotations

import json
import shutil

import pytest
from jupyter import ROOT, Notebook, Server
from playwright.sync_api import Browser

_OUTPUTS = """() => jupyterapp.shell.currentWidget.content.widgets.flatMap(cell =>
  cell.model.type === 'code' ? Array.from({length: cell.model.outputs.length}, (_, i) => {
    const output = cell.model.outputs.get(i);
    return output.type === 'error' ? output.toJSON().traceback.join('\\n') : '' }) : []).filter(Boolean)"""

# A notebook draws no cell that is far out of sight.
_SHOW = """number => { const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = number; return notebook.scrollToItem(number, 'start'); }"""

_NUM_RUN = """() => jupyterapp.shell.currentWidget.content.widgets.filter(
  cell => cell.model.type === 'code' && cell.model.executionCount).length"""


@pytest.mark.parametrize("name", ["00_start_here", "05_live_dashboard"])
def test_a_notebook_opens_and_runs(server: Server, browser: Browser, name: str) -> None:
    for folder in ("notebooks", "data"):
        shutil.copytree(ROOT / folder, server.files / "tour" / folder, dirs_exist_ok=True)
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())["cells"]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    try:
        notebook = Notebook(server, page, f"tour/notebooks/{name}.ipynb").open()
        page.evaluate(
            "() => jupyterapp.commands.execute('notebook:run-all-cells')"
        )  # until the last one has run
        notebook.ready()
        assert page.evaluate(_OUTPUTS) == []
        assert page.evaluate(_NUM_RUN) == sum(cell["cell_type"] == "code" for cell in cells)
        shown = [number for number, cell in enumerate(cells) if _shows_a_panel("".join(cell["source"]))]
        assert shown
        for number in shown:
            page.evaluate(_SHOW, number)
            panel = notebook.panel(page.locator(f".jp-Cell[data-windowed-list-index='{number}']"))
            panel.wait_points(2)
            assert panel.wait_state("done") == "done"
        assert not notebook.errors, notebook.errors
    finally:
        page.close()


def _shows_a_panel(source: str) -> bool:
    return source.rsplit("\n", 1)[-1].startswith(("lab.panel()", "LivePanel("))
