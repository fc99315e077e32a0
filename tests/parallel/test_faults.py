"""A rank that dies, hangs or fails is named by the others, and a run that torchrun starts again loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from mmlab.comparison.options import DataOptions
from mmlab.comparison.preparation import make_datasets
from mmlab.errors import OptionError, RunError
from mmlab.parallel.faults import broke_off
from mmlab.parallel.launches import begun_by_this_launch, meet, note_launch
from mmlab.runs.events import RunEvent, read_events
from mmlab.runs.trackers import current_events
from mmlab.runs.watch import summary, text_of
from mmlab.schedule.schedulers import make_scheduler
from tests.configs import TINY_MODEL
from tests.parallel.faulty_ranks import HANGING, WAYS, train_until_it_fails, wait_for_one_that_never_joins
from tests.processes import free_port
from tests.ranks import started_ranks

CONFIG = (
    """
name = "small"
[data]
path = "{scenes}"
image = "aspect:32"
num_workers = 1
"""
    + TINY_MODEL
    + """[scheduler]
name = "random"
batch_size = 3
[trainer]
num_epochs = 3
device = "cpu"
[checkpoint]
every_steps = 2
"""
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LIMIT_S = 200  # of what must end by itself, on the busiest machine


@pytest.fixture
def config(tmp_path: Path, scenes: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(scenes=scenes))
    return path


def events_of(run: Path, rank: int) -> list[RunEvent]:
    return read_events(run / f"events-rank{rank}.jsonl")[0]


def last(run: Path, kind: str, rank: int = 0) -> dict[str, Any]:
    return dict([event for event in events_of(run, rank) if event.kind == kind][-1].values)


def wait_for_steps(events: Path, num_steps: int) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not events.exists() or events.read_bytes().count(b'"kind":"step"') < num_steps:
        assert time.monotonic() < deadline_s, f"no {num_steps} steps in {events}"
        time.sleep(0.01)


def test_whatever_happens_to_a_rank_the_others_stop_and_name_it(config: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        pairs = {
            way: stack.enter_context(
                started_ranks(train_until_it_fails, 2, config, tmp_path, way, joins=False)
            ).processes
            for way in WAYS
        }
        for way, (_, victim) in pairs.items():
            for rank in range(2):
                wait_for_steps(tmp_path / way / f"events-rank{rank}.jsonl", 3)
            os.kill(victim.pid, signal.SIGSTOP if way in ("stopped", "branch") else signal.SIGUSR1)
        for way, pair in pairs.items():
            for process in pair[: 1 if way in HANGING else 2]:
                process.join(LIMIT_S)
                assert process.exitcode == 1, way
    told = {
        "stopped": "gives no sign of life since step",
        "stuck": "it is alive but keeps the others waiting",
        "memory": "out of memory",
        "disk": "No space left on device",
        "branch": "gives no sign of life since step",
        "sharing": "gives no sign of life since step",
        "sharded": "ended with an error of its own: CollectiveFailed: rank 1 failed where the ranks gather weights from each "
        "other: an odd batch",
        "evaluating": "CollectiveFailed: rank 1 failed where the ranks gather weights from each other: CUBLAS_STATUS_ALLOC",
    }
    for way, words in told.items():
        run, end = tmp_path / way, last(tmp_path / way, "end")
        assert end["status"] == "failed"
        shown = text_of(summary(run), width=10**4)
        for expected in ("rank 1", " step ", words):
            assert expected in end["message"], way
            assert expected in shown, way
        step = int(end["message"].partition(" step ")[2].split(":")[0].split(";")[0].split()[0])
        assert abs(step - end["num_steps"]) <= 1, "the step in which it happened"
        printed = (tmp_path / f"{way}-0.stderr").read_text()
        assert f"mmlab: failed: RunError: {end['message']}" in printed
    for way in HANGING:
        assert "--resume auto" in last(tmp_path / way, "warning")["message"]


def test_a_killed_rank_is_started_again_and_no_sample_is_lost_or_repeated(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "small"
    (run / "checkpoints").mkdir(parents=True)  # an earlier run, of another launch
    (run / "launch.json").write_text(json.dumps({"run_id": "the one before"}))
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-id", "this one", "--max-restarts", "1", "-m", "mmlab", "train", str(config)]
    command += ["--runs", str(tmp_path), "--set", "parallel.strategy=ddp"]
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(2)
    ]
    victim = run / "events-rank1.jsonl"
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while not victim.exists() or victim.read_bytes().count(b'"kind":"step"') < 12:  # in the second epoch
            assert all(agent.poll() is None for agent in agents)
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        os.kill(last(run, "start", rank=1)["process_id"], signal.SIGKILL)
        printed = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # ends its ranks too
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert "resumed from" in "".join(out for out, _ in printed)
    assert sorted(path.name for path in run.glob("previous-*")) == ["previous-1"], "the earlier run's only"

    warning = last(run, "warning")["message"]
    assert "rank 1 (process" in warning
    assert "gives no sign of life since step" in warning
    starts = [event for event in events_of(run, 0) if event.kind == "start"]
    assert [start.step == 0 for start in starts] == [True, False]
    assert starts[1].step >= 10, "from the last checkpoint, which is every second step"
    assert [last(run, "end", rank)["status"] for rank in range(2)] == ["done", "done"]
    checkpoints = list((run / "checkpoints").iterdir())
    assert checkpoints
    assert not any((checkpoint / "shards").exists() for checkpoint in checkpoints)
    assert_samples_as_planned(config, run)


def assert_samples_as_planned(config: Path, run: Path) -> None:
    """What counts of both ranks' steps is the plan of every epoch, step by step, with the loss of both ranks' samples."""
    path = config.read_text().partition('path = "')[2].partition('"')[0]
    train_set, _ = make_datasets(path, DataOptions(path=path, image="aspect:32"), progress=False)
    scheduler = make_scheduler("random", batch_size=3, seed=0, world_size=2)
    steps = [
        [event for event in current_events(events_of(run, rank)) if event.kind == "step"] for rank in (0, 1)
    ]
    first, second = ([event.values["loss"] for event in done] for done in steps)
    assert first == second, "a step's loss is that of all samples"
    num_samples = 0
    for epoch in range(3):
        plan = scheduler.plan(train_set.sizes, epoch=epoch)
        mine = [plan.shard(rank, 2).shape_columns for rank in (0, 1)]
        for rank in range(2):
            done = [event.values for event in steps[rank] if event.values["epoch"] == epoch]
            keys = ("num_samples", "num_tokens", "height", "width")
            assert [[values[key] for key in keys] for values in done] == mine[rank].tolist()
            assert all(0 <= values["rank_wait_s"] <= values["step_s"] for values in done)
            num_samples += sum(values["num_samples"] for values in done)
    assert num_samples == 3 * len(train_set)
    assert summary(run)["runs"]["small"]["ranks"]["1"]["rank_wait_ratio"] is not None


def test_an_interrupt_ends_a_rank_that_waits_in_torchs_code_for_another(tmp_path: Path) -> None:
    away = tmp_path / "away"
    with started_ranks(wait_for_one_that_never_joins, 2, away, joins=False) as ranks:
        first, second = ranks.processes
        while not away.exists():
            assert second.is_alive()
            time.sleep(0.01)
        time.sleep(0.5)  # they have met, so rank 0 begins to wait at about the same time
        os.kill(first.pid, signal.SIGINT)
        first.join(20)
        assert first.exitcode is not None


def test_ranks_meet_whatever_an_earlier_start_left_in_the_store() -> None:
    store = distributed.HashStore()

    def together() -> list[str]:
        found: dict[int, str] = {}
        threads = [
            threading.Thread(
                target=lambda rank=rank: found.update({rank: meet(store, rank, 3, timeout_s=LIMIT_S)})
            )
            for rank in range(3)
        ]
        for thread in reversed(threads):  # those that could be taken in by old words come first
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(3)]

    names = [together() for _ in range(3)]
    assert [len(set(name)) for name in names] == [1, 1, 1]
    assert len({name[0] for name in names}) == 3
    with pytest.raises(
        RunError, match=r"rank 0 waited 0 s for the other 2; see whether all of them were started"
    ):
        meet(store, 0, 3, timeout_s=0.1)


def test_a_launch_knows_its_own_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "launch.json"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    note_launch(path)
    assert not path.exists(), "without torchrun nothing starts a run again"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert not begun_by_this_launch(path, restarted=True)
    note_launch(path)
    assert begun_by_this_launch(path, restarted=False), "other agents' restarts are not counted by this one"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "process_id": -1}))
    assert begun_by_this_launch(path, restarted=True), "rank 0 has moved to another machine"
    assert not begun_by_this_launch(path, restarted=False), "a new launch with an old id"
    path.write_text(json.dumps({**written, "run_id": "other"}))
    assert not begun_by_this_launch(path, restarted=True)


def test_errors_of_exchanges_are_told_from_others() -> None:
    assert broke_off(RuntimeError("[../gloo/transport/tcp/pair.cc:545] Connection closed by peer"))
    assert broke_off(distributed.DistBackendError("NCCL error"))
    assert not broke_off(RuntimeError("shapes do not fit"))
    assert not broke_off(RunError("rank 1 gives no sign of life: Connection closed"))


def test_a_timeout_must_be_above_zero(config: Path) -> None:
    from mmlab.comparison.config import load_config

    with pytest.raises(OptionError, match=r"timeout_s.* expected a valid number, found 'soon'"):
        load_config(config, ["parallel.timeout_s=soon"])
