"""A process that writes a run as training does: `python writing_runs.py FOLDER STEPS HZ [SEED]`; 0 Hz: all at once."""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmlab.runs.events import RunEvent, RunLog


def write_run(folder: Path, num_steps: int, hz: float = 0.0, seed: int = 0, *, end: bool = True) -> None:
    """`start`, steps with a device reading and an evaluation now and then, `end`."""
    rng = random.Random(seed)
    with RunLog(folder) as log:
        began = time.time()
        log.write("start", 0, run_name=folder.name, scheduler=folder.name, num_steps=num_steps, device="cpu")
        for step in range(1, num_steps + 1):
            time_s = began + step / (hz or 10)
            if hz and (wait_s := time_s - time.time()) > 0:
                time.sleep(wait_s)
            for event in events_of(step, time_s, rng, seed):
                log.emit(event)
        if end:
            log.write("end", num_steps, status="done", num_steps=num_steps)


def write_turns(folder: Path, speeds: dict[str, float]) -> None:
    """Runs that take turns at these samples a second: 3 epochs of 10 s, the second paused for 5 s after 5 s.

    The last step of each epoch has one sample and teaches nothing.
    """
    for place, (name, speed) in enumerate(speeds.items()):
        with RunLog(folder / name) as log:
            log.emit(RunEvent("start", 0, 0, 1e9 + place / 1000, {"run_name": name, "num_steps": 33}))
            for epoch in range(3):
                time_s = 1e9 + 20 * (epoch * len(speeds) + place)
                for step in range(11 * epoch + 1, 11 * epoch + 12):
                    step_s, num_samples = (0.001, 1) if step % 11 == 0 else (1.0, round(speed))
                    if step == 16:
                        log.emit(RunEvent("pause", step, 0, time_s, {}))
                        for _ in range(5):
                            time_s += 1
                            log.emit(RunEvent("device", -1, 0, time_s, _USE | {"utilization_ratio": 0.0}))
                        log.emit(RunEvent("resume", step, 0, time_s, {"paused_s": 5.0}))
                    time_s += step_s
                    loss = math.nan if num_samples == 1 else 3 / step
                    values = {"epoch": epoch, "num_samples": num_samples, "step_s": step_s, "loss": loss}
                    log.emit(
                        RunEvent("step", step, 0, time_s, {**_SIZES, **values, "combined_waste": 10 / speed})
                    )
                    log.emit(RunEvent("device", -1, 0, time_s, _USE | {"utilization_ratio": 0.8}))
                log.emit(RunEvent("eval", step, 0, time_s, {"loss": 1.0}))
            log.emit(RunEvent("end", step, 0, time_s, {"status": "done"}))


class _Replay:
    """Stands where NVIDIA's bindings stand, and answers what was written down of an H100 under load."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "MemoryInfo": SimpleNamespace(used=61 * 2**30, total=80 * 2**30),
            "UtilizationRates": SimpleNamespace(gpu=75, memory=48),
        }
        return lambda *_: answers.get(name.removeprefix("nvmlDeviceGet"))


def write_replay(folder: Path) -> None:
    """A run on two GPUs, whose readings NVML would have given: the meter is real, the driver is a double."""
    from dataclasses import asdict

    from mmlab.runs.meters import DeviceMeter
    from mmlab.runs.nvml import Gpu

    for rank in range(2):
        with RunLog(folder, rank) as log, DeviceMeter("cuda") as meter:
            log.emit(RunEvent("start", 0, rank, 1e9, {"run_name": "replay", "num_steps": 12}))
            meter._gpu = Gpu("GPU-0", _Replay())
            for step in range(1, 13):
                reading = asdict(meter.read())
                reading |= {"allocated_bytes": 40 * 2**30, "reserved_bytes": 50 * 2**30}
                del reading["notes"], reading["details"]
                log.emit(RunEvent("device", -1, rank, 1e9 + step, reading))
                values = {
                    "num_samples": 8,
                    "step_s": 1.0,
                    "loss": 1 / step,
                    "memory_source": "torch allocator",
                }
                values |= {"peak_bytes": 45 * 2**30, "predicted_bytes": 46 * 2**30, "limit_bytes": 70 * 2**30}
                log.emit(RunEvent("step", step, rank, 1e9 + step, {**_SIZES, **values}))


_SIZES = {"padded_tokens": 128, "padded_patches": 128, "text_waste": 0.1, "image_waste": 0.1}
_USE = {"device": "cpu", "utilization_source": "process CPU"}


def events_of(step: int, time_s: float, rng: random.Random, seed: int) -> list[RunEvent]:
    """One step, and what else comes with it."""
    num_samples, num_tokens, side = 24 + rng.randrange(16), 16 + rng.randrange(48), 16 * rng.randrange(4, 15)
    step_s = 0.08 + 0.002 * num_samples
    peak = 2**20 * (30 + num_samples * (1 + num_tokens / 64))
    loss = 0.5 + (3 - 0.3 * seed) * math.exp(-step / 150) + rng.gauss(0, 0.08)
    values = {
        "epoch": 0, "num_samples": num_samples, "padded_tokens": num_samples * num_tokens, "loss": loss,
        "padded_patches": num_samples * (side // 16) ** 2,
        "combined_waste": abs(rng.gauss(0.1 + 0.2 * seed, 0.05)) % 1, "step_s": step_s,
        "data_wait_s": step_s * abs(rng.gauss(0.05, 0.05)) % 1, "samples_per_s": num_samples / step_s,
        "peak_bytes": peak, "predicted_bytes": peak * rng.uniform(1, 1.1), "memory_source": "live tensors",
    }  # fmt: skip
    found = [RunEvent("step", step, 0, time_s, values)]
    if step % 5 == 1:
        values = {
            "device": "cpu", "memory_bytes": 2**20 * (900 - 200 * seed + 20 * rng.random()),
            "memory_total_bytes": 2**33, "memory_source": "process RSS",
            "utilization_ratio": min(1.0, rng.uniform(0.6, 1.1)),
            "utilization_source": "process CPU",
        }  # fmt: skip
        found.append(RunEvent("device", -1, 0, time_s, values))
    if step % 50 == 0:
        found.append(RunEvent("eval", step, 0, time_s, {"loss": loss + 0.1, "num_samples": 64}))
    return found


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:5]))
