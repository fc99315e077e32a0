"""ProcessGroup started from a program: results and errors come back, and the caller is left as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from mmlab.cli.cache import cache_info
from mmlab.comparison.config import load_config
from mmlab.comparison.train import train_on
from mmlab.errors import DataError, OptionError, RunError
from mmlab.parallel.launch import run_on_ranks
from mmlab.runs.events import read_events
from mmlab.training.checkpoint.files import read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints
from tests.comparison.called_on_ranks import fails_on, summed
from tests.configs import TINY_MODEL
from tests.processes import command_line

CONFIG = (
    """
name = "pair"
[data]
path = "{scenes}"
image = "aspect:32"
cache = "{cache}"
num_workers = 0
"""
    + TINY_MODEL
    + """[scheduler]
name = "random"
batch_size = 4
[trainer]
num_epochs = 1
device = "cpu"
"""
)

# What a kernel is to its cells: a process that has no file of its own, raises on an interrupt, and runs the next cell.
CALLER = """
import json, signal, sys
from mmlab.comparison.config import load_config
from mmlab.comparison.train import train_on

signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background it would be ignored
for cell in sys.stdin:
    config, runs, *changes = json.loads(cell)
    try:
        train_on(load_config(config, ["trainer.num_epochs=10000", *changes]), num_processes=2, runs=runs)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ranks_form_a_group_and_return_what_they_found(capfd: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    assert run_on_ranks(summed, 10) == [(0, 21.0), (1, 21.0)]
    assert {number: signal.getsignal(number) for number in before} == before
    changed = {name for name, _ in os.environ.items() ^ environment.items()}
    assert changed <= {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    assert "was here" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("data", DataError, r"rank 1 failed: DataError: row 7 has no image\n\nTraceback(.|\n)*in fails_on"),
        ("other", RunError, r"rank 1 failed: KeyError: 'seven'"),
        (
            "killed",
            RunError,
            r"rank 1 ended without an exception: Signal 9 \(SIGKILL\)(.|\n)*my last words",
        ),
    ],
)
def test_what_a_rank_suffers_is_raised_here(how: str, kind: type[Exception], words: str) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(kind, match=words):
        run_on_ranks(fails_on, 1, how)
    assert {number: signal.getsignal(number) for number in before} == before


def test_ranks_see_the_variables_of_the_call_and_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_ranks(os.getpid)  # the server that ranks come from has begun by now
    monkeypatch.setenv("MMLAB_SET_JUST_NOW", "here")
    monkeypatch.setenv("RANK", "7")
    assert run_on_ranks(os.getenv, "MMLAB_SET_JUST_NOW") == ["here", "here"]
    assert run_on_ranks(os.getenv, "RANK") == ["0", "1"]


def test_a_partial_function_can_be_called_on_ranks() -> None:
    assert run_on_ranks(partial(summed, 10)) == run_on_ranks(summed, 10)


def test_what_cannot_be_sent_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="put it into a module and import it"):
        run_on_ranks(lambda: None)
    with pytest.raises(OptionError, match="the first argument must be a function, found 3"):
        run_on_ranks(3)
    with pytest.raises(OptionError, match="cannot send these arguments to other processes"):
        run_on_ranks(summed, (number for number in range(3)))
    with pytest.raises(OptionError, match="num_processes must be at least 1, found 0"):
        run_on_ranks(summed, 1, num_processes=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="this process is a rank already"):
        run_on_ranks(summed, 1)


def test_a_script_that_would_start_ranks_in_its_ranks_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nfrom mmlab import run_on_ranks\nrun_on_ranks(os.getpid, num_processes=1)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "OptionError: a rank imports the script that started it" in done.stderr
    assert "RunError: rank 0 ended" in done.stderr.partition("OptionError")[2]


def test_two_ranks_fill_the_cache_and_train(scenes: Path, tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    path.write_text(CONFIG.format(scenes=scenes, cache=tmp_path / "cache"))
    result = train_on(load_config(path), num_processes=2, runs=tmp_path / "runs")
    assert result.status == "done"
    assert cache_info(tmp_path / "cache").document["num_images"] == 24
    both = []
    for rank in range(2):
        events, _ = read_events(tmp_path / "runs" / "pair" / f"events-rank{rank}.jsonl")
        both.append([event.values["loss"] for event in events if event.kind == "step"])
    assert len(both[0]) == result.num_steps > 0
    assert both[0] == both[1]


@pytest.fixture
def caller() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CALLER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as started:
        yield started
        started.kill()  # what is below it then ends too


def ranks_of(caller: psutil.Process) -> list[psutil.Process]:
    """The ranks of a caller and their workers: all that is below the server that forks them."""
    with suppress(psutil.NoSuchProcess):
        return [each for each in caller.children(recursive=True) if each.ppid() != caller.pid]
    return []


def interrupted(
    caller: subprocess.Popen[str],
    arguments: list[Path | str],
    is_ready: Callable[[list[psutil.Process]], bool],
    send: Callable[[int, int], None] = os.kill,
    number: int = signal.SIGINT,
) -> list[psutil.Process]:
    """The ranks of a caller that got a signal when they were ready; all have ended, and it has said so if it could."""
    print(json.dumps([*map(str, arguments)]), file=caller.stdin, flush=True)
    itself = psutil.Process(caller.pid)
    while not is_ready(ranks := ranks_of(itself)):
        assert caller.poll() is None
    servers = itself.children()
    send(caller.pid, number)
    assert caller.stdout is not None
    assert caller.stdout.readline() == ("" if number == signal.SIGKILL else "interrupted\n")
    assert psutil.wait_procs(ranks + servers * (number == signal.SIGKILL), timeout=10)[1] == []
    while left := ranks_of(itself):  # started meanwhile
        assert psutil.wait_procs(left, timeout=10)[1] == []
    return ranks


def test_an_interrupt_ends_all_ranks_while_they_start_and_after_a_step_with_a_checkpoint(
    caller: subprocess.Popen[str], scenes: Path, tmp_path: Path
) -> None:
    """Of the caller alone: while it starts them, which leaves none, and in a step. In the next cell of its group, as Jupyter
    does; at last the caller is killed."""
    path = tmp_path / "pair.toml"
    path.write_text(CONFIG.format(scenes=scenes, cache=tmp_path / "cache"))

    def one_is_there(ranks: list[psutil.Process]) -> bool:
        time.sleep(0.005)
        return any("forkserver" in command_line(process) for process in ranks)  # forked from it

    interrupted(caller, [path, tmp_path / "begun"], one_is_there)
    for cell, (send, number, loading, num_processes) in enumerate(
        [
            (os.kill, signal.SIGINT, [], 2),
            (os.killpg, signal.SIGINT, ["data.backend=torch", "data.num_workers=1"], 4),
            (os.kill, signal.SIGKILL, [], 2),
        ]
    ):
        folder = tmp_path / f"runs-{cell}" / "pair"
        files = [folder / f"events-rank{rank}.jsonl" for rank in range(2)]

        def all_step(_: list[psutil.Process], files: list[Path] = files) -> bool:
            time.sleep(0.05)
            return all(file.exists() and b'"kind":"step"' in file.read_bytes() for file in files)

        ended = interrupted(caller, [path, folder.parent, *loading], all_step, send, number)
        assert len(ended) >= num_processes  # ranks, and their workers where they have some
        ended_s = time.time()
        saved = read_checkpoint(Checkpoints(folder / "checkpoints").paths[-1])
        for file in files:
            step, end = [event for event in read_events(file)[0] if event.kind in ("step", "end")][-2:]
            assert (step.kind, end.kind, end.values["status"]) == ("step", "end", "stopped")
            assert step.step == end.step == saved["progress"]["step"]
            assert ended_s - end.time_s < 25, "the launcher killed the ranks, 30 s after it told them to end"
