"""The panel of a `Lab`: its configuration as widgets, above the live view of its runs.

Changing a widget changes the lab's next run at once. If a value cannot work, the panel says so and the lab
keeps the previous one. Start, pause and stop are in the live view, or methods of the lab.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mmlab.comparison.background import PROCESS
from mmlab.comparison.options import PRECISIONS
from mmlab.errors import OptionError
from mmlab.lab.live_panel import LivePanel
from mmlab.lab.panels import Panel
from mmlab.runs.folders import is_aside
from mmlab.schedule.schedulers import SCHEDULERS


class LabPanel(Panel):
    """Widgets for a lab's options, and its live view.

    Args:
        lab: a `mmlab.Lab`.
    """

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        options: Mapping[str, Any] = lab.options
        chosen = tuple(options["schedulers"])
        by_name = not isinstance(options["schedulers"], Mapping) and SCHEDULERS.keys() >= {*chosen}
        names = list(SCHEDULERS) if by_name else list(chosen)
        size: dict[str, Any] = {"options": names, "rows": len(names), "disabled": not by_name}
        self.schedulers = _field(widgets.SelectMultiple, "schedulers", chosen, **size)
        budget = "" if options["budget"] is None else f"{options['budget']:g}"
        typed: dict[str, Any] = {"placeholder": "from the batch size", "continuous_update": False}
        self.budget = _field(widgets.Text, "budget", budget, **typed)
        # an IntText would silently turn 1.5 into 1
        self.batch_size = _field(widgets.FloatText, "batch size", options["batch_size"])
        self.epochs = _field(widgets.FloatText, "epochs", options["epochs"])
        self.precision = _field(widgets.Dropdown, "precision", options["precision"], options=PRECISIONS)
        self.code = widgets.HTML()
        self.wrong: list[str] = []  # errors in the fields' values
        self.earlier = widgets.VBox()
        self._followed = [lab.folder]  # read again at every scan for new files
        self.live = LivePanel(self._followed, controller=lab)
        # configured schedulers carry their own sizes
        sizes = [self.batch_size, self.budget] if by_name else []
        numbers = widgets.VBox([*sizes, self.epochs, self.precision])
        more = widgets.Accordion([self.code], titles=("as code",))
        beside = widgets.HBox([self.schedulers, numbers], layout={"flex_flow": "row wrap"})
        super().__init__([beside], [self.earlier, self.live, more])
        free = (*(["schedulers"] if by_name else []), "budget", "batch_size", "epochs", "precision")
        self._fields = {name: getattr(self, name) for name in free}
        for field in self._fields.values():
            field.observe(self.showing(self._take), "value")
        self._show_code()
        self.list_earlier()

    def list_earlier(self) -> None:
        """Show a checkbox, with the options that differ, for every run moved aside; check the last one."""
        boxes = []
        found = [path for path in self.lab.folder.glob(f"*/{PROCESS}") if is_aside(path.parent.name)]
        aside = sorted(found, key=os.path.getmtime)
        for path in aside:
            name = path.parent.name
            try:
                told = self.lab.differences(json.loads(path.read_text())["job"])
            except (ValueError, TypeError, LookupError):
                told = f"{path.name} is damaged, so how it differed is not known"
            said = ": ".join(filter(None, (name, told)))
            look: Any = {"indent": False, "layout": {"width": "auto"}}  # else a long description is cut off
            boxes.append(widgets.Checkbox(path == aside[-1], description=said, tooltip=name, **look))
            boxes[-1].observe(self.showing(self._follow), "value")
        self.earlier.children = [widgets.Label("compare with"), *boxes] if boxes else []
        self._follow()

    def _follow(self) -> None:
        self._followed[1:] = [self.lab.folder / box.tooltip for box in self.earlier.children[1:] if box.value]

    def close(self) -> None:
        """Stop following the runs; the lab's run continues."""
        self.live.close()
        super().close()

    def _take(self) -> None:
        """Pass every value to the lab and show errors: a message stays until its cause is gone."""
        self.wrong = []
        for name, field in self._fields.items():
            try:
                self.lab.configure(**{name: _read(name, field.value)})
            except OptionError as error:
                self.wrong.append(str(error))
        if not self.wrong:
            self.live.forgive()
        self.message.value = "<br>".join(f"<b>{html.escape(text)}</b>" for text in self.wrong)
        self._show_code()

    def _show_code(self) -> None:
        self.code.value = f"<pre>{html.escape(self.lab.code())}</pre>"


def _field(kind: Any, name: str, value: Any, **options: Any) -> Any:
    """A widget of this kind, with its name in a column as wide as that of the others."""
    return kind(value=value, description=name, style={"description_width": "7rem"}, **options)


def _read(name: str, value: Any) -> Any:
    """The option value of a field: a whole float becomes an int, an empty budget None.

    Raises:
        OptionError: the budget is not a number.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if name != "budget":
        return value
    try:
        return float(value) if value.strip() else None
    except ValueError:
        raise OptionError(f"budget must be a number of padded tokens, or empty; found {value!r}") from None
