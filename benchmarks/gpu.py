"""Measure on a machine with a CUDA device: readings, precisions, bytes, seconds, loops, schedulers, the articles.

    PYTHONPATH=. python benchmarks/gpu.py --out DIR        (or: make gpu)

Needs torch, transformers and the libraries that mmlab's training imports; what else is missing (Jupyter, nvidia-ml-py,
numba) costs only the cases that need it, which are then recorded as skipped. Writes DIR/gpu.json after every case,
with every repetition, and ends within `--seconds` (900 unless told): a case for which too little time is left is
skipped, one that takes too long is cut off, and both are recorded. A file of this machine that is there keeps what this
run does not measure; each row has its own date, and the code that it measured. `--quick` takes small sizes and few repetitions.
Exit code: 0 done, 1 a case failed, 2 no CUDA device.

To add a case: a function that takes a `Bench` and returns a row and its goals, and one line in `CASES`.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from _common import goal, machine, measured_code, now, print_goals, write_results

GIB = 2**30
Result = tuple[dict[str, Any], list[dict[str, Any]]]  # a row, its goals


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where to measure, and how large: sizes that fill a big GPU; tests make them small."""

    device: str = "cuda"
    block_bytes: tuple[int, ...] = (GIB, 4 * GIB)
    matrix_side: int = 8192
    busy_s: float = 2.5
    model: str = "base"
    batch_sizes: tuple[int, ...] = (128, 64, 32, 16)  # the first that fits
    image_side: int = 224
    num_tokens: int = 64
    num_repeats: int = 5
    steps_per_repeat: int = 3
    num_warmup_steps: int = 4
    timed_models: tuple[str, ...] = ("tiny", "small", "resnet18", "base")
    timed_budget: float = 30_000  # padded tokens of the largest timed batch
    fit_s: float = 5.0  # of measured steps for each time model
    specification: str | None = None  # in `mmlab.pricing.DEVICES`; None finds the card by its name
    compiled_models: tuple[str, ...] = ("base",)
    compile: bool | str = True  # as in `TrainOptions`
    num_compiled_shapes: int = 6
    overhead_rounds: int = 15
    num_new_shapes: int = 16
    compare_images: int = 600
    compare_model: str = "base"
    compare_image: str = "aspect:224"
    compare_epochs: int = 2
    compare_batch_size: int = 128
    article_images: int = 300
    article_captions: int = 5
    article_rounds: int = 3
    article_batch_size: int = 64
    num_workers: int | None = None  # of loaders and of making data; None takes one a core, at most 8


QUICK = Bench(
    batch_sizes=(16,),
    busy_s=0.5,
    num_repeats=2,
    steps_per_repeat=1,
    timed_models=("tiny", "small"),
    timed_budget=8000,
    fit_s=2.0,
    compiled_models=("tiny",),
    num_compiled_shapes=2,
    overhead_rounds=2,
    num_new_shapes=4,
    compare_images=60,
    compare_model="small",
    compare_epochs=1,
    compare_batch_size=16,
    article_images=40,
    article_rounds=1,
    article_batch_size=8,
)


class Skipped(Exception):
    """A case cannot run here; the message says why."""


def readings(bench: Bench) -> Result:
    """Does the device meter see what torch allocates, and work when there is some; what does the monitor cost?"""
    import torch

    from mmlab.runs.meters import DeviceMeter
    from mmlab.runs.monitor import DeviceMonitor

    torch.ones(1, device=bench.device)  # the CUDA context is not part of what is measured
    blocks = []
    with DeviceMeter(bench.device) as meter:
        for num_bytes in bench.block_bytes:
            _empty_cache(bench.device)
            before, driver_before = meter.read(), _driver_used_bytes(bench.device)
            block = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
            _synchronize(bench.device)
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
        _empty_cache(bench.device)
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


def precisions(bench: Bench) -> Result:
    """Training steps in fp32 (without TF32), TF32, bf16 and fp16, in turns; bf16 twice, to show the noise."""
    import torch

    for batch_size in bench.batch_sizes:
        row = _time_precisions(bench, batch_size)
        if row is not None:
            break
        gc.collect()
        torch.cuda.empty_cache()
    else:
        raise Skipped(f"not even a batch of {bench.batch_sizes[-1]} fits into this device's memory")
    step_s = {name: statistics.median(times) for name, times in row["step_s"].items()}
    row |= {
        "median_step_s": step_s,
        "samples_per_s": {name: row["batch_size"] / seconds for name, seconds in step_s.items()},
        "tflop_per_s": {name: row["flop_per_step"] / seconds / 1e12 for name, seconds in step_s.items()},
    }
    speedup = step_s["fp32"] / step_s["bf16"]
    noise = abs(step_s["bf16 again"] / step_s["bf16"] - 1)
    goals = [
        goal("bf16 over fp32 without TF32", ">= 2", speedup, speedup >= 2),
        goal("bf16 against itself", "within 3 %", noise, noise <= 0.03),
    ]
    return row, goals


def live_bytes(bench: Bench) -> Result:
    """Live bytes counted operation by operation against the peak that torch's allocator reports, for one step."""
    import torch

    from mmlab.runs.meters import LiveBytes

    batch = _batch(bench, bench.batch_sizes[-1])
    rows = []
    for precision in ("fp32", "bf16"):
        trainer = _trainer(bench, precision)
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
    trainer = _trainer(bench, "bf16", model_name="tiny")
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


def step_seconds(bench: Bench) -> Result:
    """A time model on shapes that it has not seen; and seconds from the card's data sheet alone, then calibrated."""
    import numpy as np
    import torch

    from mmlab.lab.notebook import draw_sizes
    from mmlab.model.presets import build_model
    from mmlab.pricing.timing import fit_time, low_seconds, measure_steps, probe_shapes, timed_trainer
    from mmlab.pricing.trace import StepTracer
    from mmlab.schedule.cost import PaddedTokens
    from mmlab.types import Aspect, BatchShape

    sizes = draw_sizes(2000).resized(Aspect(bench.image_side**2))
    options: dict[str, Any] = {"device": bench.device, "precision": "bf16"}
    card = _specification(bench)
    rows, traced, goals = [], {}, []
    for name in bench.timed_models:
        torch.manual_seed(0)
        model = build_model(name, vocab_size=1000)
        started = time.perf_counter()
        fitted = fit_time(
            model, sizes, budget=bench.timed_budget, seconds=bench.fit_s, progress=False, **options
        )
        fit_s = time.perf_counter() - started
        shapes = probe_shapes(sizes, 8, PaddedTokens(), bench.timed_budget)
        times = measure_steps(
            timed_trainer(model, **options), shapes, repeats=6, seconds=bench.fit_s, progress=False
        )
        measured_s, spread_ratio = low_seconds(times)
        tracer = StepTracer(model, **options)
        traced[name] = [tracer(BatchShape(*shape)) for shape in shapes.tolist()]
        rows.append(
            {
                "model": name,
                "fit_s": fit_s,
                **{f"held_out_{key}": value for key, value in fitted.held_out.items()},
                "spread_ratio": spread_ratio,
                "coefficients": fitted.rows.coefficients[0].tolist(),
                "exponents": fitted.rows.exponents.tolist(),
                "shapes": shapes.tolist(),
                "all_measured_s": times.tolist(),
                "measured_s": measured_s.tolist(),
            }
        )
        for quantile, bound in (("p50", 0.05), ("p95", 0.12)):
            error = fitted.held_out[f"{quantile}_ratio"]
            goals.append(goal(f"{name}: held-out {quantile} error", f"<= {bound:.0%}", error, error <= bound))
        goals.append(goal(f"{name}: seconds of a fit", "<= 15", fit_s, fit_s <= 15))
    first = rows[0]
    calibrated = card.calibrated(traced[first["model"]], first["measured_s"], "bf16")
    for row in rows:
        for kind, device in (("data_sheet", card), ("calibrated", calibrated)):
            predicted_s = [device.seconds(trace, "bf16") for trace in traced[row["model"]]]
            errors = np.abs(np.array(predicted_s) / row["measured_s"] - 1)
            row |= {f"{kind}_s": predicted_s, f"{kind}_p50_ratio": float(np.median(errors))}
        if row is not first:
            error = row["calibrated_p50_ratio"]
            name = f"{card.name} calibrated on {first['model']}: {row['model']}, median error"
            goals.append(goal(name, "<= 25 %", error, error <= 0.25))
    rates = [calibrated.flops_per_s["bf16"], calibrated.bytes_per_s, calibrated.launch_s]
    return {"specification": card.name, "calibrated_rates": rates, "models": rows}, goals


def new_shapes(bench: Bench) -> Result:
    """What a batch of a new shape costs: steps seen for the first time and again; attention, and the patch embedding."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from mmlab.training.noise import noise_batch
    from mmlab.types import BatchShape

    rng, device = np.random.default_rng(0), torch.device(bench.device)
    shapes = [
        BatchShape(bench.batch_sizes[-1] + 3 * number, 8 + number, *(16 * rng.integers(4, 20, 2)).tolist())
        for number in range(bench.num_new_shapes)
    ]
    batches = [noise_batch(shape, num_ids=1000).to(device) for shape in shapes]
    trainer = _trainer(bench, "bf16", model_name=bench.compare_model)
    embedding = nn.Conv2d(3, 768, 16, stride=16, device=device, dtype=torch.bfloat16)
    images = [torch.rand(*batch.pixel_values.shape, device=device, dtype=torch.bfloat16) for batch in batches]
    queries = [
        torch.rand(len(image), 12, image[0, 0].numel() // 256, 64, device=device, dtype=torch.bfloat16)
        for image in images
    ]

    def attend(place: int, kernel: SDPBackend) -> None:
        query = queries[place].requires_grad_()
        mask = torch.ones(len(query), 1, 1, query.shape[2], dtype=torch.bool, device=device)
        with sdpa_kernel([kernel, SDPBackend.MATH]):
            scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()

    works: dict[str, Callable[[int], Any]] = {
        "patch embedding": lambda place: embedding(images[place]).sum().backward(),
        "attention by cuDNN": lambda place: attend(place, SDPBackend.CUDNN_ATTENTION),
        "attention without cuDNN": lambda place: attend(place, SDPBackend.EFFICIENT_ATTENTION),
        "step": lambda place: trainer.train_step([batches[place]]),
    }
    rows = []
    for name, work in works.items():
        for seen in ("first", "again", "once more"):
            for place in rng.permutation(len(shapes)).tolist():
                allocations, started = _num_device_allocations(bench.device), time.perf_counter()
                work(place)
                _synchronize(bench.device)
                rows.append(
                    {
                        "work": name,
                        "seen": seen,
                        "shape": list(shapes[place]),
                        "seconds": time.perf_counter() - started,
                        "num_device_allocations": _num_device_allocations(bench.device) - allocations,
                    }
                )
    first_s, again_s = (
        statistics.median(row["seconds"] for row in rows if (row["work"], row["seen"]) == ("step", seen))
        for seen in ("first", "once more")
    )
    longer = first_s / again_s - 1
    return {"works": rows}, [goal("a new shape makes a step longer by", "<= 10 %", longer, longer <= 0.1)]


def compiling(bench: Bench) -> Result:
    """Steps through torch.compile beside steps without it, on several shapes: seconds of the first, and of later ones."""
    import numpy as np

    from mmlab.lab.notebook import draw_sizes
    from mmlab.pricing.timing import noise_batches, probe_shapes, timed_step
    from mmlab.schedule.cost import PaddedTokens
    from mmlab.types import Aspect

    sizes = draw_sizes(2000).resized(Aspect(bench.image_side**2))
    shapes = probe_shapes(sizes, bench.num_compiled_shapes, PaddedTokens(), bench.timed_budget)
    rows, goals = [], []
    for name in bench.compiled_models:
        trainers = {
            "as written": _trainer(bench, "bf16", model_name=name),
            "compiled": _trainer(bench, "bf16", model_name=name, compile=bench.compile),
        }
        batches = [batch.to(bench.device) for batch in noise_batches(trainers["compiled"], shapes)]
        first_s = {
            arm: [timed_step(trainer, batch) for batch in batches] for arm, trainer in trainers.items()
        }
        step_s: dict[str, list[list[float]]] = {arm: [] for arm in trainers}
        for repeat in range(2 * bench.num_repeats):
            for arm in (list(trainers), list(trainers)[::-1])[repeat % 2]:
                step_s[arm].append([timed_step(trainers[arm], batch) for batch in batches])
        rows.append({"model": name, "shapes": shapes.tolist(), "first_s": first_s, "step_s": step_s})
        written, compiled = (np.median(times, axis=0) for times in step_s.values())
        ratio = float(np.median(compiled / written))
        goals.append(goal(f"{name}: a compiled step over one as written", "<= 0.9", ratio, ratio <= 0.9))
        del trainers
        _empty_cache(bench.device)
    return {"models": rows}, goals


def loops(bench: Bench) -> Result:
    """A short step by hand, by FusionTrainer and by other projects, in turns."""
    from _trainer_loops import measure_overhead
    from trainer import judge

    from mmlab.training.noise import noise_batch
    from mmlab.types import BatchShape

    shapes = [BatchShape(8, 8 + 2 * number, 64, 64) for number in range(8)]
    batches = [noise_batch(shape, num_ids=1000, seed=number) for number, shape in enumerate(shapes)]
    rows = measure_overhead(batches, vocab_size=1000, num_rounds=bench.overhead_rounds, device=bench.device)
    rows = [row | {"step": "short step"} for row in rows]
    return {"loops": rows}, judge(rows)


def articles(bench: Bench) -> Result:
    """The articles' way of feeding a model, what everyone does today, and mmlab, one change at a time."""
    from _articles_setting import MMLAB, Accelerator, measure_articles
    from trainer import judge

    from mmlab.data.readers import read_records
    from mmlab.data.synthetic import make_dataset
    from mmlab.loading.loader import default_num_workers

    on = Accelerator(
        device=bench.device,
        precision="bf16",
        model=bench.compare_model,
        batch_size=bench.article_batch_size,
        num_workers=bench.num_workers or default_num_workers(),
        lr=1e-4,
        fit_s=bench.fit_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        data = make_dataset(
            Path(folder) / "coco-like",
            num_images=bench.article_images,
            captions_per_image=bench.article_captions,
            max_side=640,
            val_fraction=0,
            progress=False,
        )
        records = read_records(data, progress=False)
        rows = measure_articles(records, Path(folder) / "caches", num_rounds=bench.article_rounds, on=on)
    goals = judge(rows)
    if bench.device.startswith("cuda"):
        (ours,) = (row for row in rows if row["arm"] == MMLAB)
        used = statistics.median(found["utilization_ratio"] for found in ours["rounds"])
        goals.append(
            goal("share of the time in which the GPU works, by NVML", ">= 0.9, as claimed", used, used >= 0.9)
        )
    return {"arms": rows}, goals


def loading(bench: Bench) -> Result:
    """Steps, and starting one operation, beside loaders at work: threads, processes, torch's DataLoader."""
    from beside_loader import judge, measure, scenes

    from mmlab.loading.loader import default_num_workers

    trainer = _trainer(bench, "bf16", model_name=bench.compare_model)
    batch = _batch(bench, bench.article_batch_size)
    trainer.train_step([batch])
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(
            scenes(folder, bench.article_images, bench.image_side),
            sorted({1, bench.num_workers or default_num_workers()}),
            rounds=bench.article_rounds,
            seconds=bench.busy_s,
            device=bench.device,
            step=lambda: trainer.train_step([batch])["step_s"],
        )
    return {"loaders": rows}, judge(rows)


def compare_schedulers(bench: Bench) -> Result:
    """The main job on this device, on generated data: all schedulers within the memory that `random` needs."""
    from mmlab.comparison.experiment import compare
    from mmlab.data.synthetic import make_dataset

    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(
            make_dataset(
                Path(folder) / "data",
                num_images=bench.compare_images,
                progress=False,
            ),
            ("random", "sorted", "bucket", "budget", "fastest"),
            batch_size=bench.compare_batch_size,
            epochs=bench.compare_epochs,
            model=bench.compare_model,
            image=bench.compare_image,
            device=bench.device,
            precision="bf16",
            num_workers=bench.num_workers,
            out=Path(folder) / "out",
            progress=False,
        )
        row = (
            comparison.as_dict()
            | _device_events(Path(folder) / "out" / "runs")
            | {"data": "generated scenes"}
        )
    arms = {arm.scheduler: arm for arm in comparison.arms}
    best, base = arms["fastest"], arms["random"]
    waste = best.combined_waste / base.combined_waste
    goals = [goal("padding, fastest over random", "<= 0.5", waste, waste <= 0.5)]
    for name, arm in arms.items():
        bound = 1.4 if name == "random" else 1.0
        if name != "fastest":
            speed = best.samples_per_s / arm.samples_per_s
            goals.append(goal(f"samples/s, fastest over {name}", f">= {bound:g}", speed, speed >= bound))
        if arm.predicted_samples_per_s is not None:
            error = arm.predicted_samples_per_s / arm.samples_per_s - 1
            goals.append(goal(f"samples/s predicted, {name}", "within 7 %", error, abs(error) <= 0.07))
    wait = best.data_wait_ratio
    goals.append(goal("data wait, fastest", "<= 0.01", wait, wait <= 0.01))
    return row, goals


def doctor(bench: Bench) -> Result:
    """What the doctor finds on this machine."""
    from mmlab.cli.doctor import diagnose

    found = diagnose().as_dict()
    found["checks"] = [
        check for check in found["checks"] if check["name"] not in ("python", "free disk")
    ]  # paths
    return found, []


class Case(NamedTuple):
    """What to run, and the time under which it is not worth starting."""

    run: Callable[[Bench], Result]
    least_s: float


CASES = {  # the comparison is last: cut off, it keeps the epochs that it has
    "new_shapes": Case(new_shapes, 15),
    "precisions": Case(precisions, 25),
    "articles": Case(articles, 60),
    "step_seconds": Case(step_seconds, 40),
    "live_bytes": Case(live_bytes, 20),
    "device_reads": Case(device_reads, 5),
    "readings": Case(readings, 20),
    "loops": Case(loops, 15),
    "compiling": Case(compiling, 90),
    "doctor": Case(doctor, 15),
    "loading": Case(loading, 60),
    "compare": Case(compare_schedulers, 60),
}


def run_cases(
    bench: Bench, names: list[str], *, deadline: float, save: Callable[[list, list], object]
) -> list[dict]:
    """Run cases in order and `save(rows, goals)` after each; returns the rows.

    Args:
        deadline: of `time.monotonic`; a case is skipped when it has less than its `least_s` left, and cut off then.
    """
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    for name in names:
        case, started = CASES[name], time.monotonic()
        left_s = deadline - started
        row: dict[str, Any] = {"case": name, "status": "done"}
        try:
            if left_s < case.least_s:
                raise Skipped(f"{left_s:.0f} s left, it needs {case.least_s:.0f}")
            with _cut_off_after(left_s):
                figures, found = case.run(bench)
            row |= figures
            goals += [{"case": name, **item} for item in found]
        except (Skipped, ImportError) as error:
            row |= {"status": "skipped", "reason": str(error)}
        except KeyboardInterrupt:
            if time.monotonic() < deadline:  # by the user
                raise
            row |= {"status": "skipped", "reason": f"cut off after {left_s:.0f} s"}
        except Exception as error:  # the other cases are still worth running; the row keeps what went wrong
            row |= {"status": "failed", "reason": repr(error), "traceback": traceback.format_exc()}
        row |= {"wall_s": time.monotonic() - started, "date": now(), "code": measured_code()}
        rows.append(row)
        save(rows, goals)
        print(f"{name:<12} {row['status']:<8} {row['wall_s']:6.1f} s  {row.get('reason', '')}", flush=True)
    return rows


def with_earlier(
    before: dict[str, Any], rows: list[dict[str, Any]], goals: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals of this run, and of an earlier one those of the cases that this run has not measured."""
    done = {row["case"] for row in rows if row["status"] == "done"}
    kept = [row for row in before["rows"] if row["case"] not in done]
    names = {row["case"] for row in kept}
    return (
        [*kept, *(row for row in rows if row["case"] not in names)],
        [*(item for item in before["goals"] if item["case"] not in done), *goals],
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--cases", default=",".join(CASES), help="cases to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=900, help="time for everything")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    options = parser.parse_args(arguments)
    names = options.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    import torch

    if not torch.cuda.is_available():
        print(
            "gpu.py: torch sees no CUDA device; run this on a machine with one (mmlab doctor says why)",
            file=sys.stderr,
        )
        return 2
    path = options.out / "gpu.json"
    last: list[Any] = []
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if before.get("machine") != machine():
        before = {"rows": [], "goals": []}

    def save(rows: list[Any], goals: list[Any]) -> None:
        write_results(path, *with_earlier(before, rows, goals))
        last[:] = goals

    rows = run_cases(
        QUICK if options.quick else Bench(), names, deadline=started + options.seconds, save=save
    )
    print_goals(last)
    print(
        f"{path}: {len(rows)} cases in {time.monotonic() - started:.0f} s on {torch.cuda.get_device_name()}"
    )
    return int(any(row["status"] == "failed" for row in rows))


def _specification(bench: Bench) -> Any:
    """What the data sheet says of the card.

    Raises:
        Skipped: mmlab has none of it.
    """
    import torch

    from mmlab.pricing.devices import DEVICES, find_device

    if bench.specification is not None:
        return replace(find_device(bench.specification), kind=bench.device)
    name = torch.cuda.get_device_name()
    for card in DEVICES:
        if card.name.removesuffix(" SXM").removesuffix(" 80GB") in name:
            return card
    raise Skipped(f"no data sheet of {name}")


def _device_events(folder: Path) -> dict[str, Any]:
    """What the monitor's events of a comparison say."""
    from mmlab.runs.events import read_runs

    events = read_runs(folder)
    device, steps = events[events["kind"] == "device"], events[events["kind"] == "step"]
    columns = ["num_samples", "num_tokens", "height", "width", "step_s", "data_wait_s"]
    return {
        "steps": {run: found[columns].values.tolist() for run, found in steps.groupby("run")},
        "memory_sources": sorted(device["memory_source"].unique()),
        "median_utilization_ratio": device.groupby("run")["utilization_ratio"].median().to_dict(),
    }


def _time_precisions(bench: Bench, batch_size: int) -> dict[str, Any] | None:
    """Every repetition of every precision at a batch size; None when the device has too little memory for it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    on_gpu = bench.device.startswith("cuda")
    names = ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16", "fp16")
    try:
        batch = _batch(bench, batch_size)
        trainers = {name: _trainer(bench, name) for name in names}
        with FlopCounterMode(display=False) as flops:
            trainers["fp32"].train_step([batch])
        trainers["bf16 again"] = trainers["bf16"]
        times: dict[str, list[float]] = {name: [] for name in trainers}
        step_bytes: dict[str, int] = {}  # peak above what is held between steps, all models and their moments
        losses: dict[str, float] = {}
        for repeat in range(-1, bench.num_repeats):  # the first round is warm-up
            order = list(trainers)
            turn = repeat % len(order)
            for name in order[turn:] + order[:turn]:
                num_steps = bench.num_warmup_steps if repeat < 0 else bench.steps_per_repeat
                _synchronize(bench.device)
                held_bytes = torch.cuda.memory_allocated(bench.device) if on_gpu else 0
                started = time.perf_counter()
                for _ in range(num_steps):
                    values = trainers[name].train_step([batch])
                _synchronize(bench.device)
                seconds = (time.perf_counter() - started) / num_steps
                if repeat >= 0:
                    times[name].append(seconds)
                step_bytes[name], losses[name] = values["peak_bytes"] - held_bytes, values["loss"]
    except torch.OutOfMemoryError:
        return None
    return {
        "model": bench.model,
        "num_parameters": sum(weight.numel() for weight in trainers["fp32"].parameters),
        "batch_size": batch_size,
        "image_side": bench.image_side,
        "num_tokens": bench.num_tokens,
        "flop_per_step": flops.get_total_flops(),
        "step_s": times,
        "step_bytes": step_bytes,
        "memory_source": values["memory_source"],
        "loss": losses,
    }


def _trainer(bench: Bench, precision: str, *, model_name: str | None = None, **options: Any) -> Any:
    import torch

    from mmlab.model.presets import build_model
    from mmlab.training.loop import FusionTrainer

    torch.manual_seed(0)
    model = build_model(model_name or bench.model, vocab_size=1000)
    return FusionTrainer(
        model, objectives=("contrastive", "matching"), precision=precision, device=bench.device, **options
    )


def _batch(bench: Bench, batch_size: int) -> Any:
    """A batch of noise on the device, texts of one half to the whole of the padded length."""
    import torch

    from mmlab.types import Batch

    draw = torch.Generator().manual_seed(0)
    side, length = bench.image_side, bench.num_tokens
    lengths = torch.randint(length // 2, length + 1, (batch_size, 1), generator=draw)
    lengths[0] = length
    batch = Batch(
        pixel_values=torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, generator=draw),
        pixel_mask=torch.ones(batch_size, side, side, dtype=torch.bool),
        input_ids=torch.randint(0, 1000, (batch_size, length), generator=draw),
        attention_mask=torch.arange(length) < lengths,
        labels=None,
        record_ids=[str(number) for number in range(batch_size)],
        groups=torch.arange(batch_size),
    )
    return batch.to(bench.device)


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
        _synchronize(bench.device)


@contextmanager
def _cut_off_after(seconds: float) -> Iterator[None]:
    """Interrupt as Ctrl-C does, so that a comparison keeps the epochs that it has."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _empty_cache(device: str) -> None:
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _driver_used_bytes(device: str) -> int | None:
    import torch

    if not device.startswith("cuda"):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def _num_device_allocations(device: str) -> int:
    """How often torch's allocator has asked the device for memory."""
    import torch

    return torch.cuda.memory_stats(device)["num_device_alloc"] if device.startswith("cuda") else 0


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


if __name__ == "__main__":
    sys.exit(main())
