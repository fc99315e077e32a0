"""What a notebook shows in place of widgets: an output below each, hidden while the widget is shown.

So a notebook opened without its kernel, or in a front end without widgets, still shows a table and a picture.
"""

from __future__ import annotations

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle

# JupyterLab and Notebook write "Error displaying widget" where a widget was
_NO_ERROR = (
    "<style>.jp-OutputArea:has(.mmlab-saved) .jp-OutputArea-output.jupyter-widgets:not(:has(*)) "
    "{ display: none; }</style>"
)


class SavedView:
    """An output in the cell that shows a widget; does nothing outside a notebook's kernel."""

    def __init__(self) -> None:
        self._place: DisplayHandle | None = None
        self._bundle: dict[str, str] = {}

    def take_place(self) -> None:
        """Add the output after the widget in the current cell, unless there is one already."""
        shell = get_ipython()
        if self._place is None and shell is not None and hasattr(shell, "kernel"):
            self._place = DisplayHandle()
            shell.events.register("post_run_cell", self._display)

    def show(self, page: str, text: str = "") -> None:
        """Show HTML there, and text where HTML cannot be shown."""
        self._bundle = {"text/html": f'{_NO_ERROR}<div class="mmlab-saved">{page}</div>', "text/plain": text}
        if self._place is not None:
            self._place.update(self._bundle, raw=True)

    def _display(self, _result: object) -> None:
        get_ipython().events.unregister("post_run_cell", self._display)
        assert self._place is not None
        self._place.display(self._bundle, raw=True)
