"""The panel of a `Lab`: its configuration as widgets, above the live view of its runs.

A change of a widget changes the lab's next run at once. The panel says which value cannot work, and the lab keeps the
value before it. Starting, pausing and stopping are done in the live view, or by the lab's own methods.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from mmlab.errors import OptionError
from mmlab.lab.live_panel import LivePanel
from mmlab.lab.panels import Panel
from mmlab.schedule.schedulers import SCHEDULERS

_WIDE = {"description_width": "7rem"}


class LabPanel(Panel):
    """Widgets for a lab's options, and its live view.

    Args:
        lab: a `mmlab.Lab`.
        precisions: names to choose from.
    """

    def __init__(self, lab: Any, precisions: Sequence[str]) -> None:
        self.lab = lab
        options: Mapping[str, Any] = lab.options
        chosen = tuple(options["schedulers"])
        by_name = not isinstance(options["schedulers"], Mapping) and all(
            name in SCHEDULERS for name in chosen
        )
        names = list(SCHEDULERS) if by_name else list(chosen)
        self.schedulers = widgets.SelectMultiple(
            options=names,
            value=chosen,
            rows=min(7, len(names)),
            disabled=not by_name,
            description="schedulers",
            style=_WIDE,
        )
        budget = options["budget"]
        self.budget = widgets.Text(
            value="" if budget is None else f"{budget:g}",
            placeholder="batch size x mean sample",
            description="budget",
            continuous_update=False,
            style=_WIDE,
        )
        self.batch_size = widgets.IntText(options["batch_size"], description="batch size", style=_WIDE)
        self.epochs = widgets.IntText(options["epochs"], description="epochs", style=_WIDE)
        self.precision = widgets.Dropdown(
            options=list(precisions), value=options["precision"], description="precision", style=_WIDE
        )
        self.code = widgets.HTML()
        self.live = LivePanel(controller=lab)
        # configured schedulers have their sizes in them
        sizes = [self.batch_size, self.budget] if by_name else []
        numbers = widgets.VBox([*sizes, self.epochs, self.precision])
        more = widgets.Accordion([self.code], titles=("as code",))
        super().__init__([widgets.HBox([self.schedulers, numbers])], [self.live, more])
        for control in self._controls().values():
            control.observe(self.showing(self._take), "value")
        self._show_code()

    def close(self) -> None:
        """Let go of the runs; the lab goes on."""
        self.live.close()
        super().close()

    def _controls(self) -> dict[str, Any]:
        names = ("budget", "batch_size", "epochs", "precision")
        chosen = {} if self.schedulers.disabled else {"schedulers": self.schedulers}
        return {**chosen, **{name: getattr(self, name) for name in names}}

    def _take(self) -> None:
        """Hand every value to the lab and show what is wrong: a message stays until its cause is gone."""
        wrong = []
        for name, control in self._controls().items():
            try:
                self.lab.configure(**{name: _budget(control.value) if name == "budget" else control.value})
            except OptionError as error:
                wrong.append(str(error))
        self.message.value = "<br>".join(f"<b>{html.escape(text)}</b>" for text in wrong)
        self._show_code()

    def _show_code(self) -> None:
        self.code.value = f"<pre>{html.escape(self.lab.code())}</pre>"


def _budget(text: str) -> float | None:
    """A number, or None where nothing is written.

    Raises:
        OptionError: neither.
    """
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"budget must be a number of padded tokens, or empty; found {text!r}") from None
