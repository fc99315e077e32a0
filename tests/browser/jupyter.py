"""A real JupyterLab in a real Chromium: start a server of its own, open notebooks, run cells, find panels.

Nothing sleeps for readiness: waits are on the kernel's own status, and on the panel's `data-state`, `data-seq` and
`data-points`, which it sets once what they say is drawn.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, Playwright, expect

from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
BLUE, ORANGE = LINE_COLOURS = ("#0072B2", "#D98C00")  # of the schedulers random and budget, light theme
PATIENCE_MS = (
    180_000  # training alone takes 25 s to begin on two cores at load 7; a wait ends as soon as it can
)
expect.set_options(timeout=PATIENCE_MS)
# fmt: off
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows",
]
# fmt: on
CONFIG = """
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = {port}
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.root_dir = {root!r}
c.IdentityProvider.token = ""
c.ServerApp.password = ""
c.ServerApp.disable_check_xsrf = True
c.LabApp.expose_app_in_browser = True
c.JupyterNotebookApp.expose_app_in_browser = True
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.workspaces_dir = {workspaces!r}
c.LabApp.user_settings_dir = {settings!r}
"""


# JupyterLab ends the kernel's thread that answers widgets when there are none left. If a message has just come there,
# ipykernel (7.4) drops it with a warning that asyncio writes into whichever cell is running.
_ENDED_SUBSHELL = re.compile(r"Task was destroyed but it is pending!\ntask: <Task .*ipykernel/utils\.py")


def chromium_path() -> str | None:
    """Where Chromium is; `MMLAB_CHROMIUM` names one, else the usual commands are looked for.

    None leaves it to Playwright's own build, and to its message where that is missing too.
    """
    names = [os.environ.get("MMLAB_CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def launch(playwright: Playwright) -> Browser:
    """Chromium without a window, with timers and animation frames at their full rate."""
    return playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=ARGUMENTS)


class Server:
    """A web server in a process group of its own, with configuration, data and settings that nobody else has."""

    def __init__(self, folder: Path, command: list[str], *, status: str, **environment: str) -> None:
        self.folder, self.port = folder, free_port()
        self.files = folder / "files"
        for name in ("files", "config", "workspaces", "settings/@jupyterlab/apputils-extension"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        config = CONFIG.format(
            port=self.port,
            root=str(self.files),
            workspaces=str(folder / "workspaces"),
            settings=str(folder / "settings"),
        )
        (folder / "config/jupyter_server_config.py").write_text(config)
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        (folder / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings").write_text(
            json.dumps(quiet)
        )
        own = {
            "JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data",
            "IPYTHONDIR": "ipython", "MPLCONFIGDIR": "matplotlib",
        }  # fmt: skip
        variables = {name: str(folder / value) for name, value in own.items()}
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", **environment}
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(part.format(port=self.port) for part in command)],
                cwd=self.files,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_it_answers(status)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def close(self) -> None:
        """End the server, and every kernel it started."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)  # its kernels are in groups of their own: only it can end them
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _wait_until_it_answers(self, path: str) -> None:
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while True:
            try:
                urllib.request.urlopen(self.url(path), timeout=5).read()
                return
            except (urllib.error.URLError, OSError) as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    log = self.log.read_text(errors="replace")[-3000:]
                    self.process.kill()
                    raise RuntimeError(f"the server did not come up ({error}):\n{log}") from error
                time.sleep(0.05)


class Notebook:
    """A notebook in a browser's page: run code in it and find what it shows."""

    def __init__(self, server: Server, page: Page, name: str) -> None:
        self.server, self.page, self.name = server, page, name
        self.errors: list[str] = []  # what the page's own scripts raised
        page.on("pageerror", lambda error: self._note(error.stack or str(error)))

    def _note(self, error: str) -> None:
        # JupyterLab's own, now and then, when outputs go; scripts of widgets have blob addresses
        if "'removeChild' on 'Node'" not in error or "blob:" in error:
            self.errors.append(error)

    def create(self, cells: Sequence[str] = ()) -> Notebook:
        """A new notebook with cells of code that nobody has run."""
        import nbformat  # takes two CPU seconds; every process of the tests reads this file

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, self.server.files / self.name)
        return self.open()

    def open(self) -> Notebook:
        workspace = Path(self.name).stem  # of its own: another's tabs would be opened again beside it
        self.page.goto(self.server.url(f"lab/workspaces/{workspace}/tree/{self.name}"))
        self.ready()
        return self

    def ready(self) -> None:
        """Wait until the notebook has a kernel that is idle."""
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady", timeout=PATIENCE_MS
        )
        self.page.wait_for_function(
            "() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'",
            timeout=PATIENCE_MS,
        )

    def reload(self) -> None:
        """Save, and load the page anew."""
        self.do("docmanager:save")
        self.page.wait_for_function(
            "() => !jupyterapp.shell.currentWidget.context.model.dirty", timeout=PATIENCE_MS
        )
        self.page.reload()
        self.ready()

    def theme(self, name: str) -> None:
        """Change JupyterLab's theme and wait until its colours are there."""
        self.do("apputils:change-theme", theme=name)
        self.page.wait_for_function(_HAS_COLOURS_OF, arg=name)

    def do(self, command: str, **arguments: Any) -> None:
        """Start a command of JupyterLab; wait then for what it makes of the page.

        Its promise is not waited for: Chromium may collect a promise that nothing on the page holds.
        """
        self.page.evaluate(
            "([command, arguments_]) => { jupyterapp.commands.execute(command, arguments_); }",
            [command, arguments],
        )

    def run(self, code: str, *, wait: bool = True, fails: bool = False) -> Locator:
        """Run code in a new last cell; returns the cell once it has run (at once without `wait`)."""
        number = self.page.evaluate(_NEW_CELL, code)
        return self.run_again(number, wait=wait, fails=fails)

    def run_again(self, number: int, *, wait: bool = True, fails: bool = False) -> Locator:
        """Run a cell by its number."""
        self.page.evaluate(_CHOOSE, number)
        self.do("notebook:run-cell")
        if wait:
            self.page.wait_for_function(_HAS_RUN, arg=number, timeout=PATIENCE_MS)
        cell = self.cell(number)
        if wait and not fails:
            error = cell.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']")
            said = [text for text in error.all_inner_texts() if not _ENDED_SUBSHELL.match(text)]
            assert not said, said[0]
        return cell

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    @property
    def num_cells(self) -> int:
        return self.page.evaluate("() => jupyterapp.shell.currentWidget.content.widgets.length")

    def show(self, code: str) -> Panel:
        """Run code whose last line is a live panel."""
        return self.panel(self.run(f"from mmlab.lab.live_panel import LivePanel\n{code}"))

    def panel(self, cell: Locator) -> Panel:
        """The live panel in a cell's output."""
        root = cell.locator(".mmlp").first
        root.wait_for(timeout=PATIENCE_MS)
        root.scroll_into_view_if_needed()
        return Panel(root)


class Panel:
    """A live panel on a page."""

    def __init__(self, root: Locator) -> None:
        self.root, self.page = root, root.page

    def wait_state(self, *states: str) -> str:
        """Wait until the panel shows one of these states; returns it."""
        return self._wait(
            "(el, wanted) => wanted.includes(el.dataset.state) && el.dataset.state", list(states)
        )

    def wait_points(self, number: int) -> int:
        """Wait until so many steps are drawn, or more; returns how many."""
        return self._wait("(el, wanted) => +el.dataset.points >= wanted && +el.dataset.points", number)

    def wait_change(self, act: Any) -> None:
        """Do something that draws, and wait until a later message is drawn."""
        before = int(self.data("seq"))
        act()
        self._wait("(el, before) => +el.dataset.seq > before", before)

    def data(self, name: str) -> str:
        return self.root.get_attribute(f"data-{name}") or ""

    def button(self, action: str) -> Locator:
        return self.root.locator(f"button[data-action='{action}']")

    def plot(self, name: str) -> Locator:
        return self.root.locator(f"[data-plot='{name}']")

    def frames(self) -> None:
        """Wait until what was asked for so far is painted: two animation frames."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def colours(self, name: str, *, part: tuple[float, float] = (0.0, 1.0)) -> dict[str, int]:
        """How many pixels of a plot have each colour, the background left out; thin lines count as what they are.

        Args:
            part: of the x axis.
        """
        self.frames()
        return self.plot(name).locator("canvas").first.evaluate(_COLOURS, [LINE_COLOURS, *part])

    def shade(self, name: str, share: float) -> list[int]:
        """Red, green, blue and opacity (0-255) of a plot's background at a place of the x axis, below every line."""
        return self.plot(name).locator("canvas").first.evaluate(_SHADE, share)

    def x_range(self) -> tuple[float, float]:
        self.frames()
        low, high = self.data("x").split()
        return float(low), float(high)

    def _wait(self, script: str, argument: Any) -> Any:
        element = self.root.element_handle()
        try:
            found = self.page.wait_for_function(
                f"([el, wanted]) => ({script})(el, wanted)", arg=[element, argument], timeout=PATIENCE_MS
            )
        except Exception as error:
            attributes = element.evaluate("el => JSON.stringify(el.dataset) + el.innerText.slice(0, 600)")
            raise AssertionError(f"waited for {argument!r}, the panel has {attributes}") from error
        return found.json_value()


_NEW_CELL = """code => {
  const notebook = jupyterapp.shell.currentWidget.content, cells = notebook.model.sharedModel;
  cells.insertCell(cells.cells.length, {cell_type: 'code', source: code, metadata: {}});
  return cells.cells.length - 1;
}"""
_HAS_COLOURS_OF = """name => { const light = name.endsWith('Light');
  const colour = getComputedStyle(document.body).getPropertyValue('--jp-layout-color1').trim();
  return document.body.dataset.jpThemeName === name && (light === ['#fff', '#ffffff', 'white'].includes(colour)); }"""
_CHOOSE = """number => { const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = number; notebook.deselectAll(); notebook.widgets[number].model.clearExecution(); }"""
_HAS_RUN = """number => { const {model} = jupyterapp.shell.currentWidget.content.widgets[number];
  return model.executionCount && model.executionState !== 'running'; }"""
_COLOURS = """(canvas, [lines, from, to]) => {
  const scale = canvas.width / canvas.clientWidth, width = canvas.clientWidth - 60;  // 52 of margin left, 8 right
  const start = from ? scale * (52 + from * width) : 0, end = to < 1 ? scale * (52 + to * width) : canvas.width;
  const data = canvas.getContext('2d').getImageData(start, 0, end - start, canvas.height).data, found = {};
  const near = (line, i) => [0, 1, 2].every(
    k => Math.abs(parseInt(line.slice(1 + 2 * k, 3 + 2 * k), 16) - data[i + k]) <= 48);
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {
    const name = lines.find(line => near(line, i))
      ?? '#' + [0, 1, 2].map(k => data[i + k].toString(16).padStart(2, '0')).join('').toUpperCase();
    found[name] = (found[name] ?? 0) + 1;
  }
  return found;
}"""


_SHADE = """(canvas, share) => {
  const scale = canvas.width / canvas.clientWidth, x = scale * (52 + share * (canvas.clientWidth - 60));
  return [...canvas.getContext('2d').getImageData(x, scale * (canvas.clientHeight - 24), 1, 1).data]; }"""
