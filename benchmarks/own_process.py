"""Training in a thread of the kernel or in a process of its own: what the notebook's own Python costs it.

    python benchmarks/own_process.py [--quick] [--seconds S] [--rounds N] [--json FILE | --out DIR]

The same small model trains either in a thread of this process or in another process, while this one does what a
notebook's kernel does: nothing, a burst of pure Python ten times a second (a live view), or pure Python all the time (a
cell that computes). Arms take turns in rounds. Also: seconds until the first step of a new process, and its memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LOADS = {"idle": 0.0, "live view, 3 % of a core": 0.03, "cell that computes": 1.0}


def train(seconds: float, *, warm_up_s: float = 1.0) -> float:
    """Samples a second of the tiny model on ready batches of 8 images of 48 x 48."""
    import torch

    from mmlab.model.presets import build_model
    from mmlab.training.loop import FusionTrainer
    from mmlab.types import Batch

    torch.manual_seed(0)
    batch = Batch(
        pixel_values=torch.randint(0, 256, (8, 3, 48, 48), dtype=torch.uint8),
        pixel_mask=torch.ones(8, 48, 48, dtype=torch.bool),
        input_ids=torch.randint(5, 100, (8, 16)),
        attention_mask=torch.ones(8, 16, dtype=torch.bool),
        labels=torch.arange(8),
        record_ids=[str(number) for number in range(8)],
        groups=torch.arange(8),
    )
    trainer = FusionTrainer(build_model("tiny", vocab_size=100), device="cpu", total_steps=10**6)
    num_samples, timed_s, started = 0, 0.0, time.perf_counter()
    while (now := time.perf_counter()) < started + warm_up_s + seconds or not num_samples:
        trainer.train_step([batch])
        if now >= started + warm_up_s:
            num_samples, timed_s = num_samples + 8, timed_s + time.perf_counter() - now
    return num_samples / timed_s


def keep_busy(share: float, until: threading.Event) -> None:
    """Pure Python for a share of the time, in bursts of a tenth of a second's share."""
    while not until.is_set():
        end = time.perf_counter() + 0.1 * share
        while time.perf_counter() < end:
            sum(range(200))
        if share < 1:
            until.wait(0.1 * (1 - share))


def in_thread(seconds: float, share: float) -> float:
    found, done = [], threading.Event()

    def run() -> None:
        found.append(train(seconds))
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    keep_busy(share, done)
    thread.join()
    return found[0]


def in_process(seconds: float, share: float) -> float:
    done = threading.Event()
    with subprocess.Popen(
        [sys.executable, __file__, "--train", str(seconds)], stdout=subprocess.PIPE
    ) as child:
        waiting = threading.Thread(target=lambda: (child.wait(), done.set()))
        waiting.start()
        keep_busy(share, done)
        assert child.stdout is not None
        return json.loads(child.stdout.read())


def start_up() -> dict[str, float]:
    """Of a comparison in its own process: seconds until the kernel is free, until the first step; memory of both."""
    import psutil

    from mmlab.data.synthetic import make_dataset
    from mmlab.lab.lab import Lab

    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(Path(folder) / "data", num_images=24, max_side=96, progress=False)
        options: Any = {"epochs": 10_000, "image": "aspect:48", "equal": "batch_size"}  # nothing is priced
        lab = Lab(data, schedulers=("random",), out=Path(folder) / "out", **options)
        started = time.perf_counter()
        lab.start()
        free_s = time.perf_counter() - started
        while not lab.progress[0] > 0:
            time.sleep(0.02)
        first_step_s = time.perf_counter() - started
        about = json.loads((Path(folder) / "out" / "process.json").read_text())
        rss_bytes = psutil.Process(about["process"]["process_id"]).memory_info().rss
        lab.stop()
        while lab.state == "stopping":
            time.sleep(0.05)
    return {"kernel_free_s": free_s, "first_step_s": first_step_s, "rss_bytes": rss_bytes}


def main() -> None:
    from _common import add_common_options, goal, print_goals, write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    add_common_options(parser, "own_process")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = 1.0, 1
    if options.train is not None:
        print(train(options.train))
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for load, share in LOADS.items():
            for place, run in (("thread", in_thread), ("process", in_process)):
                found.setdefault((place, load), []).append(run(options.seconds, share))
    rows: list[dict[str, Any]] = []
    for (place, load), speeds in found.items():
        base = statistics.median(found[place, "idle"])
        row = {"place": place, "kernel": load, "samples_per_s": statistics.median(speeds), "all": speeds}
        rows.append({**row, "slowdown_ratio": 1 - row["samples_per_s"] / base})
        print(
            f"{place:8} {load:26} {row['samples_per_s']:8.1f} samples/s, {rows[-1]['slowdown_ratio']:+.0%} slower"
        )
    started = start_up()
    rows.append({"place": "process", "kernel": "start-up", **started})
    print({key: round(value, 2) for key, value in started.items()})
    slowest = {row["place"]: row["slowdown_ratio"] for row in rows if row["kernel"] == "cell that computes"}
    goals = [
        goal("a busy kernel", "slows a run by at most 10 %", slowest["process"], slowest["process"] <= 0.1),
        goal(
            "starting",
            "leaves the kernel free within 0.2 s",
            started["kernel_free_s"],
            started["kernel_free_s"] <= 0.2,
        ),
    ]
    print_goals(goals)
    if options.out or options.json:
        write_results(options.json or options.out / "own_process.json", rows, goals)


if __name__ == "__main__":
    main()
