"""How long OpenMP's threads may spin while they wait: what it gives a training step alone, and beside a busy program.

    python benchmarks/openmp.py [--quick] [--json FILE | --out DIR]

A process for each way of waiting (asleep at once, awake for mmlab's 10,000 turns, torch's default) trains the same model
on the same batches, one process at a time, in turns. Then the same beside a program that computes half of the time, in
bursts of 10 ms, as a loader that decodes on one of the cores; and two such trainings at once, which wait alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from typing import IO, Any

import numpy as np
from _common import add_common_options, goal, print_goals, write_if_asked

WAYS = {  # what the environment says
    "asleep at once": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "mmlab": {},
    "torch's default": {"GOMP_SPINCOUNT": "300000"},
}
NUM_SHAPES = {"tiny": 20, "small": 8}
NUM_TURNS = {"tiny": 8, "small": 5}
BUSY = """
import time
while True:
    end = time.process_time() + 0.01
    while time.process_time() < end: pass
    time.sleep(0.01)
"""
ALONE, BUSY_PROGRAM, TWO_RUNS = "alone", "beside a busy program", "two at once"
# times the seconds of the fastest way that mmlab's may take
MOST = {ALONE: 1.1, BUSY_PROGRAM: 1.3, TWO_RUNS: 1.3}


def train(name: str) -> None:
    """Answer every line of standard input with the seconds of one step of each shape."""
    import torch

    from mmlab.model.presets import build_model
    from mmlab.pricing.timing import noise_batches, timed_step
    from mmlab.training.loop import FusionTrainer

    torch.manual_seed(0)
    trainer = FusionTrainer(build_model(name, vocab_size=1000), device="cpu", lr=0.0, total_steps=10**6)
    rng = np.random.default_rng(0)
    most = 33 if name == "tiny" else 11  # samples
    shapes = [
        (rng.integers(3, most), rng.integers(10, 30), *rng.choice([64, 80, 96], 2))
        for _ in range(NUM_SHAPES[name])
    ]
    batches = noise_batches(trainer, np.array(shapes))
    for batch in batches:
        timed_step(trainer, batch)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(sum(timed_step(trainer, batch) for batch in batches), flush=True)


def measure(name: str, num_turns: int, beside: str) -> dict[str, list[float]]:
    """Seconds of each turn, by way of waiting."""
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    clean = {key: value for key, value in os.environ.items() if key not in WAYS["asleep at once"]}
    with ExitStack() as running:
        processes: dict[str, list[tuple[IO[str], IO[str]]]] = {way: [] for way in WAYS}
        for way, variables in list(WAYS.items()) * (2 if beside == TWO_RUNS else 1):
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--train", name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=clean | variables,
                    text=True,
                )
            )
            running.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            processes[way].append((process.stdin, process.stdout))
        for pairs in processes.values():
            assert [answer.readline() for _, answer in pairs] == ["ready\n"] * len(pairs)
        if beside == BUSY_PROGRAM:
            running.callback(running.enter_context(subprocess.Popen([sys.executable, "-c", BUSY])).kill)
        for _ in range(num_turns):
            for way in rng.permutation(list(WAYS)).tolist():
                for ask, _ in processes[way]:
                    ask.write("\n")
                    ask.flush()
                found[way].append(max(float(answer.readline()) for _, answer in processes[way]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    add_common_options(parser, "openmp")
    options = parser.parse_args()
    if options.train:
        from mmlab.machine import share_cores

        if "GOMP_SPINCOUNT" not in os.environ:  # mmlab's way
            share_cores()
        train(options.train)
        return
    rows: list[dict[str, Any]] = []
    goals = []
    for name in ("tiny",) if options.quick else NUM_SHAPES:
        for beside, most in list(MOST.items())[: 1 if options.quick else None]:
            found = measure(name, 2 if options.quick else NUM_TURNS[name], beside)
            for way, turns in found.items():
                ratio = median(one / other for one, other in zip(turns, found["mmlab"], strict=True))
                step_s = median(turns) / NUM_SHAPES[name]
                rows.append(
                    {
                        "model": name,
                        "machine": beside,
                        "waiting": way,
                        "step_s": step_s,
                        "over_mmlab": ratio,
                        "all_s": turns,
                    }
                )
                print(f"{name:6} {beside:22} {way:16} {1e3 * step_s:7.1f} ms a step, {ratio:.2f} of mmlab's")
            worst = 1 / min(row["over_mmlab"] for row in rows[-len(WAYS) :])
            goals.append(
                goal(f"{name}, {beside}", f"at most {most} times the fastest way", worst, worst <= most)
            )
    print_goals(goals)
    write_if_asked(options, "openmp", rows, goals)


if __name__ == "__main__":
    main()
