"""Notebooks as a user meets them: opened, run, nothing raised, their widgets drawn and tried by hand.

Of each notebook only the cells that its widget needs: `make notebooks` runs all cells of all.

All are tabs of one JupyterLab, each with a kernel of its own. The next one is started before the one in hand is
looked at, so that neither core waits. What the widgets look like, in both themes, is kept in `build/screenshots`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.jupyter import PATIENCE_MS, ROOT, Notebook, Server

SCREENSHOTS = ROOT / "build" / "screenshots"

_IS_OPEN = """path => { const tab = jupyterapp.shell.currentWidget;
  return tab?.context?.path === path && tab.context.isReady && tab.sessionContext.isReady; }"""
_HAS_RUN = """path => { const tab = [...jupyterapp.shell.widgets('main')].find(tab => tab.context?.path === path);
  const cells = [...tab.content.model.cells].filter(cell => cell.type === 'code' && cell.sharedModel.source.trim());
  const failed = cells.some(({outputs}) =>
    Array.from({length: outputs.length}, (_, i) => outputs.get(i)).some(({type}) => type === 'error'));
  const idle = tab.sessionContext.session?.kernel?.status === 'idle';
  return idle && (failed || cells.every(cell => cell.executionCount && cell.executionState !== 'running')); }"""
_SELECT_TAB = """path => { const found = [...jupyterapp.shell.widgets('main')].find(tab => tab.context?.path === path);
  jupyterapp.shell.activateById(found.id); }"""
_CLOSE = """() => { const tab = jupyterapp.shell.currentWidget;
  tab.sessionContext.shutdown(); tab.context.model.dirty = false; tab.close(); }"""
_IS_CLOSED = "path => ![...jupyterapp.shell.widgets('main')].some(tab => tab.context?.path === path)"
_FAILED = """() => jupyterapp.shell.currentWidget.content.widgets.flatMap(cell =>
  cell.model.type === 'code' ? Array.from({length: cell.model.outputs.length}, (_, i) => {
    const output = cell.model.outputs.get(i);
    return output.type === 'error' ? output.toJSON().traceback.join('\\n') : '' }) : []).filter(Boolean)"""
_NUM_RUN = """() => jupyterapp.shell.currentWidget.content.widgets.filter(
  cell => cell.model.type === 'code' && cell.model.executionCount).length"""
_PANELS = """() => jupyterapp.shell.currentWidget.content.widgets.flatMap((cell, number) =>
  cell.model.type === 'code' && Array.from({length: cell.model.outputs.length}, (_, i) => cell.model.outputs.get(i))
    .some(({data}) => /^MemoryPanel|^PlanExplorer/.test(data['text/plain'])) ? [number] : [])"""
# A notebook draws no cell that is far out of sight.
_SHOW = """number => { const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = number; notebook.scrollToItem(number, 'start'); }"""


class Tour:
    """The notebooks, copied beside their data with the cells that are run, and opened in one page."""

    def __init__(self, server: Server, page: Page) -> None:
        for folder in ("notebooks", "data", "examples"):
            shutil.copytree(ROOT / folder, server.files / "tour" / folder, dirs_exist_ok=True)
        for name, (_, *needed) in BY_HAND.items():
            path = server.files / f"tour/notebooks/{name}.ipynb"
            content = json.loads(path.read_text())
            content["cells"] = [
                cell
                for cell in content["cells"]
                if cell["cell_type"] != "code" or any(words in "".join(cell["source"]) for words in needed)
            ]
            path.write_text(json.dumps(content))
        self.server, self.page = server, page
        self.opened: dict[str, Notebook] = {}

    def begin(self, name: str) -> None:
        """Open a notebook and run all of its cells, without waiting for them."""
        path = f"tour/notebooks/{name}.ipynb"
        notebook = Notebook(self.server, self.page, path)
        if self.opened:
            notebook.do("docmanager:open", path=path)
            self.page.wait_for_function(_IS_OPEN, arg=path, timeout=PATIENCE_MS)
            notebook.ready()
        else:
            notebook.open()
        self.opened[name] = notebook
        notebook.do("notebook:run-all-cells")

    def end(self, name: str) -> Notebook:
        """Bring a notebook to the front once its last cell has run."""
        notebook = self.opened[name]
        self.page.wait_for_function(_HAS_RUN, arg=notebook.name, timeout=2 * PATIENCE_MS, polling=250)
        self.page.evaluate(_SELECT_TAB, notebook.name)
        self.page.wait_for_function(
            "path => jupyterapp.shell.currentWidget.context?.path === path", arg=notebook.name
        )
        notebook.ready()
        return notebook


@pytest.fixture(scope="module")
def tour(server: Server, page: Page) -> Iterator[Tour]:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    own = page.context.new_page()  # of the same context: what the other page has loaded is not loaded again
    own.set_viewport_size({"width": 1280, "height": 1500})  # whole panels
    yield Tour(server, own)
    own.close()


@pytest.mark.parametrize("name", ["02_sorting_and_bucketing", "03_memory_aware_batching"])
def test_a_notebook_opens_and_runs(request: pytest.FixtureRequest, tour: Tour, name: str) -> None:
    chosen = [
        item.callspec.params["name"] for item in request.session.items if item.path == request.node.path
    ]
    for each in chosen[: chosen.index(name) + 2]:
        if each not in tour.opened:
            tour.begin(each)
    notebook = tour.end(name)
    cells = json.loads((tour.server.files / notebook.name).read_text())["cells"]
    assert tour.page.evaluate(_FAILED) == []
    assert tour.page.evaluate(_NUM_RUN) == sum(cell["cell_type"] == "code" for cell in cells)
    (number,) = tour.page.evaluate(_PANELS)
    output = shown(notebook, number)
    photograph(output, f"{name}-light")
    BY_HAND[name][0](notebook, output)
    notebook.theme("JupyterLab Dark")
    photograph(shown(notebook, number), f"{name}-dark")
    notebook.theme("JupyterLab Light")
    assert not notebook.errors, notebook.errors
    tour.page.evaluate(_CLOSE)
    tour.page.wait_for_function(_IS_CLOSED, arg=notebook.name)


def shown(notebook: Notebook, number: int) -> Locator:
    """The output of a cell with widgets, once it is drawn."""
    notebook.page.evaluate(_SHOW, number)
    tab = notebook.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    output = tab.locator(f".jp-Cell[data-windowed-list-index='{number}'] .jp-Cell-outputArea")
    expect(output.locator(".mmlab-panel").first).to_be_visible()
    return output


def photograph(output: Locator, name: str) -> None:
    output.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")


def move_a_slider_of_the_plan_explorer(notebook: Notebook, output: Locator) -> None:
    table, picture = output.locator(".mmlab-panel table"), output.locator(".mmlab-panel img")
    before, drawn = table.inner_text(), picture.get_attribute("src") or ""
    assert table.evaluate(_ROWS_OFF) <= 1.5, "names of rows stand beside their figures"
    assert output.locator(".mmlab-panel .widget-slider").evaluate_all(_LEFT_OFF) <= 1
    expect(output.locator(".mmlab-saved")).to_be_hidden()  # as long as there is the panel
    output.locator(".noUi-handle").first.focus()
    notebook.page.keyboard.press("ArrowRight")
    expect(table).not_to_have_text(before, use_inner_text=True)
    expect(picture).not_to_have_attribute("src", drawn)
    keys_stay(notebook, output.locator("select"), output.locator(".noUi-handle").last)


def move_a_slider_of_the_memory_panel(notebook: Notebook, output: Locator) -> None:
    picture = output.locator(".mmlab-panel img")
    before = picture.get_attribute("src") or ""
    output.locator(".noUi-handle").focus()
    notebook.page.keyboard.press("ArrowLeft")
    expect(picture).not_to_have_attribute("src", before)
    keys_stay(notebook, output.locator("select"), output.locator(".noUi-handle"))


_ROWS_OFF = """table => Math.max(...[...table.tBodies[0].rows].map(row => { const [name, figure] = [...row.cells].map(cell => {
  const range = document.createRange(); range.selectNodeContents(cell); const box = range.getBoundingClientRect();
  return (box.top + box.bottom) / 2; }); return Math.abs(name - figure); }))"""
_LEFT_OFF = """sliders => { const lefts = sliders.map(each => each.getBoundingClientRect().left);
  return Math.max(...lefts) - Math.min(...lefts); }"""

# How a notebook's widget is tried, and what stands in the cells that are run for it.
BY_HAND: dict[str, tuple[Any, ...]] = {
    "02_sorting_and_bucketing": (
        move_a_slider_of_the_plan_explorer,
        "import ",
        "many = draw_sizes",
        "PlanExplorer(many",
    ),
    "03_memory_aware_batching": (
        move_a_slider_of_the_memory_panel,
        "import ",
        "many = draw_sizes",
        "models = {}",
        "MemoryPanel(many",
    ),
}


def keys_stay(notebook: Notebook, *targets: Locator) -> None:
    """Keys that would add or delete a cell do nothing to the notebook."""
    before = notebook.num_cells
    for target in targets:
        target.focus()
        for key in ("b", "a", "d", "d", "x"):
            notebook.page.keyboard.press(key)
    notebook.page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    assert notebook.num_cells == before, "the notebook took the keys of a widget"
