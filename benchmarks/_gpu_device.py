"""Cases of `gpu.py` about the device: is what is read from it true?"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from _common import goal
from _gpu_bench import Bench, Result, Skipped, empty_cache, make_trainer, noise, synchronize


def readings(bench: Bench) -> Result:
    """Does the device meter see what torch allocates, and work when there is some; what does the monitor cost?"""
    import torch

    from mmlab.runs.meters import DeviceMeter
    from mmlab.runs.monitor import DeviceMonitor

    torch.ones(1, device=bench.device)  # the CUDA context is not part of what is measured
    blocks = []
    with DeviceMeter(bench.device) as meter:
        for num_bytes in bench.block_bytes:
            empty_cache(bench.device)
            before, driver_before = meter.read(), _driver_used_bytes(bench.device)
            block = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
            synchronize(bench.device)
            after, driver_after = meter.read(), _driver_used_bytes(bench.device)
            del block
            blocks.append(
                {
                    "block_bytes": num_bytes,
                    "meter_bytes": after.memory_bytes - before.memory_bytes,
                    "driver_bytes": None if driver_after is None else driver_after - driver_before,
                    "allocated_bytes": _difference(after.allocated_bytes, before.allocated_bytes),
                    "reserved_bytes": _difference(after.reserved_bytes, before.reserved_bytes),
                }
            )
        empty_cache(bench.device)
        meter.read()
        time.sleep(bench.busy_s)
        idle = meter.read().utilization_ratio
        _keep_busy(bench)
        busy = meter.read()
    events: list[Any] = []
    with DeviceMonitor(events.append, device=bench.device, interval_s=0.5):
        _keep_busy(bench)
    samples = [event for event in events if event.kind == "device"]
    first, last = samples[0], samples[-1]
    cpu_s = last.values["monitor_cpu_s"] - first.values["monitor_cpu_s"]
    row = {
        "memory_source": busy.memory_source,
        "utilization_source": busy.utilization_source,
        "notes": list(busy.notes),
        "blocks": blocks,
        "idle_utilization_ratio": idle,
        "busy_utilization_ratio": busy.utilization_ratio,
        "reading_s": [sample.values["reading_s"] for sample in samples],
        "monitor_start_cpu_s": first.values["monitor_cpu_s"],
        "monitor_cpu_ratio": cpu_s / (last.time_s - first.time_s),
    }
    worst = max(abs(block["meter_bytes"] / block["block_bytes"] - 1) for block in blocks)
    goals = [
        goal("meter sees a block of known size", "within 1 %", worst, worst <= 0.01),
        goal("busy device reads as busy", ">= 0.9", busy.utilization_ratio, busy.utilization_ratio >= 0.9),
        goal(
            "monitor, share of a core at 2 Hz",
            "<= 0.02",
            row["monitor_cpu_ratio"],
            row["monitor_cpu_ratio"] <= 0.02,
        ),
    ]
    if bench.device.startswith("cuda"):
        exact = all(block["allocated_bytes"] == block["block_bytes"] for block in blocks)
        goals += [
            goal("readings come from NVML", "NVML", busy.memory_source, busy.memory_source == "NVML"),
            goal("torch's allocator counts a block exactly", "exactly", float(exact), exact),
        ]
    return row, goals


def live_bytes(bench: Bench) -> Result:
    """Live bytes counted operation by operation against the peak that torch's allocator reports, for one step."""
    import torch

    from mmlab.runs.meters import LiveBytes

    batch = noise(bench, bench.batch_sizes[-1])
    rows = []
    for precision in ("fp32", "bf16"):
        trainer = make_trainer(bench, precision)
        for _ in range(
            2
        ):  # the optimizer's state and the libraries' workspaces are there from the second step on
            trainer.train_step([batch])
        held = [trainer.model, trainer.optimizer, *_tensors_of(batch)]
        measured: dict[str, Any] = {"precision": precision}
        if bench.device.startswith("cuda"):
            other_bytes = torch.cuda.memory_allocated(bench.device) - LiveBytes().add(*held).current_bytes
            torch.cuda.reset_peak_memory_stats(bench.device)
            trainer.train_step([batch])
            measured["allocator_peak_bytes"] = torch.cuda.max_memory_allocated(bench.device) - other_bytes
        with LiveBytes().add(*held) as live:
            trainer.train_step([batch])
        measured["live_peak_bytes"] = live.peak_bytes
        rows.append(measured)
    goals = []
    for measured in rows:
        if "allocator_peak_bytes" in measured:
            error = measured["live_peak_bytes"] / measured["allocator_peak_bytes"] - 1
            name = f"live bytes against the allocator's peak, {measured['precision']}"
            goals.append(goal(name, "within 5 %", error, abs(error) <= 0.05))
    return {"batch_size": len(batch), "steps": rows}, goals


def device_reads(bench: Bench) -> Result:
    """How often a step waits for the device, with one micro-batch and with four."""
    import torch

    from mmlab.training.noise import noise_batch
    from mmlab.types import BatchShape

    if not bench.device.startswith("cuda"):
        raise Skipped("only CUDA tells of operations that wait for it")
    trainer = make_trainer(bench, "bf16", model_name="tiny")
    shape = BatchShape(8, bench.num_tokens, bench.image_side, bench.image_side)
    batch = noise_batch(shape, num_ids=1000).to(bench.device)
    found: dict[str, list[str]] = {}
    for number in (1, 4):
        for _ in range(2):
            trainer.train_step([batch] * number)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.train_step([batch] * number)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [item for item in told if "synchronizing CUDA" in str(item.message)]
        found[str(number)] = [f"{'/'.join(Path(item.filename).parts[-3:])}:{item.lineno}" for item in waits]
    # BERT of transformers looks at its mask in every forward pass
    counts = [sum("transformers" not in place for place in places) for places in found.values()]
    goals = [
        goal(
            "waits of a step, with one and with four micro-batches",
            "equal",
            f"{counts}",
            counts[0] == counts[1],
        ),
        goal("waits of a step, each loss and the gradient norms", "<= 3", counts[0], counts[0] <= 3),
    ]
    return {"waits_by_micro_batches": found}, goals


def doctor(bench: Bench) -> Result:
    """What the doctor finds on this machine."""
    from mmlab.cli.doctor import diagnose

    found = diagnose().as_dict()
    found["checks"] = [
        check for check in found["checks"] if check["name"] not in ("python", "free disk")
    ]  # paths
    return found, []


def _tensors_of(batch: Any) -> list[Any]:
    found = (batch.pixel_values, batch.pixel_mask, batch.input_ids, batch.attention_mask, batch.groups)
    return [tensor for tensor in found if tensor is not None]


def _keep_busy(bench: Bench) -> None:
    import torch

    dtype = torch.bfloat16 if bench.device.startswith("cuda") else torch.float32
    matrix = torch.randn(bench.matrix_side, bench.matrix_side, device=bench.device, dtype=dtype)
    started = time.perf_counter()
    while time.perf_counter() - started < bench.busy_s:
        for _ in range(10):
            matrix @ matrix
        synchronize(bench.device)


def _driver_used_bytes(device: str) -> int | None:
    import torch

    if not device.startswith("cuda"):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
