"""The loading panel in JupyterLab: settings are measured by its button, and stay as rows to compare."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.browser.jupyter import Notebook
from tests.browser.test_open_notebooks import SCREENSHOTS


def test_settings_are_measured_by_the_button_and_stay_as_rows(notebook: Notebook, scenes: Path) -> None:
    cell = notebook.run(
        "from mmlab import LoadingPanel, MultimodalDataset, parse_image_policy, read_records\n"
        f"few = MultimodalDataset(read_records({str(scenes)!r}), image_policy=parse_image_policy('square:64'))\n"
        "LoadingPanel(few, 'loading_cache', batch_size=8)"
    )
    root = cell.locator(".mmlab-panel").first
    measure, rows = root.get_by_role("button", name="Measure"), root.locator("tbody tr")
    measure.click()
    expect(rows).to_have_count(1)
    expect(measure).to_be_enabled()
    expect(root.locator("img")).to_be_visible()  # it makes the panel longer: not while the mouse is pressed
    root.get_by_label("cache", exact=True).check()
    measure.click()
    expect(root.locator(".mmlab-message b").or_(rows.nth(1))).to_be_visible()  # an error is shown at once
    assert rows.count() == 2, root.inner_text()
    expect(rows.last).to_contain_text("no workers, cached")
    root.screenshot(path=SCREENSHOTS / "loading_panel-light.png")
    notebook.theme("JupyterLab Dark")
    root.screenshot(path=SCREENSHOTS / "loading_panel-dark.png")
    notebook.theme("JupyterLab Light")
    notebook.page.set_viewport_size({"width": 600, "height": 900})
    narrow = "table => table.parentElement.clientWidth <= table.closest('.mmlab-panel').clientWidth"
    assert root.locator("table").evaluate(narrow), (
        "the table widens the panel, instead of scrolling by itself"
    )
    notebook.page.set_viewport_size({"width": 1280, "height": 900})
