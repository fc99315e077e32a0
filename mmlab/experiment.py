"""The one place that joins the parts: read, plan, train under each scheduler, measure, compare.

Notebooks, dashboard and command line all go through `compare`. What makes a comparison fair is decided here:

* every arm starts from the same weights and sees the same samples the same number of times;
* arms take turns epoch by epoch, in rotating order, so that a slow minute of the machine does not fall on one
  of them;
* every image file is read once beforehand, so that no arm pays for a cold page cache;
* the first steps of every turn are not timed, medians over epochs are reported and every epoch is kept;
* peak memory is measured apart: one step on the arm's costliest batch, alone, with a fresh model and
  optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mmlab.comparison import ArmResult, Comparison
from mmlab.cost import PaddedTokens, batch_costs
from mmlab.dataset import MultimodalDataset
from mmlab.errors import DataError, OptionError
from mmlab.events import RunEvent, RunLog
from mmlab.images import parse_image_policy
from mmlab.loader import PlannedLoader, collate, default_num_workers
from mmlab.losses import Contrastive
from mmlab.machine import cpu_name, num_usable_cores, versions
from mmlab.meters import LiveBytes, peak_bytes, reset_peak_bytes
from mmlab.model import build_model
from mmlab.monitor import DeviceMonitor
from mmlab.readers import read_records
from mmlab.records import Records
from mmlab.schedule import SCHEDULERS, BatchPlan, BatchScheduler, make_scheduler
from mmlab.text import load_tokenizer
from mmlab.trainer import FusionTrainer
from mmlab.types import BatchShape

if TYPE_CHECKING:
    from mmlab.types import SampleSizes

EVAL_BATCH_SIZE = 32
WARMUP_STEPS = 2  # steps at the start of every turn that are not timed
_COST = PaddedTokens()
_MEDIAN_KEYS = (
    "samples_per_s",
    "step_s",
    "data_wait_ratio",
    "text_waste",
    "image_waste",
    "combined_waste",
    "planned_combined_waste",
)
NUM_NEGATIVES = 31  # negatives that the training loss is normalised to, whatever the batch size


_WRITTEN = ("comparison.json", "table.csv", "figure.png", "report.html", "runs")


def compare(
    data: str | Path | Records,
    schedulers: Sequence[str] | Mapping[str, BatchScheduler] = ("random", "sorted", "bucket", "budget"),
    *,
    budget: float | None = None,
    batch_size: int = 32,
    epochs: int = 3,
    limit: int | None = None,
    image: str = "aspect:128",
    model: str = "tiny",
    tokenizer: str = "builtin",
    lr: float = 1e-3,
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    num_workers: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Comparison:
    """Train the same model on the same pairs under each scheduler and report what each cost.

    Pairs marked with a split `val` or `test` are held out; without one, a tenth of the images is.

    Args:
        data: anything that `read_records` takes, or records.
        schedulers: names from `SCHEDULERS`, or configured schedulers by the name that they shall have.
        budget: padded tokens that a batch may cost, for schedulers with a budget; `batch_size` mean samples
            unless given.
        batch_size: samples a batch, for schedulers with a fixed size.
        epochs: turns of every arm; each is one repetition.
        limit: use only the first pairs.
        image: image policy in short form, see `parse_image_policy`.
        model: a preset's name, see `mmlab.model.PRESETS`.
        out: folder for `comparison.json`, `table.csv`, `figure.png`, `report.html` and the runs' events; a
            comparison that is already there is moved to `previous-N` inside it. Nothing is written when None.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work; the message names it.
    """
    if epochs < 1:
        raise OptionError(f"epochs must be at least 1, found {epochs}")
    if batch_size < 1:
        raise OptionError(f"batch size must be at least 1, found {batch_size}")
    policy = parse_image_policy(image)
    chosen_device = resolve_device(device)
    records = data if isinstance(data, Records) else read_records(data, progress=progress)
    train_records, held_out_records = hold_out(_first(records, limit), seed=seed)
    text_tokenizer = load_tokenizer(tokenizer, records=train_records)
    train_set, held_out_set = (
        MultimodalDataset(part, tokenizer=text_tokenizer, image_policy=policy)
        for part in (train_records, held_out_records)
    )
    budget = batch_size * mean_cost(train_set.sizes) if budget is None else budget
    planners = _planners(schedulers, batch_size=batch_size, budget=budget, seed=seed)
    workers = default_num_workers() if num_workers is None else num_workers
    config = {
        "data": records.source,
        "num_train": len(train_set),
        "num_held_out": len(held_out_set),
        "budget": budget,
        "budget_unit": _COST.unit,
        "batch_size": batch_size,
        "epochs": epochs,
        "image": str(policy),
        "model": model,
        "tokenizer": tokenizer,
        "precision": precision,
        "lr": lr,
        "num_negatives": NUM_NEGATIVES,
        "warmup_steps": WARMUP_STEPS,
        "seed": seed,
        "num_workers": workers,
        "device": chosen_device,
        "machine": describe_machine(chosen_device),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    folder = None if out is None else _fresh_folder(Path(out))
    bench = _Bench(config=config, train_set=train_set, held_out_set=held_out_set, folder=folder)
    arms = [_Arm(name, planner, bench) for name, planner in planners.items()]
    _warm_page_cache(train_set.records, progress)
    interrupted = _take_turns(arms, bench, progress)
    finished = min(len(arm.epochs) for arm in arms)
    if not finished:
        raise KeyboardInterrupt
    comparison = Comparison(
        config=config,
        arms=[arm.result(finished) for arm in arms],
        interrupted=interrupted,
        folder=folder,
    )
    if folder is not None:
        comparison.save(folder)
    return comparison


def hold_out(records: Records, *, seed: int = 0) -> tuple[Records, Records]:
    """Training and held-out pairs: by the data's own split `val` or `test`, else a tenth of the images.

    Raises:
        DataError: nothing is left on one side.
    """
    marked = {split for split in records.splits or () if split}
    for name in ("val", "test"):
        if name in marked:
            rest = [row for row, split in enumerate(records.splits or ()) if split not in ("val", "test")]
            if not rest:
                raise DataError(
                    f"{records.source}: every pair is in a held-out split, none is left to train on"
                )
            return records.select(rest), records.split(name)
    return records.hold_out(0.1, seed=seed)


def mean_cost(sizes: SampleSizes) -> float:
    """Mean padded tokens of one sample on its own: text tokens + image patches."""
    shapes = np.column_stack(
        [np.ones(len(sizes), dtype=np.int64), sizes.num_tokens, sizes.height, sizes.width]
    )
    return float(batch_costs(_COST, shapes).mean())


def resolve_device(name: str) -> str:
    """`auto` is the GPU where there is one, else the CPU.

    Raises:
        OptionError: not a device of this machine.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {name!r} cannot be used here ({reason}); try auto or cpu") from error
    return name


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know of the machine to place its figures."""
    return {
        "platform": platform.platform(),
        "processor": cpu_name(),
        "cores": num_usable_cores(),
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What all arms share."""

    config: dict[str, Any]
    train_set: MultimodalDataset
    held_out_set: MultimodalDataset
    folder: Path | None

    def make_trainer(self, *, total_steps: int, emit: Any = None) -> FusionTrainer:
        """A fresh model with the comparison's initial weights, and its trainer."""
        config = self.config
        torch.manual_seed(config["seed"])
        model = build_model(config["model"], vocab_size=len(self.train_set.tokenizer))
        return FusionTrainer(
            model,
            precision=config["precision"],
            device=config["device"],
            lr=config["lr"],
            total_steps=total_steps,
            objectives={"contrastive": Contrastive(num_negatives=config["num_negatives"])},
            seed=config["seed"],
            emit=emit,
        )

    def peak_of_one_step(self, rows: Sequence[int]) -> tuple[int, str]:
        """Peak bytes of one training step on these samples with a fresh model, and what counted them.

        The step before it creates the optimizer's state, so that the figure is that of a steady step.
        """
        trainer = self.make_trainer(total_steps=2)
        batch = collate([self.train_set[row] for row in rows])
        trainer.train_step([batch])
        if trainer.device.type == "cuda":
            reset_peak_bytes(trainer.device)
            trainer.train_step([batch])
            return peak_bytes(trainer.device), "torch allocator, costliest batch"
        with LiveBytes().add(trainer.model, trainer.optimizer) as live:
            trainer.train_step([batch])
        return live.peak_bytes, "live tensors, costliest batch"


class _Arm:
    """One scheduler with its own model, loader and events."""

    def __init__(self, name: str, scheduler: BatchScheduler, bench: _Bench) -> None:
        config = bench.config
        self.name, self.scheduler, self._bench = name, scheduler, bench
        self._loader = PlannedLoader(
            bench.train_set,
            scheduler,
            num_workers=config["num_workers"],
            pin_memory=config["device"].startswith("cuda"),
        )
        self._log = None if bench.folder is None else RunLog(bench.folder / "runs" / name)
        total_steps = config["epochs"] * len(self._loader)
        self._trainer = bench.make_trainer(total_steps=total_steps, emit=self._take)
        self._steps: list[dict[str, Any]] = []  # values of this epoch's step events
        self._planned: list[BatchShape] = []  # shapes that this epoch's plan promises
        self._costs: list[float] = []
        self._shape_mismatches = 0
        self.epochs: list[dict[str, float]] = []
        self.costliest: tuple[float, list[int]] = (-1.0, [])  # cost and samples of the costliest batch so far
        start = {"run_name": name, "scheduler": name, "config": config, "num_steps": total_steps}
        self._write(RunEvent("start", 0, 0, time.time(), start))

    def run_epoch(self, epoch: int, held_out: PlannedLoader) -> None:
        """Train one epoch and evaluate."""
        self._loader.set_epoch(epoch)
        plan = self._loader.plan
        self._steps, self._planned = [], list(plan.shapes)
        with DeviceMonitor(self._write, device=self._bench.config["device"]):
            self._trainer.fit(self._loader, num_epochs=1)
        costs = [_COST(shape) for shape in self._planned]
        self._costs += costs
        self.costliest = max(self.costliest, (max(costs), list(plan)[int(np.argmax(costs))]))
        held_out_values = self._trainer.evaluate(held_out)
        self.epochs.append(self._measure(plan, held_out_values))
        self._write(RunEvent("eval", self._trainer.step, 0, time.time(), held_out_values))

    def finish(self, status: str) -> None:
        """Write the run's last event and close its file."""
        self._write(RunEvent("end", self._trainer.step, 0, time.time(), {"status": status}))
        if self._log is not None:
            self._log.close()

    def result(self, num_epochs: int) -> ArmResult:
        """Medians over the epochs that every arm finished, and the peak memory of the costliest batch."""
        epochs = self.epochs[:num_epochs]
        budget = self._bench.config["budget"]
        peak_bytes, peak_source = self._bench.peak_of_one_step(self.costliest[1])
        medians = {key: float(np.median([epoch[key] for epoch in epochs])) for key in _MEDIAN_KEYS}
        last = epochs[-1]
        return ArmResult(
            scheduler=self.name,
            options={key: repr(value) for key, value in vars(self.scheduler).items()},
            num_samples=len(self._bench.train_set),
            num_batches=int(epochs[0]["num_batches"]),
            peak_over_budget=self.costliest[0] / budget,
            batches_over_budget=int(sum(cost > budget * (1 + 1e-9) for cost in self._costs)),
            shape_mismatches=self._shape_mismatches,
            peak_bytes=peak_bytes,
            peak_source=peak_source,
            num_unlearnt_samples=int(sum(epoch["num_unlearnt_samples"] for epoch in epochs)),
            final_loss=last["held_out_loss"],
            image_to_text_r1=last["image_to_text_r1"],
            text_to_image_r1=last["text_to_image_r1"],
            chance_r1=last["chance_r1"],
            epochs=epochs,
            **medians,
        )

    def _measure(self, plan: BatchPlan, held_out: Mapping[str, float]) -> dict[str, float]:
        timed = self._steps[WARMUP_STEPS:] or self._steps
        total_s = sum(step["step_s"] for step in timed)
        wait_s = sum(step["data_wait_s"] for step in timed)
        learnt = [step for step in self._steps if not math.isnan(step["loss"])]  # the rest had no negatives
        if not learnt:
            raise DataError(
                f"no batch of {self.name!r} holds two different images, so there is nothing to tell apart; "
                "give a larger batch size or budget, or more images"
            )
        losses, weights = [step["loss"] for step in learnt], [step["num_samples"] for step in learnt]
        return {
            "num_batches": len(self._steps),
            "samples_per_s": sum(step["num_samples"] for step in timed) / total_s,
            "step_s": float(np.median([step["step_s"] - step["data_wait_s"] for step in timed])),
            "data_wait_ratio": wait_s / total_s,
            **_epoch_waste(self._steps),
            "planned_combined_waste": plan.report().combined_waste,
            "train_loss": float(np.average(losses, weights=weights)),
            "num_unlearnt_samples": len(self._bench.train_set) - sum(weights),
            "held_out_loss": held_out["loss"],
            "image_to_text_r1": held_out["image_to_text_r1"],
            "text_to_image_r1": held_out["text_to_image_r1"],
            "chance_r1": held_out["chance_r1"],
        }

    def _take(self, event: RunEvent) -> None:
        """What the trainer emits: steps get the plan's prediction beside the measurement."""
        if event.kind in ("start", "end"):  # of one turn; the arm writes its own
            return
        if event.kind == "step":
            planned = self._planned[len(self._steps)]
            values = {**event.values, "predicted_cost": _COST(planned)}
            measured = (values["num_samples"], values["num_tokens"], values["height"], values["width"])
            self._shape_mismatches += measured != tuple(planned)
            event = dataclasses.replace(event, values=values)
            self._steps.append(values)
        self._write(event)

    def _write(self, event: RunEvent) -> None:
        if self._log is not None:
            self._log.emit(event)


def _take_turns(arms: list[_Arm], bench: _Bench, progress: bool) -> bool:
    """Every arm trains epoch after epoch, in an order that rotates; True when the user interrupted."""
    num_epochs = bench.config["epochs"]
    held_out = PlannedLoader(
        bench.held_out_set, make_scheduler("sorted", batch_size=EVAL_BATCH_SIZE), num_workers=0
    )
    status = "failed"
    with tqdm(total=num_epochs * len(arms), unit="epoch", disable=not progress) as bar:
        try:
            for epoch in range(num_epochs):
                for turn in range(len(arms)):
                    arm = arms[(turn + epoch) % len(arms)]
                    bar.set_description(f"{arm.name}, epoch {epoch + 1}/{num_epochs}")
                    arm.run_epoch(epoch, held_out)
                    bar.update()
            status = "done"
        except KeyboardInterrupt:
            status = "stopped"
        finally:
            for arm in arms:
                arm.finish(status)
    return status == "stopped"


def _epoch_waste(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Padding shares of a whole epoch from those of its steps, each weighted by its padded size."""
    tokens = np.array([step["num_samples"] * step["num_tokens"] for step in steps], dtype=float)
    costs = np.array([step["predicted_cost"] for step in steps], dtype=float)
    weights = {"text_waste": tokens, "image_waste": costs - tokens, "combined_waste": costs}
    return {key: float(np.average([step[key] for step in steps], weights=weights[key])) for key in weights}


def _first(records: Records, limit: int | None) -> Records:
    if limit is not None and limit < 2:
        raise OptionError(f"limit must be at least 2 pairs, found {limit}")
    return records if limit is None else records[:limit]


def _planners(
    schedulers: Sequence[str] | Mapping[str, BatchScheduler], *, batch_size: int, budget: float, seed: int
) -> dict[str, BatchScheduler]:
    """Configured schedulers by name; a name takes those of these options that its scheduler has."""
    if not schedulers:
        raise OptionError("no schedulers to compare; give at least one name")
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    twice = {name for name in schedulers if list(schedulers).count(name) > 1}
    if twice:
        raise OptionError(f"scheduler {sorted(twice)[0]!r} is named twice; name each once")
    shared = {"batch_size": batch_size, "budget": budget, "seed": seed}
    return {name: make_scheduler(name, **_taken_by(name, shared)) for name in schedulers}


def _taken_by(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that the scheduler of this name has."""
    known = SCHEDULERS[name].__dataclass_fields__ if name in SCHEDULERS else {}
    return {key: value for key, value in options.items() if key in known}


def _fresh_folder(folder: Path) -> Path:
    """The folder, with the results of a comparison made before moved to `previous-N` inside it."""
    old = [path for name in _WRITTEN if (path := folder / name).exists()]
    if old:
        number = 1 + sum(1 for _ in folder.glob("previous-*"))
        aside = folder / f"previous-{number}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _warm_page_cache(records: Records, progress: bool) -> None:
    """Read every image file once."""
    one_per_image = np.unique(records.group, return_index=True)[1]
    rows = [int(row) for row in one_per_image if records.image_paths[row] is not None]
    with ThreadPoolExecutor(8) as pool:
        for _ in tqdm(
            pool.map(records.read_image, rows), total=len(rows), desc="reading files", disable=not progress
        ):
            pass
