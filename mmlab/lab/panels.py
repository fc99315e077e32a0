"""The base of the widget panels: shows errors, and keeps keys pressed in a panel from the notebook.

Does not: draw. The live panel has a page of its own and needs none of this.
"""

from __future__ import annotations

import base64
import html
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anywidget
import ipywidgets as widgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from mmlab.lab.live_panel import STATIC, LivePanel
from mmlab.lab.saved import SavedView

WIDE = {"description_width": "9rem"}  # equally wide labels in a column
LONG = {"width": "26rem", "margin": "2px"}  # the margin of other sliders, which a SelectionSlider lacks
SLIDES: dict[str, Any] = {"continuous_update": False, "style": WIDE, "layout": LONG}


class Panel(widgets.VBox):
    """A column of widgets with a place for messages, whose keys do not reach the notebook.

    Args:
        above: children above the message.
        below: children below it.
    """

    def __init__(self, above: Sequence[widgets.Widget], below: Sequence[widgets.Widget] = ()) -> None:
        self._saved = SavedView()
        self.message = widgets.HTML()
        self.message.add_class("mmlab-message")
        super().__init__([*above, self.message, *below, _KeptKeys(layout={"display": "none"})])
        self.add_class("mmlab-panel")

    def _repr_mimebundle_(self, **arguments: Any) -> Any:
        live = [child for child in self.children if isinstance(child, LivePanel)]
        for child in live:
            child.begin()
        if not live:
            self._saved.take_place()
            self._save()
        bundle = super()._repr_mimebundle_(**arguments)
        return bundle and {**bundle, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.text}"

    @property
    def text(self) -> str:
        """What the panel shows, for places without widgets."""
        return "\n".join(repr(child) for child in self.children if isinstance(child, LivePanel))

    def _save(self) -> None:
        """Save what the widgets show, for readers who open the notebook without its kernel."""
        self._saved.show("".join(_parts(self)), repr(self))

    def display(self) -> None:
        """Show the panel in the current cell, if this is a notebook."""
        if hasattr(get_ipython(), "kernel"):
            display(self)

    def showing(self, act: Callable[[], object]) -> Callable[[Any], None]:
        """A callback that calls `act` and shows any error it raises, which Jupyter would hide."""

        def acting(_argument: Any) -> None:
            try:
                self.message.value = ""
                act()
                self._save()
            except Exception as error:
                details = html.escape(traceback.format_exc())
                self.message.value = (
                    f"<b>{html.escape(type(error).__name__)}: {html.escape(str(error))}</b>"
                    f"<details><summary>traceback</summary><pre>{details}</pre></details>"
                )

        return acting


def slider(name: str, value: int, low: int, high: int) -> widgets.IntSlider:
    """A slider that reports its value when it is released."""
    return widgets.IntSlider(value, low, high, description=name, **SLIDES)


def picture() -> widgets.Image:
    """A place for a PNG file, as large as its pixels and no wider than the page; nothing without one."""
    layout = {"max_width": "100%", "margin": "0", "align_self": "flex-start", "display": "none"}
    return widgets.Image(format="png", layout=layout)


def show_picture(place: widgets.Image, png: bytes) -> None:
    """Show a PNG file, or nothing where it is empty: a browser draws a broken image for it."""
    place.value, place.layout.display = png, None if png else "none"


def _parts(widget: widgets.Widget) -> Iterator[str]:
    """The tables, texts and pictures in a widget, as HTML."""
    for child in getattr(widget, "children", ()):
        if isinstance(child, widgets.Image) and child.value:
            yield f'<img alt="" src="data:image/png;base64,{base64.b64encode(child.value).decode()}">'
        else:
            yield child.value if isinstance(child, widgets.HTML) else "".join(_parts(child))


class _KeptKeys(anywidget.AnyWidget):
    """Shows nothing; keeps the keys that are pressed in the panel around it from the notebook."""

    _css = STATIC / "panel.css"
    _esm = STATIC / "kept_keys.js"
