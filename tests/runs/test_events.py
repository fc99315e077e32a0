"""A run's event file: every whole line is read, a torn one never, and every key stands in the table."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.errors import DataError, OptionError
from mmlab.runs.event_keys import EVENT_KEYS, EVENT_KINDS
from mmlab.runs.events import RunEvent, RunLog, check_types, read_events, read_runs
from tests.project.print_event_keys import keys_table

ROOT = Path(__file__).parents[2]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    events = [
        RunEvent(
            "start", 0, 0, 100.0, {"scheduler": "budget", "config": {"nested": {"lr": 0.1, "bad": math.inf}}}
        ),
        RunEvent("step", 1, 0, 100.5, {"loss": 2.25, "skipped": False, "user_note": "über"}),
        RunEvent("end", 1, 0, 101.0, {"status": "done", "message": None}),
    ]
    with RunLog(tmp_path / "new" / "run") as log:
        for event in events:
            log.emit(event)
    assert read_events(log.path) == (events, log.path.stat().st_size)


def test_the_name_of_a_file_that_is_not_utf8_leaves_a_line_that_is_read(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("start", 0, config={"data": os.fsdecode(b"caf\xe9")})
    (event,), _ = read_events(log.path)
    assert event.values["config"] == {"data": r"caf\udce9"}


@given(st.floats(), st.sampled_from([float, np.float64, np.float32]))
def test_every_float_survives_as_valid_json(value: float, number_type: type) -> None:
    from tempfile import TemporaryDirectory

    with np.errstate(over="ignore"):
        number = number_type(value)
    with TemporaryDirectory() as folder, RunLog(folder) as log:
        log.write("step", 1, loss=number)
        line = log.path.read_text()
        (event,), _ = read_events(log.path)
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    np.testing.assert_array_equal(event.values["loss"], float(number))


@pytest.mark.parametrize("length", range(40))
def test_a_torn_last_line_is_never_consumed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "events-rank0.jsonl"
    whole = b'{"kind":"step","step":1,"rank":0,"time_s":1.0}\n'
    path.write_bytes(whole + whole[:length])
    events, offset = read_events(path)
    assert (len(events), offset) == (1, len(whole))
    path.write_bytes(whole + whole)
    events, offset = read_events(path, offset)
    assert (len(events), offset) == (1, 2 * len(whole))
    assert read_events(path, offset) == ([], offset)


def test_a_killed_run_leaves_every_event_but_the_one_in_hand(tmp_path: Path) -> None:
    code = (
        "import sys; from mmlab.runs.events import RunLog; log = RunLog(sys.argv[1]); step = 0\n"
        "while True: step += 1; log.write('step', step, loss=1 / step); print(step, flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 200:
            break
    child.send_signal(signal.SIGKILL)
    last = int(["200", *child.stdout.read().split("\n")[:-1]][-1])  # of the whole lines that it still printed
    child.wait()
    child.stdout.close()
    events, _ = read_events(tmp_path / "events-rank0.jsonl")
    assert [event.step for event in events][:last] == list(range(1, last + 1))


def test_going_on_after_a_torn_line_cuts_it_and_says_so(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=1.0)
    _, offset = read_events(log.path)
    with open(log.path, "ab") as file:
        file.write(b'{"kind":"step","ste')
    with RunLog(tmp_path) as log:
        log.write("step", 2, loss=0.5)
    events, _ = read_events(log.path, offset)
    assert [event.kind for event in events] == ["warning", "step"]
    assert "cut 19 bytes of a torn last line" in events[0].values["message"]


def test_a_line_that_a_full_disk_cuts_short_is_taken_back(tmp_path: Path) -> None:
    """A file may not grow beyond a limit for a while, as on a full disk; later lines are whole."""
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=1.0)
        before, limits = log.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: .*{log.path.name}"):
                log.write("step", 2, loss=0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert log.path.stat().st_size == before
        log.write("step", 3, loss=0.25)
    assert [event.step for event in read_events(log.path)[0]] == [1, 3]


def test_events_are_not_lost_silently_if_their_file_is_removed(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.path.unlink()
        with pytest.raises(FileNotFoundError, match=f"removed while .*{log.path.name}"):
            log.write("step", 1, loss=1.0)


def test_a_clock_that_is_set_back_leaves_events_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RunEvent.now("step", 1, {})
    assert abs(before.time_s - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before.time_s <= RunEvent.now("step", 2, {}).time_s


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:

        def write(thread: int) -> None:
            for step in range(200):
                log.write("step", step, epoch=thread, user_filler="x" * (37 * thread))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events, _ = read_events(log.path)
    for number in range(8):
        assert [event.step for event in events if event.values["epoch"] == number] == list(range(200))


def test_an_unknown_kind_or_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        with pytest.raises(OptionError, match="unknown event key 'los'; did you mean 'loss'"):
            log.write("step", 1, los=1.0)
        with pytest.raises(OptionError, match="Begin keys of your own with 'user_'"):
            log.write("step", 1, my_metric=1.0)
        with pytest.raises(OptionError, match="unknown kind of event 'stop'; did you mean 'step'"):
            log.write("stop", 1)
        with pytest.raises(
            TypeError, match=r"'loss': expected a number.* found ndarray; give a tensor's .item()"
        ):
            log.write("step", 1, loss=np.zeros(2))
        with pytest.raises(OptionError, match="step, rank and time_s are the event's"):
            log.emit(RunEvent("step", 1, 0, 1.0, {"rank": 1}))
    assert log.path.stat().st_size == 0


def test_what_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step, rank, time_s in (("1", 0, 1.0), (1.0, 0, 1.0), (1, None, 1.0), (1, 0, math.nan)):
            with pytest.raises(TypeError, match=r"should be a (whole )?number, found"):
                log.emit(RunEvent("step", step, rank, time_s, {}))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="status should be a text, found None"):
            log.write("end", 1)
        log.write("step", np.int64(7))  # type: ignore[arg-type]
    events, _ = read_events(log.path)
    assert [event.step for event in events] == [7]


def test_a_bad_line_and_a_rewritten_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text('{"kind":"step","step":1,"rank":0,"time_s":1.0}\nnot json\n')
    with pytest.raises(
        DataError, match=rf"{re.escape(str(path))}: the line at byte 47 is not an event.*not json"
    ):
        read_events(path)
    with pytest.raises(DataError, match="the file was replaced by a new run; read it from offset 0"):
        read_events(path, 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": 3}, "kind should be a text, found 3"),
        ({"step": "one"}, "step should be a whole number, found 'one'"),
        ({"rank": None}, "rank should be a whole number, found None"),
        ({"time_s": None}, "time_s should be a number, found None"),
        ({"kind": "end"}, "status should be a text, found None"),
        ({"kind": "end", "status": 1}, "status should be a text, found 1"),
    ],
)
def test_fields_of_another_type_are_no_event(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(json.dumps({"kind": "step", "step": 1, "rank": 0, "time_s": 1.0} | change) + "\n")
    with pytest.raises(DataError, match=f"the line at byte 0 is not an event.*{message}"):
        read_events(path)


def test_read_runs_joins_every_rank_of_every_run(tmp_path: Path) -> None:
    for run, rank, start_s in (("a", 0, 10.0), ("a", 1, 10.25), ("deep/b", 0, 50.0)):
        with RunLog(tmp_path / run, rank) as log:
            log.emit(RunEvent("start", 0, rank, start_s, {"scheduler": run}))
            log.emit(RunEvent("step", 1, rank, start_s + 1, {"user_own": 3, "loss": math.nan}))
    with RunLog(tmp_path / "previous-1" / "a") as log:
        log.write("start", 0, scheduler="an earlier run that was moved aside")
    table = read_runs(tmp_path)
    assert set(read_runs(tmp_path / "previous-1")["run"]) == {"a"}
    assert list(table["run"]) == ["a"] * 4 + ["deep/b"] * 2
    assert list(table["elapsed_s"]) == [0.0, 0.25, 1.0, 1.25, 0.0, 1.0]
    assert list(table["rank"]) == [0, 1, 0, 1, 0, 0]
    fixed = ["run", "kind", "step", "rank", "time_s", "elapsed_s"]
    assert list(table) == [*fixed, "scheduler", "loss", "user_own"]
    assert set(read_runs(tmp_path / "deep" / "b")["run"]) == {"b"}
    with pytest.raises(DataError, match=r"no events in events-rank\*\.jsonl below it"):
        read_runs(tmp_path / "nowhere")


def test_every_key_names_known_kinds_and_carries_its_unit_in_its_name() -> None:
    for name, key in EVENT_KEYS.items():
        assert set(key.kinds.split()) <= set(EVENT_KINDS), name
        assert re.fullmatch("[a-z][a-z0-9_]*", name)
        rate = "bytes/s" if name.endswith("_bytes_per_s") else "samples/s"
        for suffix, unit in (("_bytes", "bytes"), ("_per_s", rate), ("_ratio", "ratio 0-1")):
            assert not name.endswith(suffix) or key.unit == unit, name
        assert not name.endswith("_s") or key.unit in ("s", rate), name


def test_all_that_a_training_run_emits_stands_in_the_table_under_its_kind(tmp_path: Path) -> None:
    import torch

    from mmlab.model.presets import build_model
    from mmlab.runs.monitor import DeviceMonitor
    from mmlab.training.loop import FusionTrainer
    from mmlab.types import Batch

    batch = Batch(
        pixel_values=torch.zeros(4, 3, 32, 32, dtype=torch.uint8),
        pixel_mask=torch.ones(4, 32, 32, dtype=torch.bool),
        input_ids=torch.arange(20).view(4, 5),
        attention_mask=torch.ones(4, 5, dtype=torch.bool),
        labels=None,
        record_ids=list("abcd"),
        groups=torch.arange(4),
    )
    with RunLog(tmp_path) as log, DeviceMonitor(log.emit, device="cpu"):
        model = build_model("tiny", vocab_size=20)
        trainer = FusionTrainer(model, objectives=("contrastive", "matching"), device="cpu", emit=log.emit)
        log.write("start", 0, **trainer.description())
        trainer.fit([batch, batch], num_epochs=1, eval_loader=[batch])
    events, _ = read_events(log.path)
    check_types(events, log.path)
    assert {"start", "step", "epoch", "eval", "device"} <= {event.kind for event in events}
    for event in events:
        strangers = {key for key in event.values if event.kind not in EVENT_KEYS[key].kinds.split()}
        assert not strangers, f"event_keys.toml does not say that {event.kind} events carry {strangers}"


def test_the_documentation_holds_the_table() -> None:
    text = (ROOT / "docs/internals/event_keys.md").read_text(encoding="utf-8")
    assert keys_table() in text, (
        "docs/internals/event_keys.md is out of step: run python tests/project/print_event_keys.py and paste its output"
    )


def test_reading_runs_needs_no_torch(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write("step", 1, loss=1.0)
    code = (
        "import sys; from mmlab.runs.events import read_runs; from mmlab.runs.follow import RunState\n"
        f"state = RunState({str(tmp_path)!r}); state.poll(); read_runs({str(tmp_path)!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
