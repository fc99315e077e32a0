"""A notebook is served on this machine only, behind a token, and what is missing is named."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mmlab.cli.main import main
from mmlab.lab.app import DEFAULT_NOTEBOOK, find_notebook
from tests.processes import IGNORING_INTERRUPTS, command_line

needs_voila = pytest.mark.skipif(importlib.util.find_spec("voila") is None, reason="needs voila")


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    import nbformat

    path = tmp_path / "page.ipynb"
    cells = [nbformat.v4.new_markdown_cell("# A page"), nbformat.v4.new_code_cell("print(6 * 7, 'is shown')")]
    made = nbformat.v4.new_notebook(cells=cells)
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


@needs_voila
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_page_is_served_behind_its_token_and_ends_with_the_command(
    notebook: Path, number: signal.Signals, code: int
) -> None:
    command = [*IGNORING_INTERRUPTS, sys.executable, "-m", "mmlab", "app", str(notebook)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving, ExitStack() as at_the_end:
        at_the_end.callback(
            serving.kill
        )  # also where an assertion fails: `with` waits for its end without a limit
        assert serving.stderr is not None
        found = (re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line) for line in serving.stderr)
        address = next(filter(None, found))
        with urllib.request.urlopen(address[0], timeout=60) as answer:
            page = answer.read().decode()
        assert '"kernelId":' in page
        assert "6 * 7" not in page, "the page shows no code"
        with urllib.request.urlopen(address[0].split("?")[0], timeout=60) as answer:
            assert '"kernelId":' not in answer.read().decode(), "without the token there is a form for it"
        family = [psutil.Process(serving.pid), *psutil.Process(serving.pid).children(recursive=True)]
        assert not any(address[2] in command_line(process) for process in family)
        assert {place.laddr.ip for place in family[0].net_connections() if place.status == "LISTEN"} == {
            "127.0.0.1"
        }
        assert len(family) > 1, "a kernel runs"
        serving.send_signal(number)
        assert serving.wait(timeout=30) == code
    _, alive = psutil.wait_procs(family[1:], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@needs_voila
def test_a_port_that_is_taken_is_told(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["app", str(notebook), "--port", str(port)]) == 2
    assert f"port {port}: Address already in use" in capsys.readouterr().err


def test_a_notebook_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", str(tmp_path / "none.ipynb")]) == 2
    assert "none.ipynb: no such notebook" in capsys.readouterr().err
    (tmp_path / "table.csv").touch()
    assert main(["app", str(tmp_path / "table.csv")]) == 2
    assert "table.csv: no such notebook; give an .ipynb file" in capsys.readouterr().err


def test_without_voila_the_extra_is_named(notebook: Path) -> None:
    code = "import sys; sys.modules['voila'] = None; from mmlab.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", code, "app", str(notebook)], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert found.returncode == 2
    assert "pip install 'mmlab[app]'" in found.stderr


def test_the_default_is_the_live_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_notebook(None).name == DEFAULT_NOTEBOOK
    (tmp_path / DEFAULT_NOTEBOOK).write_text("{}")
    assert find_notebook(None).parent == tmp_path
