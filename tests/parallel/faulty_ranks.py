"""Run as a script: pairs of ranks of which one is made to fail, each pair in its own way, all at the same time.

Each rank is a process of its own, forked before torch has done anything, so that none pays for the imports again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType

import torch
from transformers import BertModel, PreTrainedTokenizerFast  # noqa: F401 (imported late, where it is used)

from mmlab.cli.main import main
from mmlab.pricing.virtual_device import VirtualDevice
from tests.comparison.killed_while_training import ended, free_port, wait_for_steps

WAYS = ("stopped", "stuck", "memory", "disk", "branch")
HANGING = ("stopped", "stuck", "branch")  # does not end by itself
TIMEOUT_S = 5
LIMIT_S = 200  # until all have begun, on the busiest machine


def begin(config: Path, way: str, runs: Path, rank: int, port: int) -> int:
    """Start a rank, which SIGUSR1 makes fail; returns its process id."""
    process = os.fork()
    if process:
        return process
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = VirtualDevice()

    def fail(number: int, frame: FrameType | None) -> None:
        if way == "memory":
            device.limit_bytes = 1
        else:
            replace_open_file(
                runs / way / f"events-rank{rank}.jsonl",
                hanging_file() if way == "stuck" else os.open("/dev/full", os.O_WRONLY),
            )

    signal.signal(signal.SIGUSR1, fail)
    arguments = ["train", str(config), "--runs", str(runs), "--set", f"name={way}"]
    for change in ("trainer.num_epochs=100000", "checkpoint.every_steps=1000"):
        arguments += ["--set", change]
    if way in HANGING:
        arguments += ["--set", f"parallel.timeout_s={TIMEOUT_S}"]
    if way == "branch":
        arguments += ["--set", "parallel.strategy=branch"]
    with device if way == "memory" and rank else nullcontext():
        os._exit(main(arguments))


def hanging_file() -> int:
    """A descriptor on which writing never ends, as to a file system that answers no more: a full pipe's."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    return writer


def replace_open_file(file: Path, by: int) -> None:
    """Let what this process writes into a file that it has open go elsewhere from now on."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.exists() and descriptor.resolve() == file.resolve():
            os.dup2(by, int(descriptor.name))


def run_all(config: Path, runs: Path) -> dict[str, list[int]]:
    """How both ranks of each pair ended; rank 1 is the one that fails."""
    pairs = {}
    for way in WAYS:
        port = free_port()
        pairs[way] = [begin(config, way, runs, rank, port) for rank in range(2)]
    try:
        return fail_and_wait(pairs, runs)
    except BaseException:
        for pair in pairs.values():
            for process in pair:
                os.kill(process, signal.SIGKILL)
        raise


def fail_and_wait(pairs: dict[str, list[int]], runs: Path) -> dict[str, list[int]]:
    """Let rank 1 of each pair fail once both have trained a little."""
    for way, (_, victim) in pairs.items():
        for rank in range(2):
            wait_for_steps(runs / way / f"events-rank{rank}.jsonl", 0, 3, limit_s=LIMIT_S)
        os.kill(victim, signal.SIGSTOP if way in ("stopped", "branch") else signal.SIGUSR1)
    found = {}
    for way, (survivor, victim) in pairs.items():
        [code] = ended([survivor])
        if way in HANGING:
            os.kill(victim, signal.SIGKILL)
        found[way] = [code, *ended([victim])]
    return found


if __name__ == "__main__":
    print(json.dumps(run_all(Path(sys.argv[1]), Path(sys.argv[2]))))
