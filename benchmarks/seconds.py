"""Seconds predicted beside seconds measured: of steps, of whole epochs, and of models that were not calibrated on.

    python benchmarks/seconds.py [--quick] [--only PART] [--json FILE | --out DIR]

Six parts, on this machine. `steps`: a time model is fitted to 16 short steps of each model and held against eight
shapes that it has not seen. `epochs`: real epochs on generated scenes, from a cache of decoded images, under every
scheduler in turns, loaded by the training thread or by one beside it; the seconds of each beside those that its plan
promises, and beside what they would be at the pace that the machine had when the model was fitted: a few steps, always
of the same shapes, are timed before and after each epoch. `roofline`: seconds from traces alone, with the device's rates
calibrated by measured steps of one preset, against those of the others. `arms`: epochs under `fastest` and other
schedulers at one predicted peak memory. `apart`: what keeping captions of one image apart costs `fastest`, by predicted
seconds, for more and more images. `planning`: how long `fastest` plans ten million samples. Every repetition is
kept. A busy machine is stated by the spread of its repeats, and spoils every figure here.
Run it with OMP_WAIT_POLICY=PASSIVE and GOMP_SPINCOUNT=10000, as `make bench` does.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, print_goals, write_if_asked
from _seconds_arms import apart, arms, judge_arms, planning
from torch import nn
from transformers import CLIPConfig, CLIPModel

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.synthetic import make_dataset
from mmlab.lab.notebook import draw_sizes
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import cpu_name, total_memory_bytes
from mmlab.model.presets import build_model
from mmlab.pricing.devices import Device
from mmlab.pricing.timing import fit_time, loading_seconds, low_seconds, measure_steps, probe_shapes
from mmlab.pricing.trace import StepTracer
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.types import Aspect, BatchShape, Square

SIDE = 80  # of images, pixels
VOCAB_SIZE = 1000
BATCH_SIZE = 32
LARGEST_BATCH = 2500  # padded tokens
PRESETS = ("tiny", "small", "resnet18")
NUM_WORKERS = (0, 1)  # of the loader: none, and one thread, which wants the cores that steps compute on
NUM_IMAGES = {"tiny": 200, "small": 100}
NUM_ROUNDS = {"tiny": 6, "small": 4}  # of epochs under every scheduler
ARMS = ("random", "sorted", "bucket", "budget", "fastest")
CALIBRATED_ON = "tiny"  # judged: its small steps show the launch time and its large ones the arithmetic
NUM_REFERENCE = 4  # shapes that tell the machine's pace
CLEAR_RATIO = 0.05  # between epochs whose order has to be predicted


def main() -> None:
    """Run every part, print rows and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(
        parser, "seconds", quick="tiny alone, small beside it in `roofline`, few samples and repeats"
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part, measure in PARTS.items():
        if options.only in (None, part):
            for row in measure(options.quick):
                print({name: shown(value) for name, value in row.items() if name not in HIDDEN}, flush=True)
                rows.append(row)
    goals = judge(rows)
    print()
    print_goals(goals)
    write_if_asked(options, "seconds", rows, goals)


def steps(quick: bool) -> list[dict[str, Any]]:
    """The errors of a time model on shapes that were not fitted, for each model."""
    drawn = draw_sizes(2000)
    names = PRESETS[:1] if quick else PRESETS
    cases = {name: (preset(name), drawn.resized(Aspect(SIDE**2))) for name in names}
    if not quick:
        cases["CLIP"] = (clip(), drawn.resized(Square(SIDE)))
    rows = []
    for name, (model, sizes) in cases.items():
        started = time.perf_counter()
        fitted = fit_time(
            model, sizes, device="cpu", budget=LARGEST_BATCH, seconds=4 if quick else 50, progress=False
        )
        rows.append(
            {
                "kind": "steps",
                "model": name,
                "fit_s": time.perf_counter() - started,
                "spread_ratio": fitted.spread_ratio,
                "new_shape_s": fitted.new_shape_s,
                **{f"held_out_{key}": value for key, value in fitted.held_out.items()},
                "coefficients": fitted.rows.coefficients[0].tolist(),
                "exponents": fitted.rows.exponents.tolist(),
            }
        )
    return rows


def epochs(quick: bool) -> list[dict[str, Any]]:
    """Epochs of every scheduler in turns, predicted and measured."""
    rows = []
    for name in PRESETS[:1] if quick else PRESETS[:2]:
        with TemporaryDirectory() as temporary:
            scenes = make_dataset(
                Path(temporary) / "scenes",
                num_images=20 if quick else NUM_IMAGES[name],
                val_fraction=0,
                max_side=160,
                progress=False,
            )
            dataset = MultimodalDataset(read_records(scenes, progress=False), image_policy=Aspect(SIDE**2))
            dataset.cache = SampleCache(Path(temporary) / "cache", key=cache_key(dataset))
            build_cache(dataset, progress=False)
            rows += epochs_of(name, dataset, quick=quick)
    return rows


def epochs_of(name: str, dataset: MultimodalDataset, *, quick: bool) -> list[dict[str, Any]]:
    """The same of one preset."""
    all_num_workers, num_rounds = (NUM_WORKERS[:1], 1) if quick else (NUM_WORKERS, NUM_ROUNDS[name])
    sizes, model = dataset.sizes, preset(name, vocab_size=len(dataset.tokenizer))
    trainer = FusionTrainer(model, device="cpu", lr=1e-4, total_steps=10**6)
    reference = probe_shapes(sizes, 1 if quick else NUM_REFERENCE, PaddedTokens(), LARGEST_BATCH)
    at_fit_s = [reference_s(trainer, reference)]
    fitted = fit_time(
        model, sizes, device="cpu", budget=LARGEST_BATCH, seconds=4 if quick else 50, progress=False
    )
    at_fit_s.append(reference_s(trainer, reference))
    times = {
        number: replace(fitted, **loading_seconds(dataset, trainer, num_workers=number))
        for number in all_num_workers
    }
    budget = BATCH_SIZE * float(batch_costs(PaddedTokens(), sizes.alone).mean())
    schedulers = {arm: scheduler_of(arm, budget, fitted) for arm in ARMS}
    turns = [(arm, num_workers) for arm in ARMS for num_workers in all_num_workers]
    measured: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    paces: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    rng = np.random.default_rng(0)
    for number in range(1 + num_rounds):  # the first one warms up
        before_s = reference_s(trainer, reference)
        for place in rng.permutation(len(turns)):
            arm, num_workers = turns[place]
            with PlannedLoader(dataset, schedulers[arm], num_workers=num_workers) as loader:
                trainer.epoch, started = number, time.perf_counter()
                trainer.fit(loader)
                taken_s = time.perf_counter() - started
            if number:
                after_s = reference_s(trainer, reference)
                measured[turns[place]].append(taken_s)
                paces[turns[place]].append((before_s + after_s) / sum(at_fit_s))
                before_s = after_s
    rows = []
    for arm, num_workers in turns:
        plans = [schedulers[arm].plan(sizes, epoch=epoch) for epoch in range(1, 1 + num_rounds)]
        predicted_s = float(np.mean([times[num_workers].epoch_s(plan) for plan in plans]))
        all_s, all_paces = measured[arm, num_workers], paces[arm, num_workers]
        paced_s = median(taken_s / pace for taken_s, pace in zip(all_s, all_paces, strict=True))
        rows.append(
            {
                "kind": "epochs",
                "model": name,
                "num_workers": num_workers,
                "scheduler": arm,
                "num_batches": len(plans[0]),
                "num_shapes": len(set(plans[0].shapes)),
                "new_shape_s": fitted.new_shape_s,
                "predicted_s": predicted_s,
                "measured_s": median(all_s),
                "error_ratio": predicted_s / median(all_s) - 1,
                "paced_s": paced_s,
                "paced_error_ratio": predicted_s / paced_s - 1,
                "samples_per_s": len(sizes) / median(all_s),
                "spread_ratio": fitted.spread_ratio,
                "data_s_per_sample": times[num_workers].data_s_per_sample,
                "shared_s_per_sample": times[num_workers].shared_s_per_sample,
                "all_measured_s": all_s,
                "all_paces": all_paces,
            }
        )
    return rows


def reference_s(trainer: FusionTrainer, shapes: np.ndarray) -> float:
    """Seconds of steps of these shapes, which tell how fast the machine is at the moment."""
    times = measure_steps(trainer, shapes, repeats=2, seconds=0, progress=False)
    return float(times[:, 1:].mean(axis=1).sum())


def roofline(quick: bool) -> list[dict[str, Any]]:
    """Steps of every preset, predicted from traces with the rates of this CPU, as measured and as calibrated."""
    sizes = draw_sizes(2000).resized(Aspect(SIDE**2))
    num_shapes, largest = (4, LARGEST_BATCH // 4) if quick else (8, LARGEST_BATCH)
    shapes = probe_shapes(sizes, num_shapes, PaddedTokens(), largest)
    assumed, found = this_cpu(), {}
    presets = PRESETS[:2] if quick else PRESETS
    for name in presets:
        tracer = StepTracer(preset(name), device="cpu")
        traces = [tracer(BatchShape(*shape)) for shape in shapes.tolist()]
        trainer = FusionTrainer(preset(name), device="cpu", lr=0.0)
        times = measure_steps(
            trainer, shapes, repeats=1 if quick else 6, seconds=4 if quick else 40, progress=False
        )
        found[name] = (traces, *low_seconds(times))
    rows = []
    for source in presets:
        calibrated = assumed.calibrated(*found[source][:2])
        for name, (traces, measured_s, spread_ratio) in found.items():
            raw_s, predicted_s = (
                np.array([device.seconds(trace) for trace in traces]) for device in (assumed, calibrated)
            )
            errors = np.abs(predicted_s / measured_s - 1)
            rows.append(
                {
                    "kind": "roofline",
                    "model": name,
                    "calibrated_on": source,
                    "spread_ratio": spread_ratio,
                    "p50_ratio": float(np.median(errors)),
                    "max_ratio": float(errors.max()),
                    "raw_p50_ratio": float(np.median(np.abs(raw_s / measured_s - 1))),
                    "all_measured_s": measured_s.tolist(),
                    "all_predicted_s": predicted_s.tolist(),
                    "rates": [calibrated.flops_per_s["fp32"], calibrated.bytes_per_s, calibrated.launch_s],
                }
            )
    return rows


def scheduler_of(name: str, budget: float, fitted: Any) -> Scheduler:
    """A scheduler of batches of 32 average samples, or of what these cost."""
    if name == "fastest":
        return make_scheduler(name, budget=budget, time=fitted)
    return make_scheduler(name, **({"budget": budget} if name == "budget" else {"batch_size": BATCH_SIZE}))


def this_cpu() -> Device:
    """Rates of this CPU as large operations reach them; the launch time is assumed."""
    matrix, source, target = torch.randn(1024, 1024), torch.randn(2**22), torch.empty(2**22)
    return Device(
        name=cpu_name(),
        kind="cpu",
        flops_per_s={"fp32": 2 * 1024**3 / shortest_s(lambda: matrix @ matrix)},
        bytes_per_s=2 * source.nbytes / shortest_s(lambda: target.copy_(source)),
        launch_s=2e-5,
        memory_bytes=total_memory_bytes(),
        source="measured here",
    )


def shortest_s(work: Any) -> float:
    """Seconds of the quickest of ten calls."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def preset(name: str, *, vocab_size: int = VOCAB_SIZE) -> nn.Module:
    """With the same first weights every time."""
    torch.manual_seed(0)
    return build_model(name, vocab_size=vocab_size)


def clip() -> CLIPModel:
    """A small CLIP of transformers, from a configuration."""
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config={**sizes, "image_size": SIDE, "patch_size": 16})
    )


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, with the worst of what was measured."""
    goals = []
    for row in rows:
        if row["kind"] == "steps":
            for quantile, bound in (("p50", 0.05), ("p95", 0.12)):
                error = row[f"held_out_{quantile}_ratio"]
                goals.append(
                    goal(
                        f"{row['model']}: held-out {quantile} error", f"<= {bound:.0%}", error, error <= bound
                    )
                )
        if row["kind"] == "roofline" and row["calibrated_on"] == CALIBRATED_ON != row["model"]:
            name = f"roofline calibrated on {row['calibrated_on']}: {row['model']}, median error"
            goals.append(goal(name, "<= 25 %", row["p50_ratio"], row["p50_ratio"] <= 0.25))
    of_epochs = [row for row in rows if row["kind"] == "epochs"]
    for name, num_workers in dict.fromkeys((row["model"], row["num_workers"]) for row in of_epochs):
        own = [row for row in of_epochs if (row["model"], row["num_workers"]) == (name, num_workers)]
        what = f"{name}, {num_workers} workers"
        for kind, key in (("", "error_ratio"), (" at the fit's pace", "paced_error_ratio")):
            worst = max(abs(row[key]) for row in own)
            goals.append(goal(f"{what}: worst epoch error{kind}", "<= 7 %", worst, worst <= 0.07))
        clear, wrong = compare_orders(own)
        measured = f"{clear - len(wrong)} of {clear} pairs" + (f", not {', '.join(wrong)}" if wrong else "")
        name = f"{what}: order of schedulers more than 5 % apart"
        goals.append(goal(name, "as predicted", measured, not wrong))
    return goals + judge_arms(rows)


def compare_orders(rows: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many pairs of schedulers are clearly apart, and those of them whose order was predicted the other way."""
    clear = [
        (one, other)
        for one, other in combinations(rows, 2)
        if abs(one["paced_s"] / other["paced_s"] - 1) > CLEAR_RATIO
    ]
    wrong = [
        f"{one['scheduler']}/{other['scheduler']}"
        for one, other in clear
        if (one["paced_s"] < other["paced_s"]) != (one["predicted_s"] < other["predicted_s"])
    ]
    return len(clear), wrong


def shown(value: Any) -> Any:
    """Four digits of a number."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


PARTS = {
    "steps": steps,
    "epochs": epochs,
    "roofline": roofline,
    "arms": arms,
    "apart": apart,
    "planning": planning,
}
HIDDEN = {"coefficients", "exponents", "all_measured_s", "all_paces", "all_predicted_s", "rates"}

if __name__ == "__main__":
    main()
