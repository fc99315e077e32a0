"""A run is paused, resumed and stopped from outside, on every rank at the same step; a pause is in no figure."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mmlab.errors import OptionError
from mmlab.runs.control import CONTROL, Control, send
from mmlab.runs.events import RunEvent, read_events
from mmlab.runs.trackers import current_events
from tests.comparison.test_training import CONFIG
from tests.ranks import run_ranks
from tests.runs.steered_while_training import steer_both


def test_the_latest_command_holds(tmp_path: Path) -> None:
    control = Control(tmp_path)
    assert control.wanted == "resume"
    for command in ("pause", "resume", "pause", "stop", "resume"):
        send(tmp_path, command)
        assert control.wanted == command
    assert [path.name for path in tmp_path.iterdir()] == [CONTROL]


def test_a_command_to_an_earlier_run_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(tmp_path, "stop")
    control = Control(tmp_path)
    assert not control.wait_if_paused_or_stop()
    assert Control(tmp_path, obey_earlier=True).wait_if_paused_or_stop(), "given after the run was asked for"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    send(tmp_path, "stop")
    assert control.wait_if_paused_or_stop(), "the clock was set back"


@pytest.mark.parametrize("junk", ["", "{", "[]", "3", '{"command": 3}', '{"command": "halt"}'])
def test_a_file_that_is_not_a_command_changes_nothing(tmp_path: Path, junk: str) -> None:
    control = Control(tmp_path)
    (tmp_path / CONTROL).write_text(junk)
    assert control.wanted == "resume"
    send(tmp_path, "pause")
    assert control.wanted == "pause"
    (tmp_path / CONTROL).write_text(junk)
    assert control.wanted == "pause"


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown command to a run 'puase'; did you mean 'pause'"):
        send(tmp_path, "puase")
    with pytest.raises(FileNotFoundError):
        send(tmp_path / "none", "pause")


def test_a_paused_run_waits_and_tells_for_how_long(tmp_path: Path) -> None:
    control, told = Control(tmp_path), []
    send(tmp_path, "pause")
    threading.Timer(0.3, send, (tmp_path, "resume")).start()
    started = time.perf_counter()
    assert not control.wait_if_paused_or_stop(emit=lambda kind, values: told.append((kind, dict(values))))
    assert time.perf_counter() - started >= control.paused_s > 0.2
    assert told == [("pause", {}), ("resume", {"paused_s": control.paused_s})]


def test_a_paused_run_can_be_stopped_by_the_file_or_otherwise(tmp_path: Path) -> None:
    send(tmp_path, "pause")
    control, asked = Control(tmp_path, obey_earlier=True), threading.Event()
    threading.Timer(0.2, asked.set).start()
    assert control.wait_if_paused_or_stop(asked.is_set)
    assert control.stopped
    threading.Timer(0.2, send, (tmp_path, "stop")).start()
    assert control.wait_if_paused_or_stop()


@pytest.fixture(scope="module")
def all_steered(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Runs of one and of two ranks, trained at the same time, and what was seen of them."""
    runs = tmp_path_factory.mktemp("steered")
    config = runs / "steered.toml"
    config.write_text(CONFIG.format(name="steered", scenes=scenes))
    return runs, run_ranks(steer_both, 1, config, runs, joins=False)[0]


@pytest.fixture(params=[1, 2], ids=["one process", "two ranks"])
def steered(request: pytest.FixtureRequest, all_steered: tuple[Path, dict]) -> tuple[Path, dict]:
    """A run that was paused, resumed, stopped and resumed, beside one that was not; and what was seen of it."""
    runs, seen = all_steered
    return runs / str(request.param), seen[request.param]


def test_nothing_happens_during_a_pause_and_every_rank_ends_cleanly(steered: tuple[Path, dict]) -> None:
    _, seen = steered
    assert seen["steps"] == seen["later"]
    assert len(set(seen["steps"])) == 1, "ranks paused at different steps"
    assert {code for name in ("whole", "stopped", "resumed") for code in seen[name]} == {0}


def attempt(runs: Path, rank: int) -> list[RunEvent]:
    """The events of the run that was paused and stopped, without those of the one that went on from there."""
    events, _ = read_events(runs / "steered" / f"events-rank{rank}.jsonl")
    starts = [index for index, event in enumerate(events) if event.kind == "start"]
    return events[: starts[1]]


def test_a_pause_is_in_no_steps_time(steered: tuple[Path, dict]) -> None:
    runs, seen = steered
    for rank in range(len(seen["steps"])):
        events = attempt(runs, rank)
        end = events[-1].values
        steps = [event.values for event in events if event.kind == "step"]
        assert end["paused_s"] >= 0.5
        assert sum(step["step_s"] for step in steps) + end["paused_s"] <= end["run_s"]
        assert all(step["data_wait_s"] <= step["step_s"] for step in steps)


def test_ranks_pause_and_stop_at_the_same_step(steered: tuple[Path, dict]) -> None:
    runs, seen = steered
    places = [
        [
            (event.kind, event.step)
            for event in attempt(runs, rank)
            if event.kind in ("pause", "resume", "end")
        ]
        for rank in range(len(seen["steps"]))
    ]
    assert [kind for kind, _ in places[0]] == ["pause", "resume", "end"]
    assert all(place == places[0] for place in places)
    assert attempt(runs, 0)[-1].values["status"] == "stopped"


def test_a_stopped_run_goes_on_to_the_same_end(steered: tuple[Path, dict]) -> None:
    runs, _ = steered
    losses = {}
    for name in ("whole", "steered"):
        events, _ = read_events(runs / name / "events-rank0.jsonl")
        losses[name] = [
            (event.step, event.values["loss"]) for event in current_events(events) if event.kind == "step"
        ]
    assert losses["whole"] == losses["steered"]
