"""What the panel sends to a page, and when; a page's part is played by the test, the files and threads are real."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from mmlab.errors import OptionError
from mmlab.lab import pump
from mmlab.lab.live_panel import STATIC, LivePanel
from mmlab.lab.messages import TRACKS
from mmlab.lab.pump import WINDOW
from mmlab.machine import describe_process
from mmlab.runs.control import Control, send
from mmlab.runs.events import RunEvent, RunLog
from mmlab.runs.figures import colours_of
from mmlab.runs.watch import summary

PATIENCE_S = 30.0
LOSS = TRACKS["step"].index("loss")


class Page:
    """A page that shows a panel: takes its messages and answers them."""

    def __init__(self, panel: LivePanel, *, answers: bool = True) -> None:
        self.panel, self.answers = panel, answers
        self.messages: queue.Queue[tuple[dict[str, Any], list[bytes]]] = queue.Queue()
        panel.send = lambda content, buffers=None: self.messages.put((content, buffers))  # type: ignore[method-assign]
        panel._pump._send = panel.send
        self.rows: dict[str, list[np.ndarray]] = {}
        self.facts: dict[str, Any] = {}

    def say(self, kind: str, **content: Any) -> None:
        self.panel._pump.receive({"kind": kind, **content})

    def take(self) -> dict[str, Any]:
        """The next message, taken as a page takes it."""
        message, buffers = self.messages.get(timeout=PATIENCE_S)
        json.dumps(message, allow_nan=False)  # a page reads JSON, which has no NaN
        data, at = np.frombuffer(buffers[0], np.float32), 0
        for name, start, count in message["rows"]:
            width = len(TRACKS[name.split(".")[2]])
            columns = data[at : at + width * count].reshape(width, count)
            at += width * count
            assert start == sum(part.shape[1] for part in self.rows.get(name, []))
            self.rows.setdefault(name, []).append(columns)
        assert at == len(data)
        self.facts |= message
        if self.answers:
            self.say("ack", seq=message["seq"])
        return message

    def until(self, condition: Any) -> None:
        while not condition():
            self.take()

    def losses(self, name: str = "r1.0.step") -> list[float]:
        return np.concatenate([part[LOSS] for part in self.rows[name]]).tolist() if name in self.rows else []


class Steered:
    """A controller as anybody may write one."""

    def __init__(self, folder: Path) -> None:
        self.state, self.progress, self.error, self.folder = "idle", (nan, nan), None, folder
        self.called: list[tuple[str, str]] = []

    def _note(self, name: str, state: str) -> None:
        self.called.append((name, threading.current_thread().name))
        self.state = state

    def start(self) -> None:
        self._note("start", "running")

    def pause(self) -> None:
        self._note("pause", "paused")

    def resume(self) -> None:
        raise RuntimeError("cannot resume")

    def stop(self) -> None:
        self._note("stop", "stopped")


@pytest.fixture
def panels() -> Iterator[list[LivePanel]]:
    made: list[LivePanel] = []
    yield made
    for panel in made:
        panel.close()


def write(folder: Path, first: int, num_steps: int) -> None:
    with RunLog(folder) as log:
        for step in range(first, first + num_steps):
            log.write("step", step, loss=1 / step, num_samples=4)


def test_a_page_gets_what_was_written_and_then_what_is_new(tmp_path: Path, panels: list[LivePanel]) -> None:
    write(tmp_path, 1, 50)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    assert page.messages.empty(), "nothing is sent before a page asks"
    page.say("ready", have={})
    page.until(lambda: len(page.losses()) == 50)
    assert page.facts["state"] == "running"
    write(tmp_path, 51, 3)
    page.until(lambda: len(page.losses()) == 53)
    assert page.losses() == pytest.approx([1 / step for step in range(1, 54)], rel=1e-6)


def test_a_page_that_is_loaded_anew_gets_everything_again(tmp_path: Path, panels: list[LivePanel]) -> None:
    write(tmp_path, 1, 5000)  # more than one message holds
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: len(page.losses()) == 5000)
    page.rows.clear()
    page.facts.clear()
    page.say("ready", have={})
    page.until(lambda: len(page.losses()) == 5000)
    assert page.facts["runs"][0]["status"] == "running"


def test_a_page_that_missed_a_message_gets_it_again(tmp_path: Path, panels: list[LivePanel]) -> None:
    write(tmp_path, 1, 10)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: len(page.losses()) == 10)
    page.rows["r1.0.step"] = [page.rows["r1.0.step"][0][:, :4]]
    page.say("ready", have={"r1.0.step": 4})
    page.until(lambda: len(page.losses()) == 10)
    assert page.losses() == pytest.approx([1 / step for step in range(1, 11)], rel=1e-6)


def test_without_answers_messages_come_seldom_and_still_lose_nothing(
    tmp_path: Path, panels: list[LivePanel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "INTERVAL_S", 0.001)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0], answers=False)
    page.say("ready", have={})
    times = []
    for step in range(1, WINDOW + 40):
        write(tmp_path, step, 1)
        if not page.messages.empty():
            times.append(page.take()["seq"])
    page.until(lambda: len(page.losses()) == WINDOW + 39)
    assert page.facts["seq"] <= WINDOW + 3, "the window was not held"
    assert page.losses() == pytest.approx([1 / step for step in range(1, WINDOW + 40)], rel=1e-6)


def test_figures_of_a_run_that_was_cleared_or_killed_are_made_anew(
    tmp_path: Path, panels: list[LivePanel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "HEADLINE_S", 0.01)
    for name in ("budget", "random"):
        with RunLog(tmp_path / name) as log:
            log.write("start", 0, num_steps=9, **describe_process(os.getpid()))
            log.write("step", 1, epoch=0, step_s=1.0, num_samples=4)
            log.write("epoch", 1, epoch=0)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: page.facts.get("verdict"))
    page.say("clear", run=page.facts["runs"][1]["id"])
    page.until(lambda: page.facts["verdict"] == "" and "left" in dict(page.facts["tiles"][0]["figures"]))
    monkeypatch.setattr("mmlab.runs.follow.process_runs", lambda _identity: False)
    page.until(lambda: page.facts["runs"][0]["status"] == "killed")
    page.until(lambda: "left" not in dict(page.facts["tiles"][0]["figures"]))
    page.until(lambda: page.facts["errors"])
    assert page.facts["errors"][0]["text"].startswith("the process of budget was killed")


def test_the_end_of_a_run_and_its_last_figures_come_together(
    tmp_path: Path, panels: list[LivePanel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "HEADLINE_S", 1000.0)  # as on a machine where making the figures takes long
    with RunLog(tmp_path) as log:
        log.write("start", 0, num_steps=9, **describe_process(os.getpid()))
        log.write("step", 1, step_s=1.0, num_samples=4, samples_per_s=4.0)
        panels.append(LivePanel(tmp_path))
        page = Page(panels[0])
        page.say("ready", have={})
        page.until(lambda: page.facts.get("tiles"))
        assert "left" in dict(page.facts["tiles"][0]["figures"])
        log.write("end", 1, status="done")
    page.until(lambda: page.facts["runs"][0]["status"] == "done")
    assert "left" not in dict(page.facts["tiles"][0]["figures"])


@pytest.mark.parametrize("late_s", [0.02, 0.05, 0.08])
def test_rows_are_not_late_for_ever_after_the_page_has_asked_for_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Ten steps a second, in simulated time; buttons of the page are clicked at some moment between two steps."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = clock.time = lambda: clock.now
    clock.clock_gettime = lambda _clock: clock.now
    for module in ("mmlab.lab.pump", "mmlab.runs.follow", "mmlab.runs.events"):
        monkeypatch.setattr(f"{module}.time", clock)
    lags_s: list[float] = []
    written_s = clock.now

    def take(message: dict[str, Any], _buffers: list[bytes]) -> None:
        if message["rows"]:
            lags_s.append(clock.now - written_s)
        sender.receive({"kind": "ack", "seq": message["seq"]})

    sender = pump.Pump(tmp_path, None, take, lambda _runs: None)
    sender._shown = sender._heard = True
    turn_s = clock.now
    with RunLog(tmp_path) as log:
        for step in range(80):
            written_s = clock.now = 1000.0 + 0.1 * step
            log.write("step", step, loss=1.0)
            click_s = written_s + late_s if step in (20, 21, 22) else inf
            while min(turn_s, click_s) < written_s + 0.1:
                clock.now = max(clock.now, min(turn_s, click_s))
                if clock.now >= click_s:
                    sender.receive({"kind": "clear", "run": "another"})
                    click_s = inf
                turn_s = clock.now + 0.001 + (sender._turn() or 0.0)
    assert len(lags_s) > 70
    assert max(lags_s[-10:]) < 0.03


def test_a_hidden_panel_is_sent_nothing_until_it_is_shown_again(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.take()
    write(tmp_path, 1, 2)
    page.until(lambda: len(page.losses()) == 2)
    page.say("hidden")
    while not page.messages.empty():
        page.take()
    write(tmp_path, 3, 2)
    with pytest.raises(queue.Empty):
        page.messages.get(timeout=1.5)  # longer than between two beats
    assert panels[0]._pump._thread is None, "each cell that is run again would leave a thread behind"
    assert not panels[0]._pump._runs.states, "and all rows"
    page.say("ready", have={"r1.0.step": 2})
    page.until(lambda: len(page.losses("r2.0.step")) == 4)


def test_buttons_call_the_controller_and_its_state_comes_back(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    controller = Steered(tmp_path)
    for name in ("previous-1/random", "previous-2/random"):
        write(tmp_path / name, 1, 1)
    panels.append(LivePanel([tmp_path, *tmp_path.iterdir()], controller))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: page.facts.get("state") == "idle" and page.facts.get("runs"))
    Control(tmp_path).report_phase("planning")
    send(tmp_path, "pause")
    for action, state in (("start", "running"), ("pause", "paused"), ("stop", "stopped")):
        page.say("action", name=action)
        page.until(lambda state=state: page.facts["state"] == state)
        assert state != "running" or page.facts["phase"] == "planning; then it pauses …"
        pale = [run["ghost"] for run in page.facts["runs"]]
        assert pale == 2 * [state != "stopped"], "earlier runs hide what a run that begins is doing"
    assert [name for name, _ in controller.called] == ["start", "pause", "stop"]


def test_an_error_in_a_callback_is_sent_and_does_not_reach_the_kernel(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    panels.append(LivePanel(tmp_path, Steered(tmp_path)))
    page = Page(panels[0])
    page.say("ready", have={})
    page.say("action", name="resume")
    page.until(lambda: page.facts.get("errors"))
    [error] = page.facts["errors"]
    assert error["where"] == "callback"
    assert error["text"] == "RuntimeError: cannot resume"
    assert "in resume" in error["traceback"]
    page.say("action", name="delete_everything")
    page.until(lambda: len(page.facts["errors"]) == 2)
    panels[0]._pump._controller.start()  # as a cell does
    page.until(lambda: not page.facts["errors"])


def test_an_error_of_training_and_one_of_the_panel_itself_are_sent(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    controller = Steered(tmp_path)
    panels.append(LivePanel(controller.folder, controller))
    page = Page(panels[0])
    page.say("ready", have={})
    said = "ValueError: 2 rows cannot be used:\n  item 0: no image\nFix them"
    controller.state = "failed"
    controller.error = f"Traceback (most recent call last):\n  File a.py\n    read()\n{said}\n"
    page.until(lambda: page.facts.get("errors"))
    assert page.facts["errors"][0]["where"] == "training"
    assert page.facts["errors"][0]["text"] == said
    del controller.progress
    page.until(lambda: any(error["where"] == "panel" for error in page.facts["errors"]))


def test_a_run_whose_file_is_damaged_is_unreadable_as_in_watch(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    (tmp_path / "events-rank0.jsonl").write_text("no event\n")
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: page.facts.get("errors"))
    [run] = page.facts["runs"]
    assert (
        page.facts["state"]
        == run["status"]
        == summary(tmp_path)["runs"][tmp_path.name]["status"]
        == "unreadable"
    )
    assert page.facts["progress"] == [None, None]


def test_the_text_beside_the_panel_names_runs_as_the_page_does(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    folders = [tmp_path, tmp_path / "previous-1"]
    for folder in folders:
        with RunLog(folder / "runs" / "fastest") as log:
            log.emit(RunEvent("start", 0, 0, 1.8e9, {}))
    panels.append(LivePanel(folders))
    assert "previous-1/fastest running at step 0" in repr(panels[0])
    assert " fastest running at step 0" in repr(panels[0])


def test_ranks_and_kinds_of_events_are_series_whose_seconds_count_from_the_first_event(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    for rank in range(2):
        with RunLog(tmp_path / "runs" / "budget", rank) as log:
            log.emit(RunEvent("start", 0, rank, 1.8e9, {"num_steps": 4}))
            log.emit(RunEvent("step", 1, rank, 1.8e9 + 0.25, {"loss": nan}))
            log.emit(RunEvent("step", 2, rank, 1.8e9 + 0.5, {"loss": 2.0, "step_s": 0.25}))
    with RunLog(tmp_path / "runs" / "mine") as log:
        log.write("device", -1, memory_bytes=5, memory_source="process RSS")
        log.write("eval", 2, loss=0.5)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: len(page.rows) == 4)
    assert set(page.rows) == {"r1.0.step", "r1.1.step", "r2.0.device", "r2.0.eval"}
    columns = page.rows["r1.1.step"][0]
    assert columns[TRACKS["step"].index("time_s")].tolist() == [0.25, 0.5]
    for key, expected in (("loss", [nan, 2.0]), ("step_s", [nan, 0.25]), ("peak_bytes", [nan, nan])):
        np.testing.assert_array_equal(columns[TRACKS["step"].index(key)], expected)
    mine, budget = sorted(page.facts["runs"], key=lambda run: len(run["ranks"]))
    assert (budget["name"], budget["ranks"]) == ("budget", [0, 1])
    assert budget["colours"] == [colours_of(["budget"], dark=dark)["budget"] for dark in (False, True)]
    assert (mine["name"], mine["ranks"], mine["memory_source"]) == ("mine", [0], "process RSS")
    assert page.facts["progress"][0] is None, "of one of the runs nobody knows how long it is"


def test_a_run_keeps_its_colour_and_dashes_when_another_of_its_name_begins(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    write(tmp_path / "one" / "random", 1, 2)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: page.facts.get("runs"))
    alone = page.facts["runs"][0]
    write(tmp_path / "other" / "random", 1, 2)
    page.until(lambda: len(page.facts["runs"]) == 2)
    first, second = page.facts["runs"]
    assert (first["colours"], first["dash"]) == (alone["colours"], alone["dash"])
    assert not {*first["colours"]} & {*second["colours"]}, "they cannot be told apart"


def test_a_run_that_is_cleared_stays_away_until_it_is_written_anew(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    write(tmp_path / "a", 1, 2)
    write(tmp_path / "b", 1, 2)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: len(page.facts.get("runs", ())) == 2)
    page.say("clear", run=page.facts["runs"][0]["id"])
    page.until(lambda: [run["name"] for run in page.facts["runs"]] == ["b"])
    write(tmp_path / "a", 3, 2)
    write(tmp_path / "b", 3, 2)
    page.until(lambda: len(page.losses("r2.0.step")) == 4)
    assert [run["name"] for run in page.facts["runs"]] == ["b"]
    (tmp_path / "a" / "events-rank0.jsonl").rename(tmp_path / "a" / "old.jsonl")
    write(tmp_path / "a", 1, 1)
    page.until(lambda: len(page.facts["runs"]) == 2)


def test_without_a_page_there_is_text_and_nothing_fails(tmp_path: Path, panels: list[LivePanel]) -> None:
    write(tmp_path, 1, 12)
    panels += [LivePanel(tmp_path), LivePanel(tmp_path / "nothing")]
    for panel, text in zip(panels, ("running at step 12", "waiting for the first event"), strict=True):
        formats, _ = DisplayFormatter().format(panel)
        assert text in formats["text/plain"]
        assert text in repr(panel)
        assert "application/vnd.jupyter.widget-view+json" in formats
    (tmp_path / "events-rank0.jsonl").write_text("no event\n")
    assert "DataError" in repr(panels[0])


def test_what_a_notebook_saves_of_a_panel_is_small(tmp_path: Path, panels: list[LivePanel]) -> None:
    write(tmp_path, 1, 20_000)
    panels.append(LivePanel(tmp_path))
    page = Page(panels[0])
    page.say("ready", have={})
    page.until(lambda: len(page.losses()) == 20_000)
    assert (STATIC / "live_panel.js").stat().st_size < 50_000
    assert len(json.dumps(panels[0].get_state())) < 100_000


def test_closing_ends_the_thread(tmp_path: Path) -> None:
    panel = LivePanel(tmp_path)
    page = Page(panel)
    page.say("ready", have={})
    page.take()
    assert page.facts["phase"] == f"waiting for the first event in {tmp_path} …"
    thread = panel._pump._thread
    panel.close()
    assert thread not in threading.enumerate()


@pytest.mark.parametrize("source", [[], 3, [3]])
def test_a_source_that_names_no_folder_is_refused(source: Any) -> None:
    with pytest.raises(OptionError, match="source must be folders, found"):
        LivePanel(source)


def test_a_panel_that_its_page_never_showed_ends_its_thread_unless_another_page_shows_it(
    tmp_path: Path, panels: list[LivePanel]
) -> None:
    panels += [LivePanel(tmp_path), LivePanel(tmp_path)]
    for panel in panels:
        panel.begin()
    pages = [Page(panel) for panel in panels]
    pages[1].say("ready", have={})
    threads = [panel._pump._thread for panel in panels]
    for page in pages:
        page.say("unseen")
    threads[0].join(PATIENCE_S)
    assert [thread.is_alive() for thread in threads] == [False, True]
