"""Cases of `gpu.py` about single steps: what they take, and whether it was predicted."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from _common import goal
from _gpu_bench import Bench, Result, Skipped, empty_cache, make_trainer, noise, synchronize


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
    trainer = make_trainer(bench, "bf16", model_name=bench.compare_model)
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
                synchronize(bench.device)
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
            "as written": make_trainer(bench, "bf16", model_name=name),
            "compiled": make_trainer(bench, "bf16", model_name=name, compile=bench.compile),
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
        empty_cache(bench.device)
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


def _time_precisions(bench: Bench, batch_size: int) -> dict[str, Any] | None:
    """Every repetition of every precision at a batch size; None when the device has too little memory for it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    on_gpu = bench.device.startswith("cuda")
    names = ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16", "fp16")
    try:
        batch = noise(bench, batch_size)
        trainers = {name: make_trainer(bench, name) for name in names}
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
                synchronize(bench.device)
                held_bytes = torch.cuda.memory_allocated(bench.device) if on_gpu else 0
                started = time.perf_counter()
                for _ in range(num_steps):
                    values = trainers[name].train_step([batch])
                synchronize(bench.device)
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


def _num_device_allocations(device: str) -> int:
    """How often torch's allocator has asked the device for memory."""
    import torch

    return torch.cuda.memory_stats(device)["num_device_alloc"] if device.startswith("cuda") else 0
