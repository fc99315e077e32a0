"""Jupyter Notebook 7, a front end without JupyterLab's tabs: Run All of a notebook with the live panel, which is steered."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.jupyter import PATIENCE_MS, ROOT, Notebook, Server
from tests.browser.test_open_notebooks import SCREENSHOTS


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7, with notebook 05 beside its data: as far as it starts a run, and waits for it."""
    import nbformat

    folder = tmp_path_factory.mktemp("notebook_7")
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / "files" / name)
    path = folder / "files/notebooks/05_live_dashboard.ipynb"
    content = nbformat.read(path, 4)
    starting = next(i for i, cell in enumerate(content.cells) if "lab.start()" in cell.source)
    source = content.cells[starting].source.replace('"fastest"', '"budget"')
    content.cells[starting].source = source.replace("epochs=smoke(1, 2)", 'epochs=300, equal="batch_size"')
    waiting = "try:\n    lab.wait()\nexcept Exception as error:\n    print('ended:', error)"
    content.cells[starting + 1 :] = [nbformat.v4.new_code_cell(waiting)]
    nbformat.write(content, path)
    server = Server(folder, ["-m", "notebook"], status="api/status", MMLAB_SMOKE="1")
    yield server
    server.close()


def test_run_all_in_notebook_7_shows_a_live_panel_that_is_steered(plain: Server, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    notebook = Notebook(plain, page, "05_live_dashboard.ipynb")
    page.goto(plain.url("notebooks/notebooks/05_live_dashboard.ipynb"))
    notebook.ready()
    assert page.evaluate("() => jupyterapp.name") == "Jupyter Notebook"
    notebook.do("notebook:run-all-cells")
    panel = notebook.panel(page.locator(".jp-Notebook"))
    panel.wait_state("running")
    held = panel.wait_points(8)  # while the last cell waits for the run
    panel.wait_points(held + 8)
    assert sum(panel.colours("loss").values()) > 20
    page.screenshot(path=SCREENSHOTS / "notebook_7.png")
    panel.button("pause").click()
    panel.wait_state("paused")
    panel.button("resume").click()
    panel.wait_state("running")
    panel.button("stop").click()
    panel.wait_state("stopped")
    expect(page.locator(".jp-Notebook .jp-Cell").last).to_contain_text("ended:")
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    raised = [
        error for error in notebook.errors if "blob:" in error
    ]  # by widgets; the front end has some of its own
    assert not raised
