"""One server and one browser for all tests; a page and a kernel for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.browser.jupyter import PATIENCE_MS, Notebook, Server, launch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    launched = launch(playwright)
    yield launched
    launched.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(
        tmp_path_factory.mktemp("jupyter"), ["-m", "jupyterlab"], status="api/status", MMLAB_SMOKE="1"
    )
    yield started
    started.close()


@pytest.fixture(scope="session")
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield context.new_page()
    context.close()


@pytest.fixture(scope="session")
def shared(server: Server, page: Page) -> Iterator[Notebook]:
    opened = Notebook(server, page, "shared.ipynb").create()
    yield opened
    assert not opened.errors, f"the page's scripts raised {opened.errors}"


@pytest.fixture(scope="module")
def notebook(shared: Notebook) -> Iterator[Notebook]:
    """A notebook whose kernel all files of tests share; the panels of one file are closed before the next."""
    yield shared
    shared.run("from ipywidgets import Widget\nWidget.close_all()")
