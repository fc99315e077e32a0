"""Real training, started, paused, stopped and failing from the panel; errors, restarts and dead kernels are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from mmlab.comparison.background import find_run
from mmlab.runs.events import EVENT_FILES, read_events
from tests.browser.jupyter import Notebook, Panel


@pytest.fixture(scope="module")
def data(notebook: Notebook, scenes: Path) -> Path:
    """Pairs to train on; the notebook's kernel has imported what it needs."""
    notebook.run("from mmlab.lab.lab import Lab\nfrom mmlab.lab.live_panel import LivePanel")
    return scenes


def make(notebook: Notebook, data: Path, name: str, **options: object) -> Panel:
    """The panel of a new lab; long enough that it does not end by itself."""
    words = {"schedulers": ("random", "budget"), "epochs": 300, "image": "aspect:48", "batch_size": 4}
    words |= {"equal": "batch_size", "num_workers": 0, "out": name, **options}
    arguments = ", ".join(f"{key}={value!r}" for key, value in words.items())
    notebook.run(f"{name} = Lab({str(data)!r}, {arguments})")
    return notebook.panel(notebook.run(f"LivePanel({name}.folder, {name})"))


def kinds_of(folder: Path) -> list[str]:
    """Kinds of the events of all runs below a folder, in order of file and time."""
    return [event.kind for path in sorted(folder.rglob(EVENT_FILES)) for event in read_events(path)[0]]


def test_the_keyboard_alone_starts_pauses_resumes_and_stops(notebook: Notebook, data: Path) -> None:
    panel = make(notebook, data, "typed")
    number = notebook.num_cells - 1
    panel.wait_state("idle")
    expect(panel.button("stop")).to_have_attribute("aria-disabled", "true")
    panel.root.focus()
    press = panel.page.keyboard.press
    press("Tab")
    expect(panel.button("start")).to_be_focused()
    press("Enter")
    panel.wait_state("running")
    expect(panel.button("pause")).to_be_focused()
    panel.wait_points(6)
    expect(panel.root.locator(".mmlp-legend [data-line]")).to_have_count(2)
    expect(panel.root.locator("[role=progressbar]")).to_be_visible()
    press("p")
    panel.wait_state("paused")
    expect(panel.root.locator("[role=status]")).to_have_text("state: paused")
    folder = notebook.server.files / "typed"
    held = panel.wait_points(
        kinds_of(folder).count("step")
    )  # the last ones may come after the word of the pause
    panel.wait_change(lambda: None)
    assert int(panel.data("points")) == held, "steps went on in the pause"

    notebook.run("typed.start()")  # a cell that starts it is run again: the run goes on as it was
    panel = notebook.panel(notebook.run_again(number))
    panel.wait_state("paused")
    panel.wait_points(held)
    panel.root.focus()
    press("p")
    panel.wait_state("running")
    panel.wait_points(held + 4)
    press("Tab")
    press("Tab")
    expect(panel.button("stop")).to_be_focused()
    press("Space")
    panel.wait_state("stopped")
    expect(panel.button("start")).to_have_attribute("aria-disabled", "false")
    assert kinds_of(folder / "runs").count("start") == 2, "two schedulers, each started once"
    assert not list(folder.glob("previous-*")), "a second run was started"


def test_an_error_in_training_is_shown_with_its_traceback(notebook: Notebook, data: Path) -> None:
    panel = make(notebook, data, "failing", device="cuda:63")  # no machine has so many
    panel.wait_state("idle")
    panel.button("start").click()
    panel.wait_state("failed")
    error = panel.root.locator(".mmlp-error[data-where=training]")
    expect(error).to_contain_text("Training failed")
    error.locator(".mmlp-copy").click()
    expect(error.locator(".mmlp-copy")).to_have_text("Copied")
    assert len(panel.page.evaluate("() => navigator.clipboard.readText()").strip()) > 20
    expect(panel.button("start")).to_have_attribute("aria-disabled", "false")


def test_options_are_changed_and_checked_above_the_panel(notebook: Notebook, data: Path) -> None:
    cell = notebook.run(f"chosen = Lab({str(data)!r}, out='chosen')\nchosen.panel()")
    panel = notebook.panel(cell)
    panel.wait_state("idle")

    def said(text: str) -> None:
        expect(cell.locator(".mmlab-message")).to_contain_text(text)

    def enter(label: str, text: str) -> None:
        field = cell.get_by_label(label, exact=True)
        field.fill(text)
        field.press("Tab")

    cell.get_by_text(
        "as code"
    ).click()  # shows when the kernel has taken a change, on whichever of its threads
    code = cell.locator("pre").filter(has_text="from mmlab import Lab")
    enter("budget", "many")
    said("budget must be a number of padded tokens")
    expect(code).not_to_contain_text("budget=")
    enter("epochs", "0")
    said("epochs must be at least 1, found 0")
    said("budget must be a number of padded tokens")
    enter("budget", "4000")
    enter("epochs", "7")
    expect(cell.locator(".mmlab-message")).to_have_text("")
    expect(code).to_contain_text("budget=4000.0")
    cell.locator("select[multiple]").select_option(["budget"])
    cell.get_by_label("precision", exact=True).select_option("bf16")
    expect(code).to_contain_text("schedulers=('budget',)")
    expect(code).to_contain_text("precision='bf16'")
    names = ("budget", "epochs", "schedulers", "precision")
    shown = notebook.run(f"print([chosen.options[name] for name in {names}])").locator(
        ".jp-OutputArea-output"
    )
    expect(shown).to_have_text("[4000.0, 7, ('budget',), 'bf16']")
    before = notebook.num_cells
    for field in (cell.get_by_label("precision", exact=True), cell.locator("select[multiple]")):
        field.focus()
        for key in ("b", "d", "d"):
            notebook.page.keyboard.press(key)
    panel.frames()
    assert notebook.num_cells == before, "the notebook took the keys of a list"


def test_an_error_in_a_callback_is_shown_in_the_panel(notebook: Notebook, data: Path) -> None:
    notebook.run(f"refused = Lab({str(data)!r}, out='refused', epochs=1)\nrefused.data = lambda: None")
    panel = notebook.panel(notebook.run("LivePanel(refused.folder, refused)"))
    panel.wait_state("idle")
    panel.button("start").click()
    error = panel.root.locator(".mmlp-error[data-where=callback]")
    expect(error).to_contain_text("cannot send this to another process")
    expect(error.locator("pre")).to_contain_text("Traceback")
    cell = notebook.run("refused.panel()")
    panel, epochs = notebook.panel(cell), cell.get_by_label("epochs")
    epochs.fill("0")
    epochs.press("Enter")
    expect(cell).to_contain_text("epochs must be at least 1")
    panel.button("start").click()
    expect(panel.root).to_contain_text("correct it in the panel")
    epochs.fill("1")
    epochs.press("Enter")
    expect(panel.root).not_to_contain_text("correct it in the panel")


@pytest.fixture
def outlived(notebook: Notebook) -> Iterator[Path]:
    """The folder of a run that outlives its kernel, but not the test."""
    folder = notebook.server.files / "outlived"
    yield folder
    if (run := find_run(folder)) is not None:
        run.stop()


def test_a_run_outlives_its_page_and_its_kernel_and_the_panel_of_the_dead_kernel_says_so(
    notebook: Notebook, data: Path, outlived: Path
) -> None:
    panel = make(notebook, data, outlived.name, detached=True)
    number = notebook.num_cells - 1
    panel.wait_state("idle")
    panel.button("start").dblclick()  # the second click must not start a second run
    panel.wait_state("running")
    panel.button("pause").dispatch_event("click", {"detail": 2})  # nor may it pause the first
    panel.wait_points(4)
    panel.button("pause").click()
    panel.wait_state("paused")
    held = int(panel.data("points"))
    notebook.reload()
    panel = notebook.panel(notebook.cell(number))
    panel.wait_points(held)
    panel.wait_state("paused")
    panel.button("resume").click()
    panel.wait_state("running")
    notebook.page.evaluate(
        "() => { jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"
    )
    panel.wait_state("lost")
    expect(panel.root.locator(".mmlp-lost")).to_contain_text("No word from the kernel since")
    expect(panel.root.locator(".mmlp-lost")).to_contain_text("last data")
    expect(panel.button("stop")).to_have_attribute("aria-disabled", "true")
    notebook.ready()
    code = "from mmlab.lab.lab import Lab\nfrom mmlab.lab.live_panel import LivePanel\n"
    code += "found = Lab.open('outlived')\nLivePanel(found.folder, found)"
    panel = notebook.panel(notebook.run(code))
    panel.wait_state("running")
    before = panel.wait_points(4)
    panel.wait_points(before + 4)
    panel.button("stop").click()
    panel.wait_state("stopped")
    assert not list(outlived.glob("previous-*")), "a second run was started"
