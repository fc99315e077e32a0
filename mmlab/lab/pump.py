"""The thread between runs' files and a live panel's page: reads, paces, sends.

Each message has the rows that the page does not have yet, on average about ten messages a second at most. The page
acknowledges messages once it has drawn them; without that the thread sends once a second, so neither a slow
page nor a closed one blocks anything. Until the page has sent a first message, each message starts from the
beginning: the first ones may arrive before the page listens, and its own may wait behind queued cells.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import OptionError
from mmlab.lab.messages import TRACKS, columns_of, earlier_of, facts_of, headlines_of, note_of
from mmlab.runs.control import Control, read_phase
from mmlab.runs.figures import colours_of
from mmlab.runs.follow import ENDED, Runs, RunState, Source, overall_status, shown_error
from mmlab.runs.summaries import Progress, failure_of, progress_of

INTERVAL_S = 0.1  # between two messages, on average; a screen shows no more
MAX_NUMBERS = 1 << 16  # float32 numbers in one message: 256 KiB
WINDOW = 50  # unacknowledged messages allowed; the page acknowledges every 25th, and any with `more`
SILENCE_S = 1.0  # after so long without an acknowledgement, messages are sent at this interval
BEAT_S = 1.0  # most seconds between messages, so that the page knows that the kernel is alive
HEADLINE_S = 4.0  # between two updates of tiles and verdict, once there are any
# between updates of all but rows, such as the state: without new rows, with them
FACTS_S, FACTS_WITH_ROWS_S = 0.2, 1.0
POLL_S = (0.02, 0.1, 0.25)  # between reads of the files: if the last news came within 1 s, 10 s, longer ago
# of the shortest recent time between steps: no read before that; and of the interval between messages, see `_count_message`
REGULAR = 0.95
SCAN_S = 1.0  # between scans for new folders and files
ACTIONS = ("start", "pause", "resume", "stop")


class Pump:
    """The thread between the files and the page: reads, paces, sends.

    Only this thread reads runs, sends messages, and passes runs to `save` when they have ended. `receive` may
    be called from any thread: it records the page's message under a lock, and calls the controller for an
    action.
    """

    def __init__(
        self,
        source: Source,
        controller: Any,
        send: Callable[[dict[str, Any], list[bytes]], object],
        save: Callable[[list[RunState]], object],
    ) -> None:
        self._runs = Runs(source, scan_s=SCAN_S)
        self._controller, self._send, self._save = controller, send, save
        self._wake = threading.Condition()  # its lock is re-entrant
        self._thread: threading.Thread | None = None
        # under the lock
        self._shown = self._heard = self._closed = self._urgent = False
        self._seen_s = 0.0  # when the page was last heard from
        self._acked = 0
        self._rewind: list[dict[str, int]] = []  # what pages say they have
        self._cleared: set[str] = set()  # ids of runs that are no longer shown; never removed
        self._errors: list[dict[str, str]] = []
        # the thread's own
        self._sent: dict[str, int] = {}  # rows of each series that were sent
        self._names: dict[Any, str] = {}  # of runs, by folder, in the order in which they were first seen
        self._said: dict[str, Any] = {}  # facts as last sent
        self._saved: list[str] = []  # ids of the runs whose end was saved
        self._answers: dict[str, Any] = {}  # the last values from the controller
        self._headline: dict[str, Any] = {"tiles": [], "verdict": ""}
        self._headline_of: tuple[Any, ...] = ()  # the last news, and ids and statuses of the runs
        self._seq = 0
        self._sent_s = self._due_s = self._paid_s = self._news_s = self._looked_s = self._headline_due_s = 0.0
        self._gaps_s: deque[float] = deque(maxlen=8)  # from one step to the next, by the writer's clock
        # when the last step was written, and when it was read
        self._stepped_s, self._stepped_at_s = -inf, 0.0
        self._fresh = self._more = False  # there are new rows; rows that did not fit into the last message

    def receive(self, content: Mapping[str, Any]) -> None:
        """Take a message from the page; errors are shown there."""
        try:
            self._act(content)
        except Exception as error:  # Jupyter hides what a callback raises, so the panel shows it
            self._report("callback", error)
        with self._wake:
            self._wake.notify()

    def begin(self) -> None:
        """Start sending, whether or not a page has asked for it."""
        with self._wake:
            self._shown = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="mmlab-live-panel", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; nothing is sent once this returns."""
        with self._wake:
            self._closed, thread = True, self._thread
            self._wake.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _act(self, content: Mapping[str, Any]) -> None:
        kind, action = content.get("kind"), str(content.get("name"))
        with self._wake:
            self._seen_s = time.monotonic()
            self._urgent |= kind != "ack"
            if kind == "ack":
                self._acked = max(self._acked, int(content["seq"]))
            elif kind == "ready":
                self._rewind.append({str(key): int(rows) for key, rows in content["have"].items()})
                self._heard = True
                self._acked = self._seq  # an earlier page will not answer any more
                self.begin()
            elif kind in ("hidden", "unseen"):  # by a page that shows it no more, or that never did
                self._shown &= kind == "unseen" and self._heard
            elif kind == "clear":  # a new run in the same folder has another id
                self._cleared.add(content["run"])
            elif kind == "action" and action in ACTIONS and self._controller is not None:
                self.forgive()
            else:
                raise OptionError(f"the panel's page sent an unknown message: {content!r}")
        if kind == "action":  # outside of the lock: it may take its time
            getattr(self._controller, action)()

    def forgive(self) -> None:
        """Show errors of actions no longer: what failed may work now."""
        with self._wake:
            self._errors = [error for error in self._errors if error["where"] != "callback"]

    def _report(self, where: str, error: Exception) -> None:
        with self._wake:
            if (shown := shown_error(where, error)) not in self._errors:
                self._errors = [*self._errors[-9:], shown]
                self._urgent = True

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            with self._wake:
                if not self._urgent and not self._closed and wait_s != 0:
                    self._wake.wait(wait_s)
                if self._closed or not self._shown:  # a page that shows it again starts another
                    self._runs.forget(but=self._cleared)  # a cell that is run again makes another panel
                    self._thread = None
                    return
            try:
                wait_s = self._turn()
            except Exception as error:  # nothing else would show a thread's error
                self._report("panel", error)
                wait_s = 1.0
                with self._wake:
                    self._urgent = False

    def _turn(self) -> float:
        """Read and perhaps send; returns how long to wait."""
        now_s = time.monotonic()
        with self._wake:
            urgent, self._urgent = self._urgent, False
            rewind, self._rewind = self._rewind, []
        for have in rewind:
            self._said = {}
            self._sent = {key: min(rows, have.get(key, 0)) for key, rows in self._sent.items()}
        if self._runs.poll():
            self._note_news(now_s)
        may_send = self._may_send(now_s)
        has_rows = self._more or (self._fresh and now_s >= self._due_s)
        looks = urgent or self._facts_are_due(now_s, has_rows)
        if urgent or (may_send and (has_rows or looks)):
            self._update(now_s, urgent, looks)
        return self._wait_s(now_s, may_send)

    def _note_news(self, now_s: float) -> None:
        """Note when something was read, and how far apart the last steps are."""
        self._news_s, self._fresh = now_s, True
        steps = [run.event("step", rank) for run in self._runs.ordered for rank in run.ranks()]
        stepped_s = max((step.time_s for step in steps if step is not None), default=-inf)
        if stepped_s != self._stepped_s:
            self._gaps_s.append(abs(stepped_s - self._stepped_s))
            self._stepped_s, self._stepped_at_s = stepped_s, now_s

    def _may_send(self, now_s: float) -> bool:
        """Whether the page keeps up with what it was sent, or says nothing at all."""
        with self._wake:
            silent = self._acked < self._seq and now_s - max(self._sent_s, self._seen_s) > SILENCE_S
            return silent or self._seq - self._acked < (WINDOW if self._heard else 1)

    def _facts_are_due(self, now_s: float, has_rows: bool) -> bool:
        """Whether it is time to look for facts that have changed."""
        told = [(run["id"], run["status"]) for run in self._said.get("runs", ())]
        if told != [(run.id, run.status) for run in self._shown_runs()]:
            return True
        if has_rows:  # facts are sent along with rows: a separate message would delay the next rows
            return now_s - self._looked_s >= FACTS_WITH_ROWS_S
        return now_s - max(self._looked_s, self._news_s) >= FACTS_S

    def _wait_s(self, now_s: float, may_send: bool) -> float:
        """How long to wait until the next turn."""
        quiet_s = now_s - self._news_s
        poll_s = POLL_S[0] if quiet_s < 1.0 else POLL_S[1] if quiet_s < 10.0 else POLL_S[2]
        if self._more:
            return 0.001 if may_send else poll_s  # an acknowledgement wakes the thread
        ended_s = time.monotonic()
        next_step_s = self._stepped_at_s + REGULAR * min(self._gaps_s, default=0.0)
        return max(poll_s, min(next_step_s - ended_s, POLL_S[1]), self._due_s - ended_s)

    def _update(self, now_s: float, urgent: bool, looks: bool) -> None:
        """Send what is new, if it is time to; with `looks`, also what is not in rows."""
        if not self._heard and not self._more:
            self._said, self._sent = {}, {}
        message = self._news() if looks or not self._said else {}
        rows: dict[str, NDArray[np.float32]] = {}
        if urgent or self._more or now_s >= self._due_s:
            rows = self._new_rows()
            self._fresh = False
            self._more = sum(columns.size for columns in rows.values()) > MAX_NUMBERS // 2
        if not (rows or message or urgent or now_s - self._sent_s >= BEAT_S):
            return
        self._count_message(now_s)
        runs = self._shown_runs()
        message |= {
            "kind": "update",
            "seq": self._seq,
            "more": self._more,
            "hears": self._heard,
            "rows": [[name, self._sent.get(name, 0), columns.shape[1]] for name, columns in rows.items()],
            "last_s": max((run.last_s for run in runs if isfinite(run.last_s)), default=None),
        }
        self._send(message, [b"".join(columns.tobytes() for columns in rows.values())])
        for name, columns in rows.items():
            self._sent[name] = self._sent.get(name, 0) + columns.shape[1]
        ids = [run.id for run in runs]
        if not self._more and self._said["state"] in ENDED and self._saved != ids:
            self._saved = ids
            self._save(runs)

    def _count_message(self, now_s: float) -> None:
        """Number a message that is sent now, and set when the next one is due.

        On average one message per interval; one may come early, and each a little, so that messages get in step with
        the run also after the page has asked for one.
        """
        self._paid_s = min(max(self._paid_s, now_s) + REGULAR * INTERVAL_S, now_s + 2 * INTERVAL_S)
        self._due_s = max(self._paid_s - INTERVAL_S, now_s + 0.5 * INTERVAL_S)
        self._sent_s = now_s
        self._seq += 1

    def _shown_runs(self) -> list[RunState]:
        return [run for run in self._runs.ordered if run.id not in self._cleared]

    def _phase(self, state: str) -> str:
        """What the page says before the first step."""
        source = self._runs.source  # of several, the first is the current run
        folder = str(source if isinstance(source, str | Path) else next(iter(source), ""))
        if state != "running":
            known = {"idle": "Nothing to show yet: press Start."}
            known["waiting"] = f"waiting for the first event in {Path(folder).absolute()} …"
            return known.get(state, state + " …" * state.endswith("ing"))
        phase = read_phase(folder) or "waiting for the first step"
        if self._controller and Control(folder, obey_earlier=True).wanted == "pause":
            phase += "; then it pauses"
        return f"{phase} …"

    def _new_rows(self) -> dict[str, NDArray[np.float32]]:
        """Rows not sent yet, (C, N) per series "<run id>.<rank>.<track>"; as many as fit into a message."""
        found, room = {}, MAX_NUMBERS
        for run in self._shown_runs():
            for rank, (track, keys) in product(run.ranks(), TRACKS.items()):
                name = f"{run.id}.{rank}.{track}"
                start, limit = self._sent.get(name, 0), room // len(keys)
                if limit and (count := min(limit, run.count(track, rank) - start)) > 0:
                    found[name] = columns_of(run, track, rank, start, start + count)
                    room -= found[name].size
        return found

    def _asked(self, name: str) -> Any:
        """A value from the controller; if it raises, the last good one, and the panel shows the error."""
        try:
            self._answers[name] = getattr(self._controller, name)
        except Exception as error:  # a controller's error must not stop the drawing
            self._report("panel", error)
        return self._answers.get(name)

    def _news(self) -> dict[str, Any]:
        """Facts that have changed since they were last sent."""
        runs = self._shown_runs()
        state = overall_status(runs) if self._controller is None else self._asked("state")
        failure = failure_of(runs) if self._controller is None else self._asked("error")
        progress = progress_of(runs) if self._controller is None else self._asked("progress") or Progress()
        with self._wake:
            if state == "running" != self._said.get("state"):  # perhaps a cell has started it
                self.forgive()
            errors = [*self._runs.errors[-10:], *self._errors]
        if failure and state == "failed":
            # after the indented frames
            text = re.split(r"\n(?=\S)", failure.rsplit("Traceback (", 1)[-1], maxsplit=1)[-1].strip()
            errors.append({"where": "training", "text": text[:500], "traceback": failure[-8000:]})
        self._names |= {run.folder: run.name for run in runs}
        light, dark = (colours_of(self._names.values(), dark=dark) for dark in (False, True))
        begins = self._controller is not None and state in ("running", "paused", "stopping")
        earlier = earlier_of(runs, begins)
        facts = {
            "runs": [
                {
                    **facts_of(run),
                    "colours": [each[run.name] + ("80" if run in earlier else "") for each in (light, dark)],
                    "dash": [*self._names].index(run.folder),
                    "ghost": run in earlier,
                }
                for run in runs
            ],
            "notes": [note_of(run, event) for run in runs for event in run.notes],
            "errors": errors,
            "state": state,
            "progress": [value if isfinite(value) else None for value in progress],
            "phase": "" if any(run.count() for run in runs if run not in earlier) else self._phase(state),
            **self._headlines(runs, begins),
        }
        changed = {key: value for key, value in facts.items() if self._said.get(key) != value}
        self._said, self._looked_s = facts, time.monotonic()
        return changed

    def _headlines(self, runs: list[RunState], begins: bool) -> dict[str, Any]:
        """Every run's tile and the verdict, updated when a run begins or ends, else every 4 s, or less often if that takes long."""
        started_s, shown = time.monotonic(), (self._news_s, begins, [(run.id, run.status) for run in runs])
        is_due = started_s >= self._headline_due_s or shown[1:] != self._headline_of[1:]
        if is_due and shown != self._headline_of:
            self._headline_of, self._headline = shown, headlines_of(runs, begins)
            least_s = HEADLINE_S if self._headline["tiles"] else 0.0
            self._headline_due_s = started_s + max(least_s, 200 * (time.monotonic() - started_s))
        return self._headline
