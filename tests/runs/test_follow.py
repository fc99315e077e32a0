"""Whatever is written to a run's files reaches a view exactly once, in order, however it asks; and what runs come to."""

from __future__ import annotations

import math
import resource
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from mmlab.errors import DataError, OptionError
from mmlab.machine import this_process
from mmlab.runs.events import RunEvent, RunLog
from mmlab.runs.figures import colours_of, save_figure, to_bytes
from mmlab.runs.follow import Runs, RunState, overall_status, run_files, summary_line
from mmlab.runs.summaries import draw_runs, progress_of, summarize, verdict_of
from mmlab.schedule.schedulers import SCHEDULERS


def write(folder: Path, num_steps: int, *, first: int = 1, rank: int = 0, time_s: float = 1.8e9) -> None:
    with RunLog(folder, rank) as log:
        for step in range(first, first + num_steps):
            log.emit(
                RunEvent("step", step, rank, time_s + step / 10, {"loss": 1 / step, "num_samples": step})
            )


def the_run(runs: Runs) -> RunState:
    [run] = runs.states.values()
    return run


def test_every_row_is_there_once_while_the_run_grows(tmp_path: Path) -> None:
    runs, losses = Runs(tmp_path), []
    for part in range(5):
        write(tmp_path, 7, first=1 + 7 * part)
        assert runs.poll()
        losses += the_run(runs).column("loss", start=len(losses)).tolist()
        assert not runs.poll()
    assert losses == [1 / step for step in range(1, 36)]
    assert the_run(runs).rows(["loss"], "step", 0, 3, 5).tolist() == [[1 / 4, 1 / 5]]


@pytest.mark.parametrize("num_bytes", [1, 300, 100_000])
def test_a_long_file_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr("mmlab.runs.follow.READ_BYTES", num_bytes)
    with RunLog(tmp_path) as log:
        for step in range(40):
            log.write("step", step, loss=float(step))
            log.write("warning", step, message="w" * 10 * step, source="test")  # at times longer than a part
        log._file.write(b'{"kind": "st')
    run = RunState(tmp_path)
    assert (run.poll(), run.poll()) == (80, 0)
    assert run.column("loss").tolist() == list(range(40))
    assert run.messages()[-1] == "w" * 390


def test_infinity_nothing_and_texts_are_rows_too(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=math.inf, lr=None, num_samples=3)
        log.write("step", 2, loss=-math.inf, lr=0.5, step_s=math.nan, num_samples=4)
    run = RunState(tmp_path)
    assert run.poll() == 2
    assert run.column("loss").tolist() == [math.inf, -math.inf]
    assert run.column("num_samples").tolist() == [3, 4]
    np.testing.assert_array_equal(run.column("lr"), [math.nan, 0.5])
    assert np.isnan(run.column("step_s")).all()
    assert np.isnan(run.column_or_nan("peak_bytes")).tolist() == [True, True]


def test_a_source_is_a_run_a_comparison_its_runs_or_several(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / "comparison" / "runs" / name, 1)
        write(tmp_path / "comparison" / "previous-1" / "runs" / name, 1)
    write(tmp_path / "alone", 1)
    both = [tmp_path / "comparison" / "runs" / name for name in ("one", "two")]
    for source, folders in (
        (tmp_path / "alone", [tmp_path / "alone"]),
        (tmp_path / "comparison", both),
        (tmp_path / "comparison" / "runs", both),
        ([tmp_path / "alone", str(tmp_path / "comparison")], [tmp_path / "alone", *both]),
        (tmp_path / "nothing", []),
    ):
        assert list(run_files(source)) == folders
    runs = Runs(tmp_path)
    runs.poll()
    assert set(runs.states) == {"alone", "comparison/runs/one", "comparison/runs/two"}


def test_only_numbered_folders_hold_what_was_moved_aside(tmp_path: Path) -> None:
    for name in ("previous-best", "previous-1"):
        RunLog(tmp_path / name).close()
    assert [folder.name for folder in run_files(tmp_path)] == ["previous-best"]


def test_runs_of_one_name_are_told_apart_and_stand_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for index, name in enumerate(("larger/runs/budget", "small/runs/random", "small/runs/budget")):
        write(tmp_path / name, 1, time_s=1.8e9 + index)
    runs = Runs([tmp_path / "small", tmp_path / "larger"])
    runs.poll()
    assert [run.name for run in runs.states.values()] == ["larger/budget", "random", "small/budget"]


def test_runs_of_comparisons_of_one_name_are_told_apart_by_more_of_their_paths(tmp_path: Path) -> None:
    for name in ("a/lab", "b/lab", "b/lab/previous-1", "a/lab/previous-1", "a/other"):
        write(tmp_path / name / "runs" / "random", 1)
    write(tmp_path / "a" / "lab" / "runs" / "budget", 1)
    runs = Runs(
        [tmp_path / name for name in ("a/lab", "b/lab", "a/other", "a/lab/previous-1", "b/lab/previous-1")]
    )
    runs.poll()
    names = {"a/lab/random", "b/lab/random", "other/random", "budget"}
    assert {run.name for run in runs.states.values()} == names | {
        "a/lab/previous-1/random",
        "b/lab/previous-1/random",
    }


def test_a_run_that_is_written_anew_is_another_run(tmp_path: Path) -> None:
    write(tmp_path, 50)
    runs = Runs(tmp_path)
    runs.poll()
    (tmp_path / "events-rank0.jsonl").rename(tmp_path / "old.jsonl")
    write(tmp_path, 3)
    assert runs.poll()
    runs.poll()
    assert (the_run(runs).id, the_run(runs).count()) == ("r2", 3)


def test_a_new_file_that_was_given_the_old_ones_inode_is_another_run(tmp_path: Path) -> None:
    write(tmp_path / "run", 3)
    runs = Runs(tmp_path / "run")
    runs.poll()
    file = tmp_path / "run" / "events-rank0.jsonl"
    write(tmp_path / "other", 9, time_s=1.9e9)
    inode = file.stat().st_ino
    file.write_bytes(
        (tmp_path / "other" / "events-rank0.jsonl").read_bytes()
    )  # in place, as a reused inode looks
    assert file.stat().st_ino == inode
    runs.poll()
    assert the_run(runs).count("step") == 9


def test_a_run_that_is_moved_aside_is_dropped(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 2)
    runs = Runs(tmp_path)
    runs.poll()
    (tmp_path / "previous-1").mkdir()
    (tmp_path / "a").rename(tmp_path / "previous-1" / "a")
    assert runs.poll()
    assert list(runs.states) == ["b"]


def test_a_damaged_file_is_reported_once_until_it_is_mended_and_the_others_go_on(tmp_path: Path) -> None:
    write(tmp_path / "good", 2)
    write(tmp_path / "bad", 2)
    with (tmp_path / "bad" / "events-rank0.jsonl").open("a") as file:
        file.write("no event\n")
    runs = Runs(tmp_path)
    runs.poll()
    write(tmp_path / "good", 2, first=3)
    assert runs.poll()
    assert runs.states["good"].count() == 4
    [error] = runs.errors
    assert "is not an event" in error["text"]
    assert "DataError" in error["traceback"]
    with pytest.raises(DataError, match="is not an event"):
        RunState(tmp_path / "bad").poll()
    path = tmp_path / "bad" / "events-rank0.jsonl"
    write(tmp_path / "bad", 2, first=3)
    assert not runs.poll()
    path.write_bytes(path.read_bytes().replace(b"no event\n", b""))  # as the message says
    assert runs.poll()
    assert runs.states["bad"].count() == 4
    assert not runs.errors


def test_notes_of_a_run_are_kept_with_their_tracebacks(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("warning", 3, message="the loader is slow", source="loader")
        log.write("decision", 4, action="lower", reason="a step used more than was planned")
        log.write("end", 5, status="failed", message="boom", traceback="Traceback ...")
    runs = Runs(tmp_path)
    runs.poll()
    notes = the_run(runs).notes
    assert [(note.kind, note.step) for note in notes] == [("warning", 3), ("decision", 4), ("end", 5)]
    assert notes[-1].values["traceback"] == "Traceback ..."
    assert overall_status(runs.states.values()) == "failed"


def test_a_rank_that_a_later_start_did_without_does_not_set_the_status(tmp_path: Path) -> None:
    for rank, last in ((1, None), (0, "done")):
        with RunLog(tmp_path, rank=rank) as log:
            log.write("start", 0)
            log.write("end", 1, status="stopped")
            if last:
                log.write("start", 1)
                log.write("end", 2, status=last)
    state = RunState(tmp_path)
    state.poll()
    assert state.status == "done"


def test_a_clock_that_is_set_back_hides_no_end_and_no_start() -> None:
    state = RunState()
    for kind, time_s, status in (
        ("start", 9e3, "running"),
        ("end", 5e3, "stopped"),
        ("start", 1e3, "running"),
    ):
        state.apply([RunEvent(kind, 1, 0, time_s, {"status": status})])
        assert state.status == status


def test_an_epoch_that_a_resumed_run_repeats_counts_once() -> None:
    state = RunState()
    for epoch, step_s in ((0, 1.0), (0, 1.0), (1, 5.0)):  # the last epoch has only begun
        values = {"epoch": epoch, "step_s": step_s, "num_samples": 8, "data_wait_s": step_s - 0.75}
        steps = [RunEvent("step", epoch, 0, 0.0, values)] * 4
        state.apply(steps + [RunEvent("epoch", epoch, 0, 0.0, {"epoch": epoch})] * (epoch == 0))
    found = summarize(state)
    assert (found["samples_per_s"], found["data_wait_ratio"]) == (8, 0.25)


def test_the_status_of_several_runs_is_running_until_all_have_ended(tmp_path: Path) -> None:
    assert overall_status([]) == "waiting"
    for name in ("a", "b"):
        write(tmp_path / name, 1)
    runs = Runs(tmp_path)
    for name, kind, values, together in (
        ("a", "pause", {}, "paused"),
        ("a", "resume", {}, "running"),
        ("a", "end", {"status": "done"}, "running"),
        ("b", "end", {"status": "stopped"}, "stopped"),
    ):
        with RunLog(tmp_path / name) as log:
            log.write(kind, 1, **values)
        runs.poll()
        assert overall_status(runs.states.values()) == together


def test_a_pause_in_which_a_run_was_killed_ends_when_it_goes_on() -> None:
    run, use = RunState(), {"utilization_ratio": 0.5}
    kinds = ("start", "pause", "start", "pause", "resume", "device", "device")
    run.apply([RunEvent(kind, 0, 0, time_s, use) for time_s, kind in enumerate(kinds)])
    assert run.pauses() == [(1.0, 2.0), (3.0, 4.0)]
    assert run.utilization().tolist() == [0.5, 0.5]


def test_a_run_whose_process_is_gone_was_killed_until_it_goes_on() -> None:
    run = RunState()
    gone = {**this_process(), "process_start_s": 0.5}
    run.apply([RunEvent("start", 0, 0, 1.0, gone)])
    assert run.status == "killed"
    run.apply([RunEvent("start", 0, 0, 2.0, this_process())])
    assert run.status == "running"
    run.apply([RunEvent("start", 0, 0, 3.0, {**gone, "host_name": "elsewhere"})])
    assert run.status == "running", "of another machine nobody here can tell"


def test_one_line_is_read_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    write(tmp_path, 2000)
    assert (tmp_path / "events-rank0.jsonl").stat().st_size > 65536
    assert summary_line(tmp_path) == "running at step 2000"


@pytest.mark.parametrize(("starts", "status"), [([0.5], "killed"), ([0.5, None], "running")])
def test_one_line_tells_a_killed_run_from_a_running_one(
    tmp_path: Path, starts: list[float | None], status: str
) -> None:
    for process_start_s in starts:
        changed = {} if process_start_s is None else {"process_start_s": process_start_s}
        with RunLog(tmp_path) as log:
            log.write("start", 0, **{**this_process(), **changed})
            for step in range(1, 2001):
                log.write("step", step, loss=1.0)
    assert (tmp_path / "events-rank0.jsonl").stat().st_size > 65536
    assert summary_line(tmp_path) == f"{status} at step 2000"


def test_each_share_of_padding_weighs_by_what_it_is_a_share_of() -> None:
    run = RunState()
    texts = {"padded_tokens": 1000, "padded_patches": 10}
    images = {"padded_tokens": 10, "padded_patches": 1000}
    for step, sizes, waste in ((1, texts, 0.5), (2, images, 0.1)):
        shares = dict.fromkeys(("text_waste", "image_waste", "combined_waste"), waste)
        run.apply([RunEvent("step", step, 0, float(step), {**sizes, **shares})])
    found = summarize(run)
    assert found["text_waste"] == pytest.approx((0.5 * 1000 + 0.1 * 10) / 1010)
    assert found["image_waste"] == pytest.approx((0.5 * 10 + 0.1 * 1000) / 1010)
    assert found["combined_waste"] == pytest.approx((0.5 * 1010 + 0.1 * 1010) / 2020)


def test_the_loss_of_a_run_is_the_last_one_known() -> None:
    run = RunState()
    run.apply(
        [RunEvent("step", step, 0, step, {"loss": loss}) for step, loss in ((1, 3.0), (2, 2.0), (3, None))]
    )
    assert summarize(run)["loss"] == 2.0


def test_a_scheduler_has_one_colour_in_every_picture() -> None:
    found = colours_of([*SCHEDULERS, "fastest"])
    assert len(set(found.values())) == len(found), "two have one colour"
    for names in (["mine", "fastest", "random"], ["random", "mine"], ["fastest", "random", "mine"]):
        for dark in (False, True):
            here = colours_of(names, dark=dark)
            assert here == {name: colours_of([name], dark=dark)[name] for name in names}, "the order counts"
    runs = {}
    for name in ("budget", "random"):
        runs[name] = RunState()
        runs[name].apply([RunEvent("step", 1, 0, 1.0, {"loss": 1.0, "num_samples": 1})])
    lines = draw_runs(runs).axes[0].lines
    assert {line.get_label(): line.get_color() for line in lines[1::2]} == {
        name: found[name] for name in runs
    }
    assert [line.get_color() for line in lines[::2]] == [found[name] for name in runs], (
        "each step, pale behind"
    )


def test_a_small_batch_hardly_moves_the_line_of_the_loss() -> None:
    run = RunState()
    for step in range(40):
        run.apply([RunEvent("step", step, 0, 1.0, {"loss": 2.0, "num_samples": 32})])
    run.apply([RunEvent("step", 40, 0, 1.0, {"loss": 0.0, "num_samples": 1})])
    each, smooth = draw_runs({"run": run}).axes[0].lines
    assert (each.get_ydata()[-1], smooth.get_ydata()[0]) == (0, 2)
    assert 1.9 < smooth.get_ydata()[-1] < 2


def test_a_picture_of_runs_has_one_unit_on_each_axis_whatever_their_plans_cost() -> None:
    runs = {}
    sizes = {"num_samples": 2, "padded_tokens": 20, "padded_patches": 4}
    for name, cost in (("random", {}), ("fastest", {"predicted_cost": 0.2, "predicted_bytes": 2**20})):
        runs[name] = RunState()
        runs[name].apply([RunEvent("step", 1, 0, 1.0, {**sizes, **cost})])
        runs[name].apply([RunEvent("device", -1, 0, 1.0, {"memory_bytes": 2**30})])
    _, tokens, _, memory = draw_runs(runs, pale=["random"]).axes
    drawn = {str(line.get_label()): (line.get_ydata()[0], line.get_alpha()) for line in tokens.lines}
    assert drawn == {"random": (24, 0.25), "fastest": (24, 1)}
    assert [line.get_ydata()[0] for line in memory.lines] == [1], "what a process holds would squash it"


def test_of_a_long_run_few_points_are_drawn_and_every_peak() -> None:
    run, values = RunState(), {"num_samples": 1, "loss": 1.0, "step_s": 1.0, "padded_patches": 0}
    tokens = [1 + (step == 12_345) for step in range(30_000)]
    run.apply(RunEvent("step", n, 0, n, {**values, "padded_tokens": one}) for n, one in enumerate(tokens))
    figure = draw_runs({"long": run})
    drawn = [line.get_ydata() for axis in figure.axes for line in axis.lines]
    assert len(drawn) >= 3
    assert all(3000 < len(values) <= 4001 for values in drawn)
    assert max(figure.axes[1].lines[0].get_ydata()) == 2


def test_a_name_is_drawn_as_it_is_written() -> None:
    run = RunState()
    run.apply([RunEvent("step", 1, 0, 1.0, {"loss": 1.0, "num_samples": 1})])
    figure = draw_runs({r"a$\frac{b$": run, "_c": run})
    assert to_bytes(figure).startswith(b"\x89PNG"), "dollar signs enclose no formula"
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == [r"a\$\frac{b\$", "_c"]


def test_polling_at_any_moment_gives_what_reading_at_the_end_gives(tmp_path: Path) -> None:
    followed = RunState(tmp_path / "run")
    assert (followed.poll(), followed.status) == (0, "waiting")
    num_seen = 0
    with RunLog(tmp_path / "run") as log, RunLog(tmp_path / "run", rank=1) as other:
        log.write("start", 0, scheduler="budget")
        for step in range(1, 30):
            log.write("step", step, loss=1 / step, **({"lr": 0.1} if step > 10 else {}))
            other.write("step", step, loss=math.inf, skipped=step % 2 == 0)
            if step % 7 == 0:
                num_seen += followed.poll()
        log.write("warning", 29, message="look", source="test")
        log.write("end", 29, status="stopped")
    num_seen += followed.poll()
    whole = RunState(tmp_path / "run")
    assert whole.poll() == num_seen == 61
    for state in (followed, whole):
        assert state.status == "stopped"
        assert state.ranks() == [0, 1]
        assert state.latest("start") == {"scheduler": "budget"}
        assert state.latest("step", rank=1) == {"loss": math.inf, "skipped": False}
        assert state.messages() == ["look"]
        np.testing.assert_array_equal(state.column("loss"), 1 / np.arange(1, 30))
        np.testing.assert_array_equal(state.column("lr"), [math.nan] * 10 + [0.1] * 19)
        np.testing.assert_array_equal(state.column("step", rank=1, start=25), [26, 27, 28, 29])
        np.testing.assert_array_equal(state.column("skipped", rank=1)[:3], [0, 1, 0])


def test_the_state_follows_a_run_that_ends_and_goes_on() -> None:
    state = RunState()
    state.apply([RunEvent("start", 0, 0, 1.0, {}), RunEvent("end", 5, 0, 2.0, {"status": "failed"})])
    state.apply([RunEvent("device", -1, 0, 2.1, {"memory_bytes": 1})])
    assert state.status == "failed", "the monitor's last sample does not revive a run"
    state.apply([RunEvent("start", 5, 0, 3.0, {})])
    assert state.status == "running"


def test_a_key_that_is_not_there_is_an_error_once_there_are_events() -> None:
    state = RunState()
    assert state.column("loss").shape == (0,)
    state.apply([RunEvent("step", 1, 0, 1.0, {"loss": 1.0, "memory_source": "NVML"})])
    with pytest.raises(OptionError, match="unknown key of step events 'los'; did you mean 'loss'"):
        state.column("los")
    with pytest.raises(OptionError, match="unknown key of step events 'memory_source'"):
        state.column("memory_source")


def run_of(costs: list[float], seconds: list[float], *, planned: float, **start: object) -> RunState:
    state = RunState()
    state.apply([RunEvent("start", 0, 0, 0.0, {"planned_cost": planned, "num_steps": 100, **start})])
    for step, (cost, step_s) in enumerate(zip(costs, seconds, strict=True), start=1):
        state.apply([RunEvent("step", step, 0, float(step), {"predicted_cost": cost, "step_s": step_s})])
    return state


def test_what_is_left_follows_from_costs_and_not_from_steps() -> None:
    dear_first = run_of([1, 1, 40, 40], [1, 1, 4, 4], planned=100)
    found = progress_of([dear_first])
    assert found.done_ratio == pytest.approx(0.82)
    assert found.left_s == pytest.approx(18 / 10)
    both = progress_of([dear_first, run_of([], [], planned=50)])
    assert both.done_ratio == pytest.approx(82 / 150)
    assert both.left_s == pytest.approx(68 / 10), "a run that has not begun is taken to be as fast"
    evaluated = run_of([10, 10, 10, 10, 10], [1] * 5, planned=100, num_epochs=2)
    evaluated.apply([RunEvent("epoch", 5, 0, 6.0, {}), RunEvent("eval", 5, 0, 9.0, {"eval_s": 3.0})])
    assert progress_of([evaluated]).left_s == pytest.approx(5 + 3)
    evaluated.apply([RunEvent("eval", 5, 0, 9.0, {"eval_s": 3.0})])
    assert progress_of([evaluated]).left_s == pytest.approx(5 + 2 * 3), "as many in each epoch as so far"


def test_without_costs_steps_count_and_without_a_plan_nothing_is_promised() -> None:
    state = RunState()
    state.apply([RunEvent("start", 5, 0, 0.0, {"num_steps": 10})])
    assert progress_of([state]).done_ratio == 0
    assert isnan(progress_of([state]).left_s)
    state.apply([RunEvent("step", step, 0, 0.0, {"step_s": 2.0}) for step in (6, 7, 8)])
    assert progress_of([state]).left_s == pytest.approx(4.0)
    assert isnan(progress_of([]).done_ratio)
    assert isnan(progress_of([RunState()]).done_ratio)


def test_steps_that_a_killed_run_lost_and_a_resumed_one_repeats_count_once() -> None:
    def step(number: int) -> RunEvent:
        values = {"num_samples": 4, "predicted_cost": 10.0, "step_s": 1.0, "peak_bytes": 9}
        # more padding in each step: a lost one that counted would show
        values |= {"padded_tokens": 1, "padded_patches": 1, "combined_waste": number / 10, "loss": 1.0}
        return RunEvent("step", number, 0, float(number), values)

    def figures() -> tuple[int, int, float]:
        found = summarize(run)
        assert found["peak_steps"] == found["steps"]
        assert found["combined_waste"] == pytest.approx((found["steps"] + 1) / 20)
        assert draw_runs({"run": run}).axes[0].lines[0].get_xdata()[-1] == found["samples"]
        return found["steps"], found["samples"], progress_of([run]).done_ratio

    plan = {"planned_cost": 100.0, "num_steps": 10}
    run = RunState()
    run.apply([RunEvent("start", 0, 0, 0.0, plan), *map(step, range(1, 8))])
    assert figures() == (7, 28, 0.7)
    rest = {**plan, "planned_cost": 70.0}
    run.apply([RunEvent("start", 3, 0, 8.0, rest), step(4)])  # from the checkpoint after the third step
    assert figures() == (4, 16, 0.4)
    run.apply(map(step, range(5, 10)))
    assert figures() == (9, 36, 0.9)
    figure = draw_runs({f"previous-{number}/length_grouped": run for number in range(6)})
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x0 >= 0, "the names of six earlier runs fit below the figure"


def test_the_verdict_ranks_runs_by_the_epochs_that_both_have_finished() -> None:
    """The whole machine is slow in the second epoch, which only one of the runs has had."""
    runs = [RunState("random"), RunState("budget")]
    for run, step_times in zip(runs, ((1.0, 3.0), (1.1,)), strict=True):
        for epoch, step_s in enumerate(step_times):
            values = {"epoch": epoch, "step_s": step_s, "num_samples": 8}
            run.apply([RunEvent("step", 20 * epoch + step, 0, 0.0, values) for step in range(20)])
            run.apply([RunEvent("epoch", 20 * epoch + 19, 0, 0.0, {"epoch": epoch})])
    assert verdict_of(runs) == "random: +10 % samples/s over budget in one epoch; its noise is not known yet"


def test_no_gain_has_no_sign_of_a_loss() -> None:
    runs = [RunState("random"), RunState("budget")]
    for run, step_times in zip(runs, ((1.0, 1.0), (1.001, 0.6)), strict=True):
        for epoch, step_s in enumerate(step_times):
            values = {"epoch": epoch, "step_s": step_s, "num_samples": 8}
            run.apply([RunEvent("step", 20 * epoch + step, 0, 0.0, values) for step in range(20)])
            run.apply([RunEvent("epoch", 20 * epoch + 19, 0, 0.0, {"epoch": epoch})])
    assert "budget over random: +0 to +67 % in 2 paired epochs" in verdict_of(runs)


@pytest.mark.parametrize(
    ("wastes", "said"),
    [((0.32, 0.02), "padding 2 → 32 %"), ((0.03, 0.02), "budget pads 2.0%: little to gain here")],
)
def test_where_the_fastest_run_pads_most_there_is_much_to_gain(
    wastes: tuple[float, float], said: str
) -> None:
    runs = [RunState("random"), RunState("budget")]
    for run, step_s, waste in zip(runs, (1.0, 1.5), wastes, strict=True):
        values = {"epoch": 0, "step_s": step_s, "num_samples": 8, "combined_waste": waste}
        values |= {"padded_tokens": 80, "padded_patches": 20, "text_waste": waste, "image_waste": waste}
        run.apply([RunEvent("step", step, 0, 0.0, values) for step in range(20)])
        run.apply([RunEvent("epoch", 19, 0, 0.0, {"epoch": 0})])
    assert verdict_of(runs).split("; ")[2] == said


def test_a_figure_that_cannot_be_written_leaves_the_earlier_file(tmp_path: Path) -> None:
    path, limits = tmp_path / "figure.svg", resource.getrlimit(resource.RLIMIT_FSIZE)
    save_figure(draw_runs({}), path)
    earlier = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # like a full disk
    try:
        with pytest.raises(OSError, match=r"too large.*figure\.svg"):
            save_figure(draw_runs({}), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("figure.svg", earlier)]
