"""Cases of `gpu.py` about whole epochs: loaders, schedulers, and the setting of the articles."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import goal
from _gpu_bench import Bench, Result, make_trainer


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
    """The same epochs from batches that are kept in memory, from threads, from processes and from torch's DataLoader."""
    from beside_loader import scenes
    from torch.utils.data import DataLoader

    from mmlab.loading.loader import PlannedLoader, default_num_workers
    from mmlab.loading.workers import START_METHOD
    from mmlab.schedule.schedulers import make_scheduler

    num_workers = bench.num_workers or default_num_workers()
    trainer = make_trainer(bench, "bf16", model_name=bench.compare_model, total_steps=10**6)
    scheduler = make_scheduler("budget", budget=2 * bench.timed_budget)
    with ExitStack() as stack:
        dataset = scenes(
            stack.enter_context(tempfile.TemporaryDirectory()), bench.compare_images, bench.image_side
        )
        plan = scheduler.plan(dataset.sizes, epoch=0)

        def planned(backend: str) -> Iterable[Any]:
            return stack.enter_context(
                PlannedLoader(dataset, scheduler, backend=backend, num_workers=num_workers)
            )

        loaders = {
            "kept in memory": list(planned("threads")),
            "threads": planned("threads"),
            "processes": planned("torch"),
            "DataLoader of torch": DataLoader(
                dataset,
                batch_sampler=[list(rows) for rows in plan],
                collate_fn=dataset.collate,
                num_workers=num_workers,
                pin_memory=bench.device.startswith("cuda"),
                persistent_workers=True,
                multiprocessing_context=START_METHOD,
            ),
        }
        rows = [
            {"loader": name, "num_workers": num_workers, "num_steps": len(plan), "epochs": []}
            for name in loaders
        ]
        for number in range(
            -1, bench.article_rounds
        ):  # the first round starts workers, and its shapes are new
            for row in (rows, rows[::-1])[number % 2]:
                found = _time_epoch(trainer, loaders[row["loader"]])
                if number >= 0:
                    row["epochs"].append(found)
        del loaders  # ends the DataLoader's workers
    medians = {row["loader"]: statistics.median(each["epoch_s"] for each in row["epochs"]) for row in rows}
    kept_s = medians.pop("kept in memory")
    goals = []
    for name, seconds in medians.items():
        longer = seconds / kept_s - 1
        goals.append(
            goal(f"an epoch takes longer from {name} than from memory", "<= 10 %", longer, longer <= 0.1)
        )
    return {"loaders": rows}, goals


def _time_epoch(trainer: Any, loader: Iterable[Any]) -> dict[str, Any]:
    """Seconds of an epoch, of the waits for its batches, and of its steps."""
    started = asked = time.perf_counter()
    waits, steps = [], []
    for batch in loader:
        waits.append(time.perf_counter() - asked)
        steps.append(trainer.train_step([batch])["step_s"])
        asked = time.perf_counter()
    return {"epoch_s": time.perf_counter() - started, "wait_s": waits, "step_s": steps}


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
