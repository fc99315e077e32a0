"""`mmlab watch DIR`: the runs below a folder, live in a terminal, or once as text or JSON.

One line per rank of each run: progress, time left, memory, utilisation, waiting, waste, speed, loss.
Everything comes from the runs' files, so it follows a run of a notebook, of `torchrun`, or one that ended
last week. It only reads: quitting does not affect the runs.

Costs: reads what is new twice a second; about 2 % of a core for four runs. Does not: need torch, or draw curves.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mmlab.errors import DataError, printable
from mmlab.machine import GIB
from mmlab.runs.follow import ACTIVE, Runs, RunState
from mmlab.runs.summaries import duration, progress_of, summarize

_COLOURS = {"running": "green", "paused": "yellow", "done": "cyan"}
_COLOURS |= dict.fromkeys(("failed", "killed", "unreadable"), "red")
_MAX_MESSAGES = 3


def summary(folder: str | Path) -> dict[str, Any]:
    """The current state of the runs below a folder, ready for JSON.

    Raises:
        DataError: there is no run.
    """
    runs = Runs(folder)
    if not runs.poll():
        raise DataError(f"no run in {folder} or below it; give the folder of a run, or one above")
    return _describe(runs)


def _describe(runs: Runs) -> dict[str, Any]:
    states = runs.states
    found = {
        "folder": str(runs.source),
        "time_s": time.time(),
        "runs": {name: _describe_run(state) for name, state in states.items()},
        "errors": [error["text"] for error in runs.errors],
        **progress_of(states.values())._asdict(),  # done_ratio, left_s
    }
    return json.loads(json.dumps(found), parse_constant=lambda _: None)  # JSON has no NaN


def _describe_run(state: RunState) -> dict[str, Any]:
    start = state.latest("start")
    return {
        "status": state.status,
        "scheduler": start.get("scheduler"),
        "device": start.get("device") or (start.get("config") or {}).get("device"),
        **progress_of([state])._asdict(),  # done_ratio, left_s
        # one line also for a run that has written nothing yet
        "ranks": {str(rank): summarize(state, rank) for rank in state.ranks() or [0]},
        "messages": state.messages()[-_MAX_MESSAGES:],
        "error": state.latest("end").get("message"),
    }


def text_of(found: Mapping[str, Any], width: int = 160) -> str:
    """The table as plain text."""
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, force_jupyter=False).print(page_of(found, width))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def follow(folder: str | Path) -> dict[str, Any]:
    """Show the runs in the terminal until the last of them has ended; an interrupt ends the view, not the runs.

    If the folder has no run yet, it waits for one.

    Returns:
        What was shown last, as from `summary`.

    Raises:
        DataError: it is a file.
    """
    if Path(folder).is_file():
        raise DataError(f"{folder} is a file; give the folder of a run, or one above")
    runs, console = Runs(folder), Console()
    found: dict[str, Any] = {}
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while not found.get("runs") or any(run["status"] in ACTIVE for run in found["runs"].values()):
            if found:
                time.sleep(0.5)
            runs.poll()
            found = _describe(runs)
            live.update(page_of(found, console.width), refresh=True)
    return found


def table_of(found: Mapping[str, Any], width: int) -> Table:
    """The runs as a rich table, one line per rank. A narrow terminal drops the least important columns."""
    lines = [line for name, run in found["runs"].items() for line in _lines(name, run)]
    widths = {
        heading: max([len(heading), *(len(line[heading]) for line in lines)]) + 2
        for heading in _COLUMNS
        if heading == "run" or any(line[heading] not in ("", "-") for line in lines)
    }
    for heading in _FIRST_TO_GO:
        if sum(widths.values()) > width:
            widths.pop(heading, None)
    table = Table(box=None, pad_edge=False)
    for heading in widths:
        table.add_column(heading, justify="left" if heading in ("run", "status") else "right", no_wrap=True)
    for line in lines:
        style = {"status": _COLOURS.get(line["status"], "")}
        table.add_row(*(Text(printable(line[heading]), style=style.get(heading, "")) for heading in widths))
    return table


def _lines(name: str, run: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """One line per rank: its texts by heading. Values of the whole run are in the first line only."""
    several = len(run["ranks"]) > 1
    # long names often differ only at their ends
    name = name if len(name) < 50 else f"{name[:20]}…{name[-28:]}"
    for index, (rank, row) in enumerate(run["ranks"].items()):
        values = {**run, **row, "run": name, "rank": rank if several else ""}
        yield {
            heading: "" if index and heading in _OF_THE_RUN else show(values)
            for heading, show in _COLUMNS.items()
        }


def page_of(found: Mapping[str, Any], width: int) -> Group:
    """The table, and below it the runs' warnings and errors."""
    messages = [
        f"{name}: {message}"
        for name, run in found["runs"].items()
        for message in [*run["messages"], run["error"]]
        if message
    ]
    waits = "" if found["runs"] else ": waiting for a run"
    return Group(
        Text(printable(f"{found['folder']}{waits}"), style="italic"),
        table_of(found, width),
        *(Text(printable(message), style="yellow") for message in messages + found["errors"]),
    )


def _number(value: float | None, factor: float = 1.0, unit: str = "", *, digits: int = 0) -> str:
    return "-" if value is None or not isfinite(value) else f"{factor * value:.{digits}f}{unit}"


def _steps(row: Mapping[str, Any]) -> str:
    """Steps done, and the approximate total while the run lasts: epochs may differ in their steps."""
    planned = f"/{row['planned_steps']}" if row["planned_steps"] and row["left_s"] else ""
    return f"{row['steps']}{planned}"


def _memory(row: Mapping[str, Any]) -> str:
    """Memory in use, and where the figure comes from: a process's memory is never shown as a GPU's."""
    if row["memory_bytes"] is None:
        return "-"
    total = "" if row["memory_total_bytes"] is None else f" of {row['memory_total_bytes'] / GIB:.0f}"
    return f"{row['memory_bytes'] / GIB:.2f}{total} {row['memory_source'] or ''}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {  # heading -> how a rank's values are shown
    "run": lambda row: row["run"],
    "rank": lambda row: row["rank"],
    "status": lambda row: row["status"],
    "done": lambda row: _number(row["done_ratio"], 100, "%"),
    "left": lambda row: duration(row["left_s"]) if row["status"] in ACTIVE else "",
    "step": _steps,
    "loss": lambda row: _number(row["loss"], digits=3),
    "samples/s": lambda row: _number(row["samples_per_s"], digits=1),
    "step ms": lambda row: _number(row["step_s"], 1000, digits=1),
    "wait %": lambda row: _number(row["data_wait_ratio"], 100),
    "ranks %": lambda row: _number(row["rank_wait_ratio"], 100),
    "waste %": lambda row: _number(row["combined_waste"], 100, digits=1),
    "memory GiB": _memory,
    "use %": lambda row: _number(row["utilization_ratio"], 100),
    "W": lambda row: _number(row["power_w"]),
}
_OF_THE_RUN = ("run", "status", "done", "left")
# columns that a narrow terminal drops, in this order
_FIRST_TO_GO = ["W", "step ms", "use %", "rank", "waste %", "ranks %", "wait %", "memory GiB", "left", "loss"]
_FIRST_TO_GO += ["step", "samples/s"]
