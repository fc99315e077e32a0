"""The panel in an app without a notebook around it: a finished run is drawn, a real one is configured and steered."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from mmlab.lab.app import voila_command
from mmlab.runs.events import EVENT_FILES, RunEvent, read_events
from tests.browser.jupyter import BLUE, ORANGE, PATIENCE_MS, Panel, Server
from tests.browser.writing_runs import write_run

CODE = """
from mmlab.lab.lab import Lab
from mmlab.lab.live_panel import LivePanel
options = dict(epochs=300, image="aspect:48", batch_size=4, equal="batch_size", num_workers=0)
lab = Lab({data!r}, schedulers=("random", "budget"), out="lab", **options)
display(LivePanel("budget"), lab.panel())
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, scenes: Path) -> Iterator[Server]:
    """Voila, serving one notebook: a panel of a finished run, and a lab that nobody has started."""
    import nbformat

    folder = tmp_path_factory.mktemp("voila")
    (folder / "files").mkdir()
    write_run(folder / "files" / "budget", 40)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE.format(data=str(scenes)))])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "files" / "app.ipynb")
    command = ["-m", "voila", "app.ipynb", "--no-browser", "--port={port}", "--Voila.ip=127.0.0.1"]
    server = Server(folder, command, status="voila/static/voila.js")
    yield server
    server.close()


@pytest.fixture(scope="module")
def opened(app: Server, browser: Browser) -> Iterator[Page]:
    """The app's page, with a kernel that both tests share."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(app.url(""))
    expect(page.locator(".mmlp")).to_have_count(2)
    yield page
    page.close()
    assert not errors, f"the page's scripts raised {errors}"


def test_the_panel_draws_in_an_app(opened: Page) -> None:
    panel = shown(opened.locator(".mmlp").first)
    panel.wait_points(40)
    assert panel.wait_state("done") == "done"
    assert panel.colours("loss").get(ORANGE, 0) > 20


def test_a_run_is_configured_and_steered_in_an_app(app: Server, opened: Page) -> None:
    panel = shown(opened.locator(".mmlp").last)
    panel.wait_state("idle")
    opened.get_by_text("as code").click()  # what the kernel has taken, without a cell to ask it in
    code = opened.locator(".jupyter-widgets pre").filter(has_text="from mmlab import Lab")
    expect(code).to_contain_text("batch_size=4")
    enter(opened, "budget", "many")
    expect(opened.locator(".mmlab-message")).to_contain_text("budget must be a number of padded tokens")
    enter(opened, "budget", "")
    enter(opened, "batch size", "6")
    opened.get_by_label("precision", exact=True).select_option("bf16")
    expect(code).to_contain_text("precision='bf16'")
    expect(code).to_contain_text("batch_size=6")
    opened.get_by_label("precision", exact=True).select_option("fp32")  # many a CPU is slow in bf16
    expect(code).not_to_contain_text("precision=")
    expect(opened.locator(".mmlab-message")).to_have_text("")

    panel.button("start").click()
    panel.wait_state("running")
    expect(panel.root.locator(".mmlp-legend [data-line]")).to_have_count(2)
    panel.wait_points(30)  # epochs of the schedulers alternate: by now each has had one
    panel.button("pause").click()
    panel.wait_state("paused")
    runs = steps_of(app.files / "lab" / "runs")
    held = panel.wait_points(sum(map(len, runs)))
    panel.wait_change(lambda: None)
    assert int(panel.data("points")) == held, "steps went on in the pause"

    first = panel.root.locator(".mmlp-legend [data-line]").first
    drawn = panel.colours("loss").get(BLUE, 0)
    assert drawn > 20
    first.click()
    expect(first).to_have_attribute("aria-pressed", "false")
    assert BLUE not in panel.colours("loss")
    first.click()
    assert panel.colours("loss").get(BLUE, 0) == drawn
    for axis, last in {
        "step": max(event.step for steps in runs for event in steps),
        "sample": max(sum(event.values["num_samples"] for event in steps) for steps in runs),
    }.items():
        panel.root.get_by_label("x axis").select_option(axis)
        assert panel.x_range()[1] == pytest.approx(last, rel=1e-3), axis

    panel.button("resume").click()
    panel.wait_state("running")
    panel.wait_points(held + 4)
    panel.button("stop").click()
    panel.wait_state("stopped")
    sizes = {event.values["num_samples"] for steps in steps_of(app.files / "lab" / "runs") for event in steps}
    assert 6 in sizes, f"the batch size that was written is not the run's: {sizes}"


def test_the_command_shows_each_cell_when_it_has_run_and_a_live_panel_meanwhile(
    tmp_path: Path, browser: Browser
) -> None:
    import nbformat

    write_run(tmp_path / "runs" / "budget", 40)
    cells = [
        "from mmlab.lab.live_panel import LivePanel\nLivePanel('runs')",
        "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.05)\nprint(6 * 7, 'is shown')",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, tmp_path / "page.ipynb")
    command, environment = voila_command(tmp_path / "page.ipynb")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        url = next(line for line in serving.stderr if "?token=" in line).strip()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        panel = shown(page.locator(".mmlp"))
        assert panel.wait_points(40) == 40
        write_run(tmp_path / "runs" / "random", 20)
        panel.wait_points(60)  # while the second cell runs
        (tmp_path / "seen").touch()
        expect(page.get_by_text("42 is shown")).to_be_visible()
        expect(page.get_by_text("6 * 7")).to_have_count(0)
        page.close()
        serving.terminate()


def shown(root: Locator) -> Panel:
    """A panel that is in sight: one out of it is not drawn at its full size."""
    root.scroll_into_view_if_needed()
    return Panel(root)


def enter(page: Page, label: str, text: str) -> None:
    """Write into a field and leave it."""
    field = page.get_by_label(label, exact=True)
    field.fill(text)
    field.press("Tab")


def steps_of(folder: Path) -> list[list[RunEvent]]:
    """The steps of each run below a folder."""
    found = [read_events(path)[0] for path in sorted(folder.rglob(EVENT_FILES))]
    return [[event for event in events if event.kind == "step"] for events in found]
