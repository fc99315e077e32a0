"""Whatever is written to a run's files reaches a view exactly once, in order, in float32, however it asks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mmlab.runs.events import RunEvent, RunLog
from mmlab.runs.feed import TRACKS, RunFeed, glance, run_folders

LOSS = TRACKS["step"].index("loss")
TIME = TRACKS["step"].index("time_s")


def write(folder: Path, num_steps: int, *, first: int = 1, rank: int = 0, time_s: float = 1.8e9) -> None:
    with RunLog(folder, rank) as log:
        for step in range(first, first + num_steps):
            log.emit(
                RunEvent("step", step, rank, time_s + step / 10, {"loss": 1 / step, "num_samples": step})
            )


def take(feed: RunFeed, have: dict[str, int], **options: int) -> dict[str, np.ndarray]:
    """What `rows` gives, with `have` brought up to date as a view does."""
    found = {}
    for rows in feed.rows(have, **options):
        assert rows.start == have.get(rows.series, 0)
        have[rows.series] = rows.start + rows.columns.shape[1]
        found[rows.series] = rows.columns
    return found


def test_every_row_is_given_once_while_the_run_grows(tmp_path: Path) -> None:
    feed, have, losses = RunFeed(tmp_path), {}, []
    for part in range(5):
        write(tmp_path, 7, first=1 + 7 * part)
        assert feed.poll()
        losses += take(feed, have)["r1.0.step"][LOSS].tolist()
        assert not feed.poll()
        assert not take(feed, have)
    assert losses == pytest.approx([1 / step for step in range(1, 36)], rel=1e-6)


def test_a_limit_on_numbers_leaves_the_rest_for_the_next_call(tmp_path: Path) -> None:
    write(tmp_path, 100)
    feed, have, calls = RunFeed(tmp_path), {}, 0
    feed.poll()
    while found := take(feed, have, max_numbers=30 * len(TRACKS["step"])):
        assert all(columns.size <= 30 * len(TRACKS["step"]) for columns in found.values())
        calls += 1
    assert calls == 4
    assert have == {"r1.0.step": 100}


def test_what_an_event_lacks_is_nan_and_seconds_count_from_the_first_event(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.emit(RunEvent("start", 0, 0, 1.8e9, {"num_steps": 4}))
        log.emit(RunEvent("step", 1, 0, 1.8e9 + 0.25, {"loss": math.nan}))
        log.emit(RunEvent("step", 2, 0, 1.8e9 + 0.5, {"loss": 2.0, "step_s": 0.25}))
    feed = RunFeed(tmp_path)
    feed.poll()
    columns = take(feed, {})["r1.0.step"]
    assert columns.dtype == np.float32
    assert columns[TIME].tolist() == [0.25, 0.5]
    assert np.isnan(columns[LOSS]).tolist() == [True, False]
    assert np.isnan(columns[TRACKS["step"].index("step_s")]).tolist() == [True, False]
    assert np.isnan(columns[TRACKS["step"].index("peak_bytes")]).all()
    share, left_s = feed.progress()
    assert (share, left_s) == (0.5, 0.5)


def test_progress_counts_what_batches_cost_where_the_events_tell_it(tmp_path: Path) -> None:
    for name, costs in (("a", (10.0, 30.0)), ("b", (20.0,))):
        with RunLog(tmp_path / name) as log:
            log.emit(RunEvent("start", 0, 0, 1.8e9, {"num_steps": 10, "planned_cost": 100.0}))
            for step, cost in enumerate(costs, start=1):
                log.emit(RunEvent("step", step, 0, 1.8e9 + 3 * step, {"predicted_cost": cost}))
    feed = RunFeed(tmp_path)
    feed.poll()
    assert feed.progress() == pytest.approx((0.3, 14.0))
    with RunLog(tmp_path / "c") as log:
        log.emit(RunEvent("start", 0, 0, 1.8e9, {"num_steps": 10}))
    feed.follow(tmp_path)  # look at once
    feed.poll()
    assert feed.progress()[0] == pytest.approx(3 / 30), "one run tells no cost, so all count steps"


def test_infinity_nothing_and_texts_are_rows_too(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=math.inf, lr=None, num_samples=3)
        log.write("step", 2, loss=-math.inf, lr=0.5, step_s=math.nan, num_samples=4)
    feed = RunFeed(tmp_path)
    feed.poll()
    rows = dict(zip(TRACKS["step"], take(feed, {})["r1.0.step"].tolist(), strict=True))
    assert rows["loss"] == [math.inf, -math.inf]
    assert rows["num_samples"] == [3, 4]
    assert math.isnan(rows["lr"][0])
    assert rows["lr"][1] == 0.5
    assert all(map(math.isnan, rows["step_s"]))


def test_ranks_tracks_and_runs_are_series_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", 3, rank=0)
    write(tmp_path / "runs" / "a", 3, rank=1)
    write(tmp_path / "runs" / "b", 2)
    with RunLog(tmp_path / "runs" / "b") as log:
        log.write("device", -1, memory_bytes=5, memory_source="process RSS")
        log.write("eval", 2, loss=0.5)
    feed = RunFeed(tmp_path)
    feed.poll()
    assert set(take(feed, {})) == {"r1.0.step", "r1.1.step", "r2.0.device", "r2.0.eval", "r2.0.step"}
    a, b = [run.facts() for run in feed.runs.values()]
    assert (a["name"], a["ranks"], b["name"], b["memory_source"]) == ("a", [0, 1], "b", "process RSS")


def test_a_source_is_a_run_a_comparison_its_runs_or_several(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / "comparison" / "runs" / name, 1)
    write(tmp_path / "alone", 1)
    both = [tmp_path / "comparison" / "runs" / name for name in ("one", "two")]
    assert run_folders(tmp_path / "alone") == [tmp_path / "alone"]
    assert run_folders(tmp_path / "comparison") == run_folders(tmp_path / "comparison" / "runs") == both
    assert run_folders([tmp_path / "alone", str(tmp_path / "comparison")]) == [tmp_path / "alone", *both]
    assert run_folders(None) == run_folders(tmp_path / "nothing") == []


def test_a_run_that_is_written_anew_is_another_run(tmp_path: Path) -> None:
    write(tmp_path, 50)
    feed, have = RunFeed(tmp_path), {}
    feed.poll()
    take(feed, have)
    (tmp_path / "events-rank0.jsonl").unlink()
    write(tmp_path, 3)
    assert feed.poll()
    feed.poll()
    assert {name: columns.shape[1] for name, columns in take(feed, have).items()} == {"r2.0.step": 3}
    assert [run.id for run in feed.runs.values()] == ["r2"]


def test_a_run_that_is_moved_away_is_dropped_and_a_cleared_one_stays_away(tmp_path: Path) -> None:
    write(tmp_path / "gone", 2)
    write(tmp_path / "cleared", 2)
    feed = RunFeed(tmp_path)
    feed.poll()
    (tmp_path / "gone").rename(tmp_path.parent / f"{tmp_path.name}-moved")
    assert feed.poll()
    feed.clear(next(run.id for run in feed.runs.values() if run.name == "cleared"))
    write(tmp_path / "cleared", 2, first=3)
    feed.follow(tmp_path)  # look at once
    feed.poll()
    assert not feed.runs
    (tmp_path / "cleared" / "events-rank0.jsonl").unlink()
    write(tmp_path / "cleared", 1, time_s=1.9e9)
    feed.follow(tmp_path)
    assert feed.poll()
    assert [run.name for run in feed.runs.values()] == ["cleared"]


def test_a_damaged_file_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    write(tmp_path / "good", 2)
    write(tmp_path / "bad", 2)
    with (tmp_path / "bad" / "events-rank0.jsonl").open("a") as file:
        file.write("no event\n")
    feed, have = RunFeed(tmp_path), {}
    feed.poll()
    [error] = feed.errors
    assert "is not an event" in error["text"]
    assert "DataError" in error["traceback"]
    take(feed, have)
    write(tmp_path / "good", 2, first=3)
    assert feed.poll()
    assert [columns.shape[1] for columns in take(feed, have).values()] == [2]
    assert len(feed.errors) == 1


def test_messages_of_a_run_are_kept_with_their_tracebacks(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("warning", 3, message="the loader is slow", source="loader")
        log.write("decision", 4, action="lower", reason="a step used more than was planned")
        log.write("end", 5, status="failed", message="boom", traceback="Traceback ...")
    feed = RunFeed(tmp_path)
    feed.poll()
    [run] = feed.runs.values()
    assert [(note["kind"], note["step"]) for note in run.notes] == [
        ("warning", 3),
        ("decision", 4),
        ("end", 5),
    ]
    assert [note["text"] for note in run.notes][1:] == ["a step used more than was planned", "boom"]
    assert run.notes[-1]["traceback"] == "Traceback ..."
    assert feed.status() == "failed"


def test_the_status_of_several_runs_is_running_until_all_have_ended(tmp_path: Path) -> None:
    assert RunFeed(tmp_path).status() == "waiting"
    for name in ("a", "b"):
        write(tmp_path / name, 1)
    feed = RunFeed(tmp_path)
    for name, status, together in (("a", "done", "running"), ("b", "stopped", "stopped")):
        with RunLog(tmp_path / name) as log:
            log.write("end", 1, status=status)
        feed.poll()
        assert feed.status() == together


def test_a_glance_reads_the_end_of_a_long_file(tmp_path: Path) -> None:
    write(tmp_path, 2000)
    assert (tmp_path / "events-rank0.jsonl").stat().st_size > 65536
    assert glance(tmp_path) == "running at step 2000"
