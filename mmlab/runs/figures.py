"""Colours and files of figures, shared by everything that draws. Needs no display."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mmlab.errors import OptionError
from mmlab.machine import replace_file
from mmlab.runs.folders import is_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of each scheduler, on a light page and on a dark one: Okabe and Ito's, distinct under every common colour blindness.
_COLOURS = {
    "random": ("#0072B2", "#4C9BE8"),
    "budget": ("#D98C00", "#E69F00"),
    "fastest": ("#009E73", "#22C79A"),
    "bucket": ("#C05C99", "#E08FC0"),
    "memory": ("#3FA5DC", "#8CCBF2"),
    "sorted": ("#D55E00", "#FF7F3F"),
    "length_grouped": ("#8F8500", "#F0E442"),
    "aspect_bucket": ("#6E6E6E", "#E8E8E8"),
    "packed": ("#6B4FA0", "#B39DDB"),
}
_OTHERS = (
    ("#8C564B", "#C49C94"),
    ("#17808C", "#5CC5CF"),
    ("#A61C3C", "#F27A93"),
    ("#7F7F7F", "#A8A8A8"),
    ("#4B7F1E", "#A6D96A"),
    ("#34418E", "#95A3EE"),
    ("#B5651D", "#F0B27A"),
)
PALETTE = tuple(light for light, _dark in _COLOURS.values())
GREY = "#808080"  # visible on light and on dark pages


def colours_of(names: Iterable[str], *, dark: bool = False) -> dict[str, str]:
    """The colour of each scheduler or run, by name: the same in every picture, whatever their order.

    A name that is no scheduler's, and a second run of one scheduler, get a colour by the name's hash, or the next
    one if an earlier name has that colour. An earlier run, of `previous-N`, has that of the run which followed it.

    >>> colours_of(["live/random", "previous-1/live/random", "larger/random"])
    {'live/random': '#0072B2', 'previous-1/live/random': '#0072B2', 'larger/random': '#8C564B'}
    """
    found: dict[str, str] = {}
    runs = {name: "/".join(part for part in name.split("/") if not is_aside(part)) for name in names}
    for run in dict.fromkeys(runs.values()):
        name = run.rsplit("/", 1)[-1]
        own, first = [_COLOURS[name]] if name in _COLOURS else [], zlib.crc32(name.encode()) % len(_OTHERS)
        choice = [pair[dark] for pair in (*own, *_OTHERS[first:], *_OTHERS[:first])]
        found[run] = next((colour for colour in choice if colour not in found.values()), choice[0])
    return {name: found[run] for name, run in runs.items()}


def as_label(name: str) -> str:
    """A user's name for matplotlib, where $ encloses a formula, a leading _ hides, and what is not UTF-8 is refused."""
    return re.sub("^_", " _", name.encode(errors="backslashreplace").decode().replace("$", r"\$"))


def to_bytes(figure: Figure, *, dpi: int = 110, kind: str = "png") -> bytes:
    """The content of a file of the figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dpi)
    return buffer.getvalue()


def check_suffix(path: str | Path) -> None:
    """Check that matplotlib can write a figure to a file of this name.

    Raises:
        OptionError: it cannot.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise OptionError(f"cannot plot to {path}: its name must end in one of {', '.join(sorted(known))}")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the file's suffix chooses the format. If that fails, an earlier file is as it was.

    Raises:
        OptionError: a suffix that matplotlib cannot write.
    """
    check_suffix(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), to_bytes(figure, kind=Path(path).suffix[1:]))
