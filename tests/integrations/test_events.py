"""Events of other trainers' runs: every step, its loss, its batch as planned, memory; pause, stop and failure."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from mmlab.errors import OptionError
from mmlab.integrations import PlannedSampler, RunWriter, TrainerEvents, sample_sizes
from mmlab.runs import RunState, read_events
from mmlab.runs.control import send
from mmlab.runs.folders import exclusive_folder
from mmlab.runs.summaries import summarize
from mmlab.schedule import MaxPolynomial, make_scheduler
from tests.integrations.test_trainer import make
from tests.integrations.tiny import LENGTHS, Pairs, budget, collate, flat, sizes

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves


def bytes_of(rows: float = 100.0) -> MaxPolynomial:
    return MaxPolynomial([[1e3, rows]], [(0, 0, 0), (1, 1, 0)], unit="bytes")


def state_of(folder: Path) -> RunState:
    state = RunState(folder)
    state.poll()
    return state


class SlowDisk(TrainerCallback):
    def on_save(self, *_: Any, **__: Any) -> None:
        time.sleep(0.5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainers_run_tells_each_steps_loss_batch_and_memory(tmp_path: Path, accumulation: int) -> None:
    trainer = make(
        tmp_path,
        num_train_epochs=2,
        gradient_accumulation_steps=accumulation,
        eval_strategy="epoch",
        save_strategy="epoch",
        callbacks=[SlowDisk(), TrainerEvents(memory=bytes_of(), live=True)],
        eval_dataset=Pairs(),
    )
    trainer.train()
    state = state_of(tmp_path)
    assert state.status == "done"
    assert state.count("step") == trainer.state.global_step
    assert state.count("eval") == 2
    losses = [found["loss"] for found in trainer.state.log_history if "loss" in found]
    assert state.column("loss").tolist() == pytest.approx(losses)
    num = len(trainer.planned)
    batches = trainer.model.seen
    windows = [
        flat(batches[epoch * num + start : epoch * num + min(num, start + accumulation)])
        for epoch in range(2)
        for start in range(0, num, accumulation)
    ]
    trained = [len(window) for window in windows]
    longest = [max(LENGTHS[row] for row in window) for window in windows]
    assert state.column("num_samples").tolist() == trained
    assert state.column("num_tokens").tolist() == longest
    assert set(state.column("epoch").tolist()) == {0.0, 1.0}
    assert (state.column("peak_bytes") > 0).all()
    assert (state.column("predicted_bytes") > 1e3).all()
    assert state.latest("step")["memory_source"] == "live tensors"
    assert (state.column("step_s") >= state.column("data_wait_s")).all()
    assert state.column("data_wait_s").max() < 0.5, "saving is no waiting for data"
    row = summarize(state)
    assert row["planned_steps"] == row["steps"]
    assert 0 < row["text_waste"] < 1


def test_the_padding_that_is_told_is_that_of_the_batches(tmp_path: Path) -> None:
    sampler = PlannedSampler(sizes(), budget())
    with RunWriter(tmp_path, sampler=sampler) as run:
        for batch in DataLoader(Pairs(), batch_sampler=sampler, collate_fn=collate):
            run.begin_step()
            run.step(loss=1.0, user_waste=1 - batch["attention_mask"].float().mean().item())
    state = state_of(tmp_path)
    assert state.column("text_waste").tolist() == pytest.approx(state.column("user_waste").tolist(), abs=1e-6)
    assert state.column("image_waste").max() == 0


def test_a_trainer_that_resumes_goes_on_in_its_file(tmp_path: Path) -> None:
    stop = 5
    make(
        tmp_path, num_train_epochs=1, max_steps=stop, save_steps=stop, save_strategy="steps", events=True
    ).train()
    second = make(tmp_path, num_train_epochs=1, events=True)
    second.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{stop}")
    state = state_of(tmp_path)
    assert state.column("step").tolist() == list(range(1, second.state.max_steps + 1))
    assert state.column("num_samples").sum() == len(LENGTHS)
    make(tmp_path, num_train_epochs=1, events=True).train()
    assert (tmp_path / "previous-1" / "events-rank0.jsonl").exists()


def test_a_trainer_stops_when_it_is_told_to(tmp_path: Path) -> None:
    class Stopping(TrainerEvents):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 3:
                send(tmp_path, "stop")
            super().on_step_begin(args, state, control, **more)

    trainer = make(tmp_path, num_train_epochs=2, callbacks=[Stopping()])
    trainer.train()
    assert trainer.state.global_step == 4
    assert state_of(tmp_path).status == "stopped"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "stopped"), (ZeroDivisionError("no more"), "failed")]
)
def test_a_planned_trainer_that_is_left_early_ends_its_run(
    tmp_path: Path, error: BaseException, status: str
) -> None:
    class Leaving(TrainerEvents):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            super().on_step_begin(args, state, control, **more)
            if state.global_step == 3:
                raise error

    running = set(threading.enumerate())
    with pytest.raises(type(error)):
        make(tmp_path, num_train_epochs=2, callbacks=[Leaving()]).train()
    state = state_of(tmp_path)
    assert (state.status, state.count("step")) == (status, 3)
    assert set(threading.enumerate()) <= running
    with exclusive_folder(tmp_path):
        pass


def test_an_own_loop_writes_stops_pauses_and_says_why_it_failed(tmp_path: Path) -> None:
    def fail() -> None:
        with RunWriter(tmp_path / "failed", num_steps=3) as run:
            run.step(loss=2.0, num_samples=8)
            raise ZeroDivisionError("no more")

    with pytest.raises(ZeroDivisionError):
        fail()
    state = state_of(tmp_path / "failed")
    assert state.status == "failed"
    assert "no more" in state.latest("end")["traceback"]
    assert state.latest("step")["samples_per_s"] > 0

    folder = tmp_path / "paused"
    with RunWriter(folder) as run:
        send(folder, "pause")
        threading.Timer(0.3, send, (folder, "resume")).start()
        started = time.perf_counter()
        run.step(loss=1.0, num_samples=1)
        assert time.perf_counter() - started >= 0.2
        run.step(loss=1.0, num_samples=1)
        send(folder, "stop")
        run.step(loss=math.nan, num_samples=1)
        assert run.stopped
    state = state_of(folder)
    assert (state.status, state.count("pause"), state.count("resume")) == ("stopped", 1, 1)
    assert state.column("step_s")[1] < state.latest("resume")["paused_s"]
    assert summarize(state)["data_wait_ratio"] is None, "this loop does not say when a batch has come"

    with RunWriter(tmp_path / "micro") as run:
        calls = (run.begin_step, run.end_batch, run.exclude_time, run.begin_step)
        for call, seconds in zip(calls, (0.1, 0.1, 0.5, 0.1), strict=True):
            time.sleep(seconds)  # for a batch, training on it, evaluating, for another batch
            call()
        run.step(2)
    step = state_of(tmp_path / "micro").latest("step")
    assert 0.2 <= step["data_wait_s"] <= step["step_s"] - 0.1
    assert step["step_s"] < 0.8


def test_a_run_left_open_ends_when_its_cell_is_run_again(tmp_path: Path) -> None:
    running = set(threading.enumerate())
    left = RunWriter(tmp_path)  # as by an interrupted `Trainer.train`, which tells no callback
    assert set(threading.enumerate()) - running
    with RunWriter(tmp_path):
        assert not left.is_open
        assert not (tmp_path / "previous-1" / "previous-1").exists()
    assert set(threading.enumerate()) <= running, "nothing goes on in the background"
    assert state_of(tmp_path / "previous-1").status == state_of(tmp_path).status == "done"
    folder = tmp_path / "resumed"
    left = RunWriter(folder)
    with RunWriter(folder, step=3) as run:
        assert not left.is_open
        assert run.is_open
    assert [event.kind for event in read_events(folder / "events-rank0.jsonl")[0] if event.kind == "end"] == [
        "end"
    ] * 2


def test_a_run_that_cannot_start_lets_go_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown event key 'num_step'; did you mean 'num_steps'"):
        RunWriter(tmp_path, num_step=3)
    with pytest.raises(OptionError, match=r"device 'cuda:99' cannot be used here .*; cpu always can"):
        RunWriter(tmp_path, device="cuda:99")
    assert "mmlab-device-monitor" not in [thread.name for thread in threading.enumerate()]
    RunWriter(tmp_path, num_steps=3).close()


def test_memory_of_a_scheduler_that_counts_bytes_is_the_prediction(tmp_path: Path) -> None:
    cost = bytes_of()
    sampler = PlannedSampler(
        sample_sizes(LENGTHS, 16, 16), make_scheduler("budget", budget=20_000, cost=cost)
    )
    with RunWriter(tmp_path, sampler=sampler) as run:
        for _ in sampler:
            run.step()
    found = state_of(tmp_path).column("predicted_bytes")
    assert found.tolist() == [int(cost(shape)) for shape in sampler.plan.shapes]


def test_runs_of_two_processes_do_not_mix_in_a_folder(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"from mmlab.integrations import RunWriter; RunWriter({str(tmp_path)!r})"
    with RunWriter(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert "OptionError: another run is active in" in other.stderr
    assert not (tmp_path / "previous-1").exists()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "it has ended"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_worker_does_not_hold_the_folder_of_a_run_that_ended(tmp_path: Path) -> None:
    end, wait = os.pipe()
    with RunWriter(tmp_path):
        if not (worker := os.fork()):  # as a DataLoader starts its workers
            os.read(end, 1)
            os._exit(0)
    try:
        with exclusive_folder(tmp_path):
            pass
    finally:
        os.write(wait, b".")
        os.waitpid(worker, 0)


def test_a_crash_of_the_process_is_told(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        f"from mmlab.integrations import RunWriter; RunWriter({str(tmp_path)!r}); raise ValueError('broken')"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1
    events, _ = read_events(tmp_path / "events-rank0.jsonl")
    assert events[-1].values["status"] == "failed"
    assert events[-1].values["message"] == "broken"
