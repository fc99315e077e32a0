"""Run All on a fresh kernel: the panel is live while later cells run and queue, and its buttons are obeyed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from mmlab.comparison.background import find_run
from tests.browser.jupyter import PATIENCE_MS, Notebook, Server
from tests.browser.writing_runs import write_run


@pytest.fixture
def new_notebook(server: Server, page: Page) -> Iterator[Callable[[list[str]], Notebook]]:
    """Makes a notebook in a tab of its own, with a kernel that has run nothing."""
    own = page.context.new_page()
    yield lambda cells: Notebook(server, own, "run_all.ipynb").create(cells)
    own.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    own.close()


def test_the_panel_steers_while_cells_run_and_queue_and_a_run_of_its_button_ends_with_the_kernel(
    new_notebook: Callable[[list[str]], Notebook], scenes: Path
) -> None:
    options = "epochs=300, image='aspect:48', batch_size=4, equal='batch_size', num_workers=0, out='run_all'"
    cells = [
        "from mmlab import Lab",
        f"lab = Lab({str(scenes)!r}, schedulers=('random', 'budget'), {options})\nlab.panel()",
        "lab.start()",
        "try:\n    lab.wait()\nexcept Exception as error:\n    print(error)",
        "print('the end')",
    ]
    notebook = new_notebook(cells)
    notebook.do("notebook:run-all-cells")
    panel = notebook.panel(notebook.cell(1))
    waiting = notebook.cell(3).locator(".jp-InputPrompt")
    panel.wait_state("running")
    panel.wait_points(8)
    expect(waiting).to_have_text("[*]:")
    panel.button("pause").click()
    panel.wait_state("paused")
    held = int(panel.data("points"))
    expect(waiting).to_have_text("[*]:")
    panel.button("resume").click()
    panel.wait_state("running")
    panel.wait_points(held + 4)
    panel.button("stop").click()
    panel.wait_state("stopped")
    expect(notebook.cell(4)).to_contain_text("the end")

    panel.button("start").click()
    panel.wait_state("running")
    panel.wait_points(4)
    found = find_run(notebook.server.files / "run_all")
    assert found is not None
    notebook.page.evaluate(
        "() => { window.restarted = jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"
    )
    panel.wait_state("lost")
    found.sleep(60)
    assert found.state == "stopped", "the run that the button started goes on without its kernel"
    notebook.page.evaluate("() => window.restarted")  # a kernel that is being restarted cannot be shut down


def test_rows_come_without_a_word_from_the_page_and_a_busy_kernel_is_called_busy(
    new_notebook: Callable[[list[str]], Notebook], server: Server
) -> None:
    write_run(server.files / "written", 40)
    cells = [
        "from mmlab.lab.live_panel import LivePanel",
        "LivePanel('written')",
        "import ctypes\nctypes.PyDLL(None).sleep(7)  # no thread of the kernel can do anything meanwhile",
        "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.05)",
    ]
    notebook = new_notebook(cells)
    notebook.page.evaluate(_NO_SUBSHELLS)
    notebook.do("notebook:run-all-cells")
    panel = notebook.panel(notebook.cell(1))
    panel.wait_state("busy")
    panel.wait_state("done")
    panel.wait_points(40)
    expect(notebook.cell(3).locator(".jp-InputPrompt")).to_have_text("[*]:")
    (server.files / "seen").touch()
    notebook.ready()


def test_what_the_page_says_shows_no_figure_that_a_cell_has_only_begun(
    new_notebook: Callable[[list[str]], Notebook], server: Server
) -> None:
    write_run(server.files / "grown" / "first", 40)
    cells = [
        "%matplotlib inline\nfrom mmlab.lab.live_panel import LivePanel\nLivePanel('grown')",
        "import os, time\nfrom matplotlib import pyplot as plt\nfigure = plt.figure()\nopen('begun', 'w').close()\n"
        "while not os.path.exists('grown/seen'): time.sleep(0.05)\nprint(len(plt.get_fignums()), 'open')",
    ]
    notebook = new_notebook(cells)
    notebook.do("notebook:run-all-cells")
    panel = notebook.panel(notebook.cell(0))
    panel.wait_points(40)
    expect(notebook.cell(1).locator(".jp-InputPrompt")).to_have_text("[*]:")
    wait_for(server.files / "begun")
    for name in ("second", "third"):  # the page answers each once it is drawn
        points = int(panel.data("points"))
        write_run(server.files / "grown" / name, 40)
        panel.wait_points(points + 40)
    (server.files / "grown" / "seen").touch()
    expect(notebook.cell(1)).to_contain_text("1 open")


def test_the_page_is_heard_while_a_cell_captures_its_output_though_its_first_message_waits_behind_it(
    new_notebook: Callable[[list[str]], Notebook], server: Server
) -> None:
    write_run(server.files / "captured" / "run", 40)
    cells = [
        "from mmlab.lab.live_panel import LivePanel\nLivePanel('captured')",
        "%%capture\nimport os, time\nopen('captures', 'w').close()\n"
        "while not os.path.exists('captured/seen'): time.sleep(0.05)",
    ]
    notebook = new_notebook(cells)
    notebook.page.evaluate(_LATE_SUBSHELL)
    notebook.do("notebook:run-all-cells")
    panel = notebook.panel(notebook.cell(0))
    panel.wait_points(40)
    wait_for(server.files / "captures")
    panel.root.get_by_label("clear run").click()
    expect(panel.root.locator(".mmlp-legend [data-line]")).to_have_count(0)
    expect(notebook.cell(1).locator(".jp-InputPrompt")).to_have_text("[*]:")
    (server.files / "captured" / "seen").touch()
    notebook.ready()
    expect(notebook.cell(1).locator(".jp-OutputArea-output")).to_have_count(0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


# as in front ends whose messages all go to the thread that runs the cells
_NO_SUBSHELLS = """() => {
  jupyterapp.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = 'disabled'; }"""

# as on a machine with much to do: until then, messages go to the thread that runs the cells
_LATE_SUBSHELL = """() => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const request = kernel.requestCreateSubshell.bind(kernel), late = () => new Promise((go) => setTimeout(go, 4000));
  kernel.requestCreateSubshell = (content) => ({ done: request(content).done.then((reply) => late().then(() => reply)) });
}"""
