"""Runs of one and of two ranks that are paused, resumed and stopped by a file, then resumed; and what is seen of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmlab.runs.control import send
from tests.comparison.killed_while_training import begin, ended, wait_for_steps
from tests.processes import free_port


def wait_for(events: Path, text: bytes) -> None:
    deadline_s = time.monotonic() + 60
    while text not in events.read_bytes():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {text!r} in {events}")
        time.sleep(0.005)


def steer(config: Path, runs: Path, num_ranks: int, ports: list[int]) -> dict[str, object]:
    """Exit codes of the undisturbed, the stopped and the resumed run, and the files' sizes during the pause."""

    def start(name: str) -> list[int]:
        port = ports.pop() if num_ranks > 1 else None
        return [begin(config, name, runs, rank=rank, port=port) for rank in range(num_ranks)]

    whole = ended(start("whole"))
    processes, folder = start("steered"), runs / "steered"
    files = [folder / f"events-rank{rank}.jsonl" for rank in range(num_ranks)]
    wait_for_steps(files[0], 0, 3)
    send(folder, "pause")
    for file in files:
        wait_for(file, b'"kind":"pause"')
    steps = [file.read_bytes().count(b'"kind":"step"') for file in files]
    time.sleep(0.5)
    later = [file.read_bytes().count(b'"kind":"step"') for file in files]
    send(folder, "resume")
    for file in files:
        wait_for(file, b'"kind":"resume"')
    wait_for_steps(files[0], 0, later[0] + 2)
    send(folder, "stop")
    return {
        "whole": whole,
        "steps": steps,
        "later": later,
        "stopped": ended(processes),
        "resumed": ended(start("steered")),
    }


def steer_both(config: Path, runs: Path) -> dict[int, dict[str, object]]:
    """What was seen of the runs of one and of two ranks, which are trained at the same time."""
    ports = [free_port() for _ in range(3)]  # now: a process forked while one is probed would keep it
    with ThreadPoolExecutor() as pool:
        found = {
            num_ranks: pool.submit(steer, config, runs / str(num_ranks), num_ranks, ports)
            for num_ranks in (1, 2)
        }
        return {num_ranks: seen.result() for num_ranks, seen in found.items()}
