"""One run undisturbed, and one killed ten times (or stopped on two ranks) and resumed each time.

Each attempt is a process of its own, forked from one in which torch has done nothing yet (`tests.ranks`), so that none
pays for the imports again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from mmlab.comparison.config import load_config
from mmlab.comparison.train import train
from tests.processes import free_port
from tests.ranks import end_with_parent

NUM_KILLS = 10


def begin(config: Path, name: str, runs: Path, *, rank: int = 0, port: int | None = None) -> int:
    """Start an attempt, or one of two ranks of it; returns its process id."""
    process = os.fork()
    if process == 0:
        end_with_parent()
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if port is not None:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            train(load_config(config, [f"name={name}"]), runs=runs, resume="auto", progress=False)
        except SystemExit:
            os._exit(15)
        except BaseException:  # nobody above may go on in this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process


def wait_for_steps(events: Path, from_byte: int, num_steps: int, *, limit_s: float = 60) -> None:
    """Until so many steps were written, or the run has begun where none are asked for."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        written = events.read_bytes()[from_byte:] if events.exists() else b""
        if b'"kind":"start"' in written and written.count(b'"kind":"step"') >= num_steps:
            return
        time.sleep(0.001)
    raise TimeoutError(f"no {num_steps} steps in {events}")


def kill_ten_times(config: Path, runs: Path) -> dict[str, object]:
    """How many attempts were killed, and how the last one ended."""
    os.waitpid(begin(config, "whole", runs), 0)
    rng, num_killed = random.Random(5), 0
    events = runs / "killed" / "events-rank0.jsonl"
    for _ in range(NUM_KILLS):
        from_byte = events.stat().st_size if events.exists() else 0
        process = begin(config, "killed", runs)
        wait_for_steps(events, from_byte, rng.randrange(5))
        time.sleep(rng.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        num_killed += os.WIFSIGNALED(status)
    return {"num_killed": num_killed, "exit_code": ended([begin(config, "killed", runs)])[0]}


def stop_one_of_two_ranks(config: Path, runs: Path) -> dict[str, object]:
    """How both ranks ended when rank 1 alone was asked to stop, and how when they went on."""

    def both(name: str) -> list[int]:
        port = free_port()
        return [begin(config, name, runs, rank=rank, port=port) for rank in range(2)]

    whole = ended(both("whole"))
    processes = both("stopped")
    wait_for_steps(runs / "stopped" / "events-rank1.jsonl", 0, 5)
    os.kill(processes[1], signal.SIGTERM)
    return {"whole": whole, "stopped": ended(processes), "resumed": ended(both("stopped"))}


def ended(processes: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
