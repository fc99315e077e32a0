"""Cases of `gpu.py` about whole epochs: loaders, schedulers, and the setting of the articles."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from _common import goal
from _gpu_bench import Bench, Result, make_trainer, noise


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

    trainer = make_trainer(bench, "bf16", model_name=bench.compare_model)
    batch = noise(bench, bench.article_batch_size)
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
