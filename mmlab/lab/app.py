"""`mmlab app [NOTEBOOK]`: a notebook as a page of its own, without its code, served by voila on this machine only.

The page is bound to the loopback address and needs the token in its address, because whoever can open it runs code as
you. Each visitor gets a kernel of their own. Needs the extra `app` (voila), which nothing else in mmlab does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mmlab.errors import DataError, OptionError, RunError
from mmlab.machine import end_with_parent

DEFAULT_NOTEBOOK = "05_live_dashboard.ipynb"
START_S = 60.0  # within which the page must answer
STOP_S = 10.0  # within which the server must end its kernels and itself; then all are killed
_HOST = "127.0.0.1"


@contextmanager
def serve(notebook: str | Path | None = None, *, port: int = 0) -> Iterator[tuple[str, subprocess.Popen]]:
    """Serve a notebook; leaving the context ends the server and its kernels.

    Args:
        notebook: to serve (default: this project's live dashboard).
        port: 0 takes a free one.

    Returns:
        The page's address, with its token, and the server's process.

    Raises:
        DataError: the notebook does not exist.
        OptionError: voila is not installed, or the port is taken.
        RunError: the page did not answer.
    """
    path = find_notebook(notebook)
    if importlib.util.find_spec("voila") is None:
        raise OptionError("`mmlab app` needs voila, which is not installed: pip install 'mmlab[app]'")
    token = secrets.token_urlsafe(24)
    port = _free_port(port)
    url = f"http://{_HOST}:{port}/?token={token}"
    # the token goes into a file that only this user can read: everybody can read a command line
    chosen = {"token": token, "ip": _HOST, "port": port, "port_retries": 0, "open_browser": False}
    # show cells as they finish; until the last has, voila answers no ping, which would end it after 90 s
    chosen["tornado_settings"] = {"ws_ping_interval": 0}
    live = {"progressive_rendering": True}
    with TemporaryDirectory(prefix="mmlab-app-") as settings, Path(settings, "log.txt").open("w+") as log:
        Path(settings, "voila.json").write_text(json.dumps({"Voila": chosen, "VoilaConfiguration": live}))
        paths = [settings, *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
        server = subprocess.Popen(
            [sys.executable, "-m", "mmlab.lab.app", str(path)],
            cwd=path.parent,
            env={**os.environ, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,  # nothing is written; it breaks when this process ends
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's signals go to this process, which ends the server
        )
        try:
            deadline_s = time.monotonic() + START_S
            while not _answers(port):
                if server.poll() is not None:
                    log.seek(0)
                    said = log.read().strip().splitlines() or ["it printed nothing"]
                    raise RunError(f"voila ended before it served anything: {said[-1]}")
                if time.monotonic() > deadline_s:
                    raise RunError(f"voila did not answer at {url} within {START_S:.0f} s")
                time.sleep(0.1)
            yield url, server
        finally:
            _end(server)


def _end(server: subprocess.Popen) -> None:
    """End the server and its kernels."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)]  # kernels have process groups of their own
        process.terminate()  # it ends its kernels
        for process in psutil.wait_procs(family, timeout=STOP_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    server.communicate()  # waits, and closes the pipe


def find_notebook(notebook: str | Path | None) -> Path:
    """The notebook to serve: the one given, or the live dashboard in `notebooks`, here, or in the checkout.

    Raises:
        DataError: it does not exist.
    """
    if notebook is not None:
        if not Path(notebook).is_file():
            raise DataError(f"{notebook}: no such notebook")
        return Path(notebook).resolve()
    for folder in (Path("notebooks"), Path(), Path(__file__).parents[2] / "notebooks"):
        if (folder / DEFAULT_NOTEBOOK).is_file():
            return (folder / DEFAULT_NOTEBOOK).resolve()
    raise DataError(f"found no {DEFAULT_NOTEBOOK} here or in notebooks/; name a notebook: mmlab app NOTEBOOK")


def _free_port(asked: int) -> int:
    """The port given, or a free one for 0."""
    try:
        with socket.create_server((_HOST, asked)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise OptionError(f"port {asked}: {error.strerror}; leave it out to take a free one") from error


def _serve() -> None:
    """Run voila until the process that started this one has ended, however it ends."""
    threading.Thread(target=end_with_parent, args=(signal.SIGTERM,), daemon=True).start()
    runpy.run_module("voila", run_name="__main__", alter_sys=True)


def _answers(port: int) -> bool:
    """Whether a server answers; an HTTP error, such as for the missing token, is an answer."""
    try:
        urllib.request.urlopen(f"http://{_HOST}:{port}/voila/static/", timeout=2).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


if __name__ == "__main__":
    _serve()
