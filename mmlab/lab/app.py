"""`mmlab app [NOTEBOOK]`: a notebook as a page of its own, without its code, served by voila on this machine only.

The page is bound to the loopback address and needs the token in its address, because whoever can open it runs
code as you (`static/voila.json`). Each visitor gets a kernel of their own, which ends with the server. Needs the
extra `app` (voila), which nothing else in mmlab does.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

from mmlab.errors import DataError, OptionError

DEFAULT_NOTEBOOK = "05_live_dashboard.ipynb"


def voila_command(notebook: Path, *, port: int = 0) -> tuple[list[str], dict[str, str]]:
    """The command that serves a notebook, and the environment for it.

    Args:
        notebook: to serve.
        port: 0 takes a free one.

    Raises:
        OptionError: voila is not installed, or the port is taken.
    """
    if importlib.util.find_spec("voila") is None:
        raise OptionError("`mmlab app` needs voila, which is not installed: pip install 'mmlab[app]'")
    try:
        with socket.create_server(("127.0.0.1", port)) as server:
            port = server.getsockname()[1]
    except OSError as error:
        raise OptionError(f"port {port}: {error.strerror}; leave it out to take a free one") from error
    settings = [str(Path(__file__).parent / "static"), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    own = {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, settings))}
    # with these, voila would not print the token
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_TOKEN")}
    return [sys.executable, "-m", "voila", str(notebook), f"--port={port}"], kept | own


def find_notebook(notebook: str | Path | None) -> Path:
    """The notebook to serve: the one given, or the live dashboard in `notebooks`, here, or in the checkout.

    Raises:
        DataError: it does not exist.
    """
    if notebook is not None:
        if not Path(notebook).is_file() or Path(notebook).suffix != ".ipynb":
            raise DataError(f"{notebook}: no such notebook; give an .ipynb file")
        return Path(notebook).resolve()
    for folder in (Path("notebooks"), Path(), Path(__file__).parents[2] / "notebooks"):
        if (folder / DEFAULT_NOTEBOOK).is_file():
            return (folder / DEFAULT_NOTEBOOK).resolve()
    raise DataError(f"found no {DEFAULT_NOTEBOOK} here or in notebooks/; name a notebook: mmlab app NOTEBOOK")
