"""Memory known before it is spent: how right predictions are, and what that is worth on a device with a limit.

    python benchmarks/memory.py [--quick] [--device cpu|cuda] [--only NAME ...] [--add] [--json FILE | --out DIR]

Accuracy: for each model, precision and checkpointing, a closed form fitted to 14 small simulated steps is set against
the simulator on 10 unseen shapes (40 a model), up to far larger, and against real steps: on a CPU the live bytes of
tensors, on CUDA `torch.cuda.max_memory_allocated`. Faults: out of memory at every single operation of a step. Policies:
one run under a limit by ours and by other projects' ways to choose a batch size (those that are installed: accelerate,
Lightning); on CUDA, epochs within shares of the GPU. `--quick` takes two models, few shapes and every 80th
operation. Exit code 0: done, whether or not every goal is met.

Every row names the machine that measured it, and a file has the rows of one machine, one set of versions and one state
of the code: `--add` keeps the rows that a file has already, and refuses a file of another machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import (
    COCO_LENGTHS,
    add_common_options,
    goal,
    machine,
    measured_code,
    print_goals,
    versions,
    write_results,
)
from _memory_arms import (
    OBJECTIVES,
    VOCAB_SIZE,
    RandomBatches,
    Use,
    make_trainer,
    random_batch,
    run_accelerate,
    run_lightning,
    run_ours,
    run_restarting,
)
from torch import nn
from tqdm import tqdm

from mmlab import __version__
from mmlab.errors import OptionError, RunError
from mmlab.model.presets import build_model
from mmlab.pricing.closed_form import held_out_errors
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.trace import StepTracer
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.runs.meters import LiveBytes
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.preview import read_lengths
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.types import PATCH, Aspect, BatchShape, SampleSizes

RESNET_CELL = (
    32  # pixels: a ResNet's last stage has one position for so many, and the fit is exact on multiples
)
ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def clip() -> nn.Module:
    """A small CLIP from its configuration, of one image size."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    config = CLIPConfig(
        text_config={**small, "vocab_size": VOCAB_SIZE, "eos_token_id": 2, "max_position_embeddings": 256},
        vision_config={**small, "image_size": 112, "patch_size": 16},
        projection_dim=128,
    )
    return CLIPModel(config)


def vilt() -> nn.Module:
    """A small ViLT for masked language modelling."""
    from transformers import ViltConfig, ViltForMaskedLM

    from mmlab.model.huggingface import LossModel

    config = ViltConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        image_size=112, patch_size=16, max_position_embeddings=256,
    )  # fmt: skip
    return LossModel(ViltForMaskedLM(config), labels="text")


def bert() -> nn.Module:
    """A small BERT for masked language modelling: text only."""
    from transformers import BertConfig, BertForMaskedLM

    from mmlab.model.huggingface import LossModel

    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    return LossModel(BertForMaskedLM(config), labels="text")


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the padded tokens of a real step on a CPU
    "tiny": (partial(build_model, "tiny", vocab_size=VOCAB_SIZE), 12_000),
    "small (ViT)": (partial(build_model, "small", vocab_size=VOCAB_SIZE), 1500),
    "resnet18": (partial(build_model, "resnet18", vocab_size=VOCAB_SIZE), 2500),
    "base (ViT)": (partial(build_model, "base", vocab_size=VOCAB_SIZE), 250),
    "resnet50": (partial(build_model, "resnet50", vocab_size=VOCAB_SIZE), 350),
    "CLIP": (clip, 6000),
    "ViLT": (vilt, 6000),
    "BERT": (bert, 6000),
}


def accuracy(name: str, *, num_shapes: int, seconds: float, **setting: Any) -> dict[str, Any]:
    """One model under one setting: closed form against simulator, and against real steps for so many seconds."""
    make, padded_tokens = MODELS[name]
    torch.manual_seed(0)
    model = make()
    started = time.process_time()
    cell = RESNET_CELL if name.startswith("resnet") else PATCH
    memory = fit_memory(model, num_held_out=0, progress=False, patch=cell, **setting)
    fit_cpu_s = time.process_time() - started
    tracer = StepTracer(model, **setting)
    unseen = unseen_shapes(model, num_shapes, cell)
    simulated = np.array([tracer(BatchShape(*map(int, shape))).peak_bytes for shape in unseen])
    against_simulator = held_out_errors(batch_costs(memory, unseen), simulated)
    shapes, measured = real_peaks(model, unseen, padded_tokens, seconds=seconds, **setting)
    real_simulated = np.array([tracer(BatchShape(*map(int, shape))).peak_bytes for shape in shapes])
    evaluate_us = timed_us(memory, BatchShape(*map(int, unseen[0])))
    row = {
        "kind": "accuracy",
        "model": name,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        **setting,
        "cell": cell,
        "fit_cpu_s": fit_cpu_s,
        "num_rows": len(memory.rows.coefficients),
        "evaluate_us": evaluate_us,
        **{f"closed_form_{key}": value for key, value in against_simulator.items()},
        "largest_simulated_bytes": int(simulated.max()),
        **{
            f"simulator_to_real_{key}": value
            for key, value in held_out_errors(real_simulated, measured).items()
        },
        **{
            f"real_{key}": value
            for key, value in held_out_errors(batch_costs(memory, shapes), measured).items()
        },
        "largest_real_bytes": int(measured.max()),
        "real_shapes": shapes.tolist(),
        "real_bytes": measured.tolist(),
        "predicted_bytes": [int(value) for value in batch_costs(memory, shapes)],
    }
    if setting["device"] == "cuda":
        calibrated = memory.calibrated(BatchShape(*map(int, shapes[0])), int(measured[0]))
        errors = held_out_errors(batch_costs(calibrated, shapes[1:]), measured[1:])
        row |= {f"calibrated_{key}": value for key, value in errors.items()}
    return row


def unseen_shapes(model: nn.Module, num: int, cell: int) -> np.ndarray:
    """(num, 4) random shapes, up to 128 samples, 256 tokens and 384 x 384 pixels, in multiples of `cell`."""
    rng = np.random.default_rng(1)
    shapes = np.stack(
        [
            rng.integers(8, 129, num),
            rng.integers(5, 257, num),
            cell * rng.integers(64 // cell, 384 // cell + 1, num),
            cell * rng.integers(64 // cell, 384 // cell + 1, num),
        ],
        axis=1,
    )
    config = getattr(getattr(model, "config", None), "vision_config", None)
    if config is not None:
        shapes[:, 2:] = config.image_size
    return shapes


def real_peaks(
    model: nn.Module, unseen: np.ndarray, padded_tokens: int, *, seconds: float, device: str, **setting: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Shapes, cut to what this machine can step through, and the peak bytes of a real step on each."""
    on_cpu = device == "cpu"
    live = LiveBytes() if on_cpu else None
    trainer = FusionTrainer(
        model, device=device, live=live, total_steps=1000, lr=0.0, on_nonfinite="skip", **setting
    )
    shapes, peaks = [], []
    ends_at = time.perf_counter() + seconds
    for number, shape in enumerate([unseen[0], *unseen]):
        size, tokens, height, width = map(int, shape)
        if on_cpu:
            size = max(2, min(size, padded_tokens // (tokens + height * width // 256)))
        elif size * (tokens + height * width // 256) > 60_000:
            size = 60_000 // (tokens + height * width // 256)
        sizes = SampleSizes(
            num_tokens=[tokens] + [max(1, tokens - 2)] * (size - 1),
            height=[height] * size,
            width=[width] * size,
            group=range(size),
        )
        values = trainer.train_step([random_batch(sizes, range(size), np.random.default_rng(number))])
        if values["num_out_of_memory"]:
            raise RuntimeError(
                f"{shape.tolist()} is too large to measure on this device: it ran out of memory"
            )
        if number:  # the first step made the optimizer's state
            shapes.append((size, tokens, height, width))
            peaks.append(values["peak_bytes"])
        if time.perf_counter() > ends_at and len(shapes) >= 3:
            break
    return np.array(shapes), np.array(peaks)


def timed_us(memory: Any, shape: BatchShape) -> float:
    """Median time of one evaluation."""
    times = []
    for _ in range(200):
        started = time.perf_counter()
        memory(shape)
        times.append(time.perf_counter() - started)
    return float(np.median(times) * 1e6)


def faults(stride: int) -> dict[str, Any]:
    """Out of memory at one operation of a step after another; how many steps were done all the same."""
    sizes = SampleSizes(num_tokens=[5, 9, 7, 6], height=[32] * 4, width=[32] * 4, group=range(4))
    batch = random_batch(sizes, range(4), np.random.default_rng(0))
    batch.columns = batch.host  # as `collate` makes them: reading masks is no work of the device

    def step(fail_at: int | None) -> VirtualDevice:
        device = VirtualDevice()
        trainer = make_trainer(device)
        device.num_operations, device.fail_at = 0, fail_at
        trainer.train_step([batch])
        return device

    def recovers(number: int) -> bool:
        try:
            return step(number).num_failures <= 1  # none where nothing is asked for any more
        except RunError as error:
            print(f"faults: operation {number}: {error}")
            return False

    step(None)
    num_operations = step(None).num_operations
    tried = range(0, num_operations, stride)
    recovered = sum(map(recovers, tqdm(tried, desc="faults", disable=None)))
    return {
        "kind": "faults",
        "num_operations": num_operations,
        "num_tried": len(tried),
        "num_recovered": recovered,
    }


def policies(quick: bool, lengths: Path) -> Iterator[dict[str, Any]]:
    """One table: the same samples and limit under every policy."""
    num_samples, num_epochs = (100, 1) if quick else (1500, 2)
    sizes = read_lengths(lengths).take(range(num_samples)).resized(Aspect(112**2))
    torch.manual_seed(0)
    memory = fit_memory(
        build_model("tiny", vocab_size=VOCAB_SIZE),
        device="cpu",
        objectives=OBJECTIVES,
        num_held_out=0,
        progress=False,
    )
    largest = BatchShape(24, int(sizes.num_tokens.max()), int(sizes.height.max()), int(sizes.width.max()))
    limit_bytes = int(memory(largest))

    def planned() -> Any:
        return make_scheduler("memory", cost=memory, budget=limit_bytes, allow_collisions=True)

    def predictive() -> ResourceAwareScheduler:
        return ResourceAwareScheduler(planner=planned())

    def halving() -> ResourceAwareScheduler:
        return ResourceAwareScheduler(
            limit_bytes / GIB, planner=make_scheduler("random", batch_size=64), policy="halving"
        )

    ours = partial(run_ours, sizes, limit_bytes, num_epochs)
    arms: dict[str, tuple[str, Callable[[], Use]]] = {
        "random, batch 64, halved by hand": (
            "mmlab",
            lambda: run_restarting(sizes, limit_bytes, num_epochs, 64, Use(), lambda size: size // 2),
        ),
        "random + halving (article A)": ("mmlab", lambda: ours(halving)),
        "memory": ("mmlab", lambda: ours(planned)),
        "memory + predictive": ("mmlab", lambda: ours(predictive)),
        "find_executable_batch_size": ("accelerate", lambda: run_accelerate(sizes, limit_bytes, num_epochs)),
        "BatchSizeFinder": ("lightning", lambda: run_lightning(sizes, limit_bytes, num_epochs)),
    }
    for name, (package, run) in arms.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed, left out")
            continue
        started = time.perf_counter()
        row = run().row(name, f"{package} {__version__ if package == 'mmlab' else version(package)}", started)
        yield {**row, "limit_bytes": limit_bytes, "num_epochs": num_epochs}


def cuda_limits(quick: bool) -> Iterator[dict[str, Any]]:
    """Epochs within a share of a real GPU: planned by a model that one measured step has corrected."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    num_samples, num_epochs = (2000, 2) if quick else (10_000, 4)
    rng = np.random.default_rng(0)
    text = np.minimum(200, rng.lognormal(2.6, 0.5, num_samples)).astype(int) + 2
    high, wide = 16 * rng.integers(6, 25, (2, num_samples))
    sizes = SampleSizes(num_tokens=text, height=high, width=wide, group=range(num_samples))
    for share in (0.01, 0.02, 0.05):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)
        torch.manual_seed(0)
        model = build_model("small", vocab_size=VOCAB_SIZE)
        memory = fit_memory(model, precision="bf16", objectives=OBJECTIVES, num_held_out=0, progress=False)
        trainer = FusionTrainer(
            model, device="cuda", precision="bf16", objectives=OBJECTIVES, total_steps=10**6, memory=memory
        )
        rows = range(8)
        batch = random_batch(sizes, rows, rng)
        for _ in range(2):  # the first step makes the optimizer's state
            measured_bytes = trainer.train_step([batch])["peak_bytes"]
        memory = memory.calibrated(batch.shape, measured_bytes)
        limit_bytes = int(share * total_bytes)
        scheduler = ResourceAwareScheduler(
            planner=make_scheduler("memory", cost=memory, budget=limit_bytes, allow_collisions=True)
        )
        started = time.perf_counter()
        use = Use()
        for values in trainer.fit(RandomBatches(sizes, scheduler), num_epochs=num_epochs):
            use.ratios.append(values["peak_bytes"] / limit_bytes)
            use.num_samples += values["num_samples"]
            use.num_out_of_memory += values["num_out_of_memory"]
        row = use.row(f"memory + predictive, {share:.0%} of the GPU", f"mmlab {__version__}", started)
        yield {**row, "limit_bytes": limit_bytes, "num_epochs": num_epochs}
    torch.cuda.set_per_process_memory_fraction(1.0)


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at, beside what was measured."""
    goals: list[dict[str, Any]] = []

    def at_most(name: str, found: list[float], bound: float, unit: str = "%") -> None:
        if found:
            scale = 100 if unit == "%" else 1
            goals.append(goal(name, f"<= {bound:g} {unit}", scale * max(found), scale * max(found) <= bound))

    of = {kind: [row for row in rows if row["kind"] == kind] for kind in ("accuracy", "faults", "policy")}
    on_cpu = [row for row in of["accuracy"] if row["device"] == "cpu"]
    on_cuda = [row for row in of["accuracy"] if row["device"] == "cuda"]
    every = of["accuracy"]
    at_most(
        "simulator against real live bytes, largest",
        [row["simulator_to_real_max_ratio"] for row in on_cpu],
        0.1,
    )
    at_most("closed form against simulator, p95", [row["closed_form_p95_ratio"] for row in every], 0.25)
    at_most("closed form against simulator, largest", [row["closed_form_max_ratio"] for row in every], 0.5)
    at_most(
        "closed form, worst under-prediction", [row["closed_form_worst_under_ratio"] for row in every], 0.25
    )
    at_most("closed form against real live bytes, p95", [row["real_p95_ratio"] for row in on_cpu], 0.25)
    at_most(
        "closed form under real live bytes, worst", [row["real_worst_under_ratio"] for row in on_cpu], 0.25
    )
    at_most("fit of 14 probes, CPU", [row["fit_cpu_s"] for row in every], 40, "s")
    at_most("one evaluation", [row["evaluate_us"] for row in every], 20, "us")
    at_most("CUDA, uncalibrated, p50", [row["real_p50_ratio"] for row in on_cuda], 2)
    at_most("CUDA, uncalibrated, p95", [row["real_p95_ratio"] for row in on_cuda], 5)
    at_most("CUDA, after one measured step, p95", [row["calibrated_p95_ratio"] for row in on_cuda], 2)
    for row in of["faults"]:
        share = row["num_recovered"] / row["num_tried"]
        goals.append(goal("steps done though an operation ran out of memory", "all", share, share == 1))
    for row in of["policy"]:
        if row["policy"].startswith("memory"):
            failures = row["num_out_of_memory"]
            goals.append(goal(f"{row['policy']}: out of memory", "0", failures, failures == 0))
            use = row["mean_of_limit"]
            goals.append(goal(f"{row['policy']}: mean use of the limit", ">= 92 %", 100 * use, use >= 0.92))
    return goals


def machine_id() -> str:
    """Tells this machine from others of the same description, without naming it."""
    address = uuid.getnode()
    drawn = bool(address >> 40 & 1)  # at random in every process, where there is no network card
    known = json.dumps([machine(), platform.node(), None if drawn else address], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def rows_measured_here(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file, to which this machine adds its own.

    Raises:
        OptionError: another machine measured some of them, or this one under other versions or with other code.
    """
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    others = {row.get("machine") for row in document["rows"]} - {machine_id()}
    if others:
        raise OptionError(
            f"{path} has rows of another machine ({', '.join(map(str, others))}; this one is {machine_id()}): figures "
            "of two machines do not belong in one file; give another file, or measure everything here"
        )
    for name, here in (("versions", versions()), ("code", measured_code())):
        there = document.get(name) or {}
        if not there or any(there[key] != here[key] for key in there.keys() & here.keys()):
            raise OptionError(f"{path} was measured with other {name}; measure everything again")
    return document["rows"]


def what_is_measured(row: dict[str, Any]) -> tuple[Any, ...]:
    """The same for two rows of which a file has one."""
    names = ("kind", "model", "precision", "checkpointing", "device", "policy")
    return tuple(row.get(name) for name in names)


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    if row["kind"] == "accuracy":
        print(
            f"{row['model']:12} {row['precision']} {'checkpointing' if row['checkpointing'] else '':13} "
            f"fit {row['fit_cpu_s']:5.1f} s  closed form p95 {row['closed_form_p95_ratio']:.3%}, "
            f"worst under {row['closed_form_worst_under_ratio']:.3%} "
            f"(to {row['largest_simulated_bytes'] / GIB:.1f} GiB)  "
            f"real: {row['real_num_shapes']} shapes, simulator {row['simulator_to_real_max_ratio']:.4%}, "
            f"p95 {row['real_p95_ratio']:.3%}, worst under {row['real_worst_under_ratio']:.3%}"
        )
    elif row["kind"] == "policy":
        print(
            f"{row['policy']:34} {row['package']:18} "
            f"OOM {row['num_out_of_memory']:3}  restarts {row['num_restarts']:2}  "
            f"mean use {row['mean_of_limit']:6.1%}  peak {row['peak_of_limit']:6.1%}  steps {row['num_steps']:4}  "
            f"wasted {row['num_wasted_samples']:5} samples  {row['wall_s']:.0f} s"
        )
    else:
        print(
            f"faults: {row['num_recovered']} of {row['num_tried']} steps done, of {row['num_operations']} operations"
        )


def main() -> None:
    """Run everything, print a table and the goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "memory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda: what accuracy is measured on")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["accuracy", "faults", "policies"],
        help="parts to run, written to a file of their own",
    )
    parser.add_argument("--models", nargs="*", choices=list(MODELS), help="models to take")
    parser.add_argument(
        "--add", action="store_true", help="keep the file's other rows, which this machine measured"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of real steps for each setting")
    parser.add_argument("--lengths", type=Path, default=COCO_LENGTHS, metavar="FILE")
    options = parser.parse_args()
    parts = options.only or ["accuracy", "faults", "policies"]
    named = "_".join(["memory", *(options.only or []), *(["cuda"] if options.device == "cuda" else [])])
    path = options.json or (options.out and options.out / f"{named}.json")
    try:
        rows = rows_measured_here(path) if options.add and path else []
    except OptionError as error:
        parser.error(str(error))

    def keep(row: dict[str, Any]) -> None:
        row["machine"] = machine_id()
        rows[:] = [other for other in rows if what_is_measured(other) != what_is_measured(row)] + [row]
        show(row)
        if path:
            write_results(path, rows, goals_of(rows))

    if "policies" in parts and options.device == "cuda":
        for row in cuda_limits(options.quick):
            keep(row)
    elif "policies" in parts:
        for row in policies(options.quick, options.lengths):
            keep(row)
    if "faults" in parts and options.device == "cpu":
        keep(faults(80 if options.quick else 1))
    if "accuracy" in parts:
        names = options.models or (["tiny", "BERT"] if options.quick else list(MODELS))
        for name in names:
            for precision in ("fp32", "bf16"):
                for checkpointing in (False, True):
                    if options.quick and (name == "BERT", precision == "bf16") != (
                        checkpointing,
                        checkpointing,
                    ):
                        continue
                    num_shapes, seconds = (4, 1.0) if options.quick else (10, options.seconds)
                    setting = {
                        "precision": precision,
                        "checkpointing": checkpointing,
                        "device": options.device,
                    }
                    keep(accuracy(name, num_shapes=num_shapes, seconds=seconds, **setting))
    print_goals(goals_of(rows))


if __name__ == "__main__":
    main()
