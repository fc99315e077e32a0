"""The live panel: draws runs while they train, on one time axis, and steers one, in a notebook.

One small widget. A daemon thread follows the runs' event files and sends new rows as binary float32; the browser keeps
every row, draws, smooths, zooms and exports. The page acknowledges messages once they are drawn; without an
acknowledgement the thread sends once a second, so neither a slow page nor a closed one blocks anything.

Costs: under 1 ms of the thread's CPU time per update, on average ten updates a second; nothing while no page
shows the panel. docs/internals/live_panel.md has the measured figures. Opening a run needs no torch.
Does not: train, nor write anything to disk. The browser makes the exports.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython.core.displaypub import CapturingDisplayPublisher

from mmlab.errors import OptionError, listed
from mmlab.lab.messages import TRACKS, saved_view
from mmlab.lab.pump import Pump
from mmlab.lab.saved import SavedView
from mmlab.runs.follow import RunState, Source, names_of, run_files, summary_line

STATIC = Path(__file__).parent / "static"


class LivePanel(anywidget.AnyWidget):
    """Watch runs, and steer one: display it as the last line of a cell.

    >>> panel = LivePanel("runs/there_need_be_nothing_yet")
    >>> panel
    LivePanel: waiting for the first event of runs/there_need_be_nothing_yet
    >>> panel.close()

    Args:
        source: what to follow: a run's folder, a folder of runs (a comparison, or its `runs`), or several of those.
        controller: what the buttons call, a `Lab` or an object with its `start`, `pause`, `resume`, `stop`,
            `state`, `progress` and `error`, all of which must be thread-safe and return at once. Without one
            the panel only watches.

    Raises:
        OptionError: the source names no folder.
    """

    _esm = STATIC / "live_panel.js"
    _css = STATIC / "live_panel.css"
    page = traitlets.Unicode((STATIC / "live_panel.html").read_text()).tag(sync=True)
    uid = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    steers = traitlets.Bool().tag(sync=True)
    tracks = traitlets.Dict().tag(sync=True)  # columns of each track, in the order in which they are sent

    def __init__(self, source: Source, controller: Any = None) -> None:
        self.controller = controller
        self._source = source
        wanted = "source must be folders"
        folders = listed(str(source) if isinstance(source, Path) else source, wanted)
        if not folders or not all(isinstance(each, str | Path) for each in folders):
            raise OptionError(f"{wanted}, found {source!r}")
        title, tracks = ", ".join(map(str, folders)), {track: list(keys) for track, keys in TRACKS.items()}
        super().__init__(uid=uuid.uuid4().hex, title=title, steers=controller is not None, tracks=tracks)
        self._saved = SavedView()
        self._save([])
        self._pump = Pump(source, controller, self.send, self._save)
        self.forgive = self._pump.forgive
        self.on_msg(lambda _widget, content, _buffers: self._pump.receive(content))
        # ipykernel would handle the page's messages in the thread that last sent one: the main thread, behind
        # queued cells. The page asks for a subshell where the kernel has them.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, asked: asked
            # IPython would take each message for the end of a cell, and show a half-drawn figure of that cell
            self.comm.handle_msg = self._handle_msg
            # while a cell captures its output, ipykernel calls this for each message, else drops the message
            CapturingDisplayPublisher.set_parent = lambda *_: None

    def begin(self) -> None:
        """Start sending, as displaying does: the page's first message may wait behind queued cells."""
        self._pump.begin()
        self._saved.take_place()

    def close(self) -> None:
        """End the thread and remove the panel from the page."""
        if hasattr(self, "_pump"):
            self._pump.close()
        super().close()

    def __repr__(self) -> str:
        """One line on the state of the runs, for places where no page can show the panel."""
        try:
            named = names_of(run_files(self._source)).items()
            runs = [f"{name} {summary_line(folder)}" for folder, name in named]
            state = "" if self.controller is None else f"{self.controller.state}; "
            return f"LivePanel: {state}{', '.join(runs) or 'waiting for the first event of ' + self.title}"
        except Exception as error:  # consoles and tracebacks call repr: it must not fail
            return f"LivePanel: {error!r}"

    def _save(self, runs: list[RunState]) -> None:
        """Save a summary of the ended runs in the notebook."""
        self._saved.show(saved_view(runs), repr(self))

    def _repr_mimebundle_(self, **arguments: Any) -> Any:
        self.begin()
        return super()._repr_mimebundle_(**arguments)
