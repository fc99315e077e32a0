"""Colours and files of figures, shared by everything that draws. Needs no display."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mmlab.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct under every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
# a scheduler has the same colour in every picture; other runs take what is left, in the order given
_SCHEDULERS = ("random", "budget", "sorted", "bucket", "memory", "packed", "length_grouped", "aspect_bucket")


def colour_slots(names: Iterable[str]) -> dict[str, int]:
    """The place of each run's or scheduler's colour in the palette.

    >>> colour_slots(["bucket", "mine", "random", "larger/random"])
    {'bucket': 3, 'random': 0, 'mine': 1, 'larger/random': 2}
    """
    slots: dict[str, int] = {}
    others = []
    for name in names:
        scheduler = name.rsplit("/", 1)[-1]
        if scheduler in _SCHEDULERS and _SCHEDULERS.index(scheduler) not in slots.values():
            slots[name] = _SCHEDULERS.index(scheduler)
        else:
            others.append(name)
    left = [slot for slot in range(len(PALETTE)) if slot not in slots.values()] or [*range(len(PALETTE))]
    return slots | {name: left[index % len(left)] for index, name in enumerate(others)}


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The colour of each run or scheduler, by name.

    >>> colours_of(["random"])
    {'random': '#0072B2'}
    """
    return {name: PALETTE[slot] for name, slot in colour_slots(names).items()}


def to_png(figure: Figure, *, dpi: int = 110) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the file's suffix chooses the format.

    Raises:
        OptionError: a suffix that matplotlib cannot write.
    """
    check_plot_name(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def check_plot_name(path: str | Path) -> None:
    """Refuse a name early, where the figure takes long to make.

    Raises:
        OptionError: a suffix that matplotlib cannot write.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise OptionError(
            f"cannot write a plot to {path}: the name must end in one of {', '.join(sorted(known))}"
        )
