"""The articles' way of feeding a model, what everyone does today, and mmlab: same samples, weights, model and trainer.

On a CPU the step computes on one core, which stands for the accelerator; another core is left for loading. Two settings
that stand next to each other in `CHAIN` differ in one thing, so that what is gained can be told apart by its cause.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from mmlab.comparison.preparation import costs_of, packed_if_planned
from mmlab.data.collate import Sample, collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.pricing.equal_memory import largest_fitting
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.timing import fit_time
from mmlab.runs.monitor import DeviceMonitor
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Aspect, Batch, BatchShape, SampleSizes, Square

BATCH_SIZE, SIDE, MAX_TOKENS, LR = 32, 224, 512, 1e-3
WARM_UP_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What computes the steps, and what they are."""

    device: str = "cpu"
    precision: str = "fp32"
    model: str = "tiny"
    batch_size: int = BATCH_SIZE  # of the articles' batches
    num_workers: int = 1  # where something loads ahead
    lr: float = LR
    fit_s: float = 20.0  # for measuring the steps that `fastest` plans with

    def build(self, vocab_size: int, seed: int = 0) -> torch.nn.Module:
        """The model, with weights that are always the same for a seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build_model(self.model, vocab_size=vocab_size)

    @property
    def options(self) -> dict[str, Any]:
        """Of trainers, and of what measures and prices their steps."""
        return {"device": self.device, "precision": self.precision}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to feed the model."""

    texts: str = "longest"  # padded to the longest of the batch, or to `512` tokens
    ahead: bool = False  # workers load ahead; else the training thread loads
    cache: bool = False  # of decoded images and tokens, filled beforehand
    images: str = "square"  # all resized to 224 x 224, or `own`: their own shape within the same area
    scheduler: str = "random"
    loader: str = "torch"  # its DataLoader with worker processes, or mmlab's `planned` one with threads


BEFORE, TODAY, MMLAB = "serial, texts of 512", "worker, longest text", "fastest, mmlab's loader"
_today = Setting(ahead=True)
_own = replace(_today, cache=True, images="own")
SETTINGS = {
    BEFORE: Setting(texts="512"),
    "worker, texts of 512": Setting(texts="512", ahead=True),
    "serial, longest text": Setting(),
    TODAY: _today,
    "with a cache": replace(_today, cache=True),
    "with a cache, fastest": replace(_today, cache=True, scheduler="fastest"),
    "own shapes, random": _own,
    "own shapes, bucket": replace(_own, scheduler="bucket"),
    "own shapes, sorted": replace(_own, scheduler="sorted"),
    "own shapes, packed": replace(_own, scheduler="packed"),
    "own shapes, fastest": replace(_own, scheduler="fastest"),
    MMLAB: replace(_own, scheduler="fastest", loader="planned"),
}
# (what changes, setting after the change), from `BEFORE` on
CHAIN = (
    ("padding: texts to the longest of the batch", "serial, longest text"),
    ("overlap: a worker loads ahead", TODAY),
    ("cache: nothing is decoded twice", "with a cache"),
    ("images keep their shape", "own shapes, random"),
    ("batch shape: planned by `fastest`", "own shapes, fastest"),
    ("loader: mmlab's threads", MMLAB),
)


class ArticleDataset(Dataset[Sample]):
    """One sample as the articles prepare it: decoded and resized by Pillow (bilinear), tokenised each time."""

    def __init__(self, dataset: MultimodalDataset) -> None:
        self.dataset, self.sizes = dataset, dataset.sizes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Sample:
        record = self.dataset.records[row]
        tokens = self.dataset.tokenizer(record.text, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return Sample(
            id=record.id,
            image=torch.from_numpy(self.pixels(row)),
            text=record.text,
            input_ids=torch.tensor(tokens),
            label=None,
            group=record.group,
        )

    def pixels(self, row: int) -> NDArray[np.uint8]:
        """(3, h, w) of the image, squashed to its planned size."""
        image = Image.open(io.BytesIO(self.dataset.records.read_image(row))).convert("RGB")
        size = int(self.sizes.width[row]), int(self.sizes.height[row])
        return np.ascontiguousarray(
            np.asarray(image.resize(size, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        )

    def cached(self, folder: Path, num_workers: int) -> tuple[MultimodalDataset, float]:
        """The same samples from a cache, and the seconds that filling it took."""
        started_s = time.perf_counter()
        cache = SampleCache(folder, key=cache_key(self.dataset))
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(lambda row: cache.put(row, self.pixels(row)), range(len(self))))
        dataset = MultimodalDataset(
            self.dataset.records,
            tokenizer=self.dataset.tokenizer,
            image_policy=self.dataset.image_policy,
        )
        dataset.cache = cache
        return dataset, time.perf_counter() - started_s


def collate_to(samples: list[Sample], *, texts: str) -> Batch:
    """A padded batch; under `512` its texts are padded to as many tokens."""
    batch = collate(samples)
    if texts == "longest":
        return batch
    missing = (0, MAX_TOKENS - batch.input_ids.shape[1])
    ids, mask = (F.pad(column, missing) for column in (batch.input_ids, batch.attention_mask))
    return replace(batch, input_ids=ids, attention_mask=mask, columns=None)


@dataclass
class EpochBatches:
    """A batch sampler: the batches that a scheduler plans for an epoch."""

    scheduler: Scheduler
    sizes: SampleSizes
    epoch: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.scheduler.plan(self.sizes, epoch=self.epoch))

    def __len__(self) -> int:
        return len(self.scheduler.plan(self.sizes, epoch=self.epoch))


class TorchLoader(DataLoader[Any]):
    """torch's DataLoader, whose workers stay, over a scheduler's batches."""

    def __init__(self, dataset: Any, batches: EpochBatches, setting: Setting, on: Accelerator) -> None:
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=on.num_workers if setting.ahead else 0,
            persistent_workers=setting.ahead,
            pin_memory=on.device != "cpu",
            collate_fn=partial(collate_to, texts=setting.texts),
        )
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        """The trainer calls this before each epoch."""
        self.batches.epoch = epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Schedulers whose batches are as large as one limit of predicted memory allows: that of `TODAY`'s largest batch."""

    sizes: dict[str, SampleSizes]  # by `Setting.images`
    memory: MemoryModel
    time: Any
    num_epochs: int
    batch_size: int

    @property
    def limit_bytes(self) -> float:
        """The predicted peak of the articles' batches of squares with texts padded to the longest."""
        return self.peak_bytes(make_scheduler("random", batch_size=self.batch_size), "square")

    def peak_bytes(self, scheduler: Scheduler, images: str) -> float:
        """The most that a batch of any epoch is predicted to need."""
        plans = (scheduler.plan(self.sizes[images], epoch=epoch) for epoch in range(self.num_epochs))
        return max(float(batch_costs(self.memory, plan.shape_columns).max()) for plan in plans)

    def make(self, setting: Setting) -> Scheduler:
        """The scheduler of a setting. `packed` cannot be priced: it has as many tokens as `random`'s largest batch."""
        name, limit_bytes = setting.scheduler, self.limit_bytes
        if name == "fastest":
            return make_scheduler(name, cost=self.memory, budget=limit_bytes, time=self.time)
        if name == "packed":
            widest = self.make(replace(setting, scheduler="random"))
            plans = [widest.plan(self.sizes[setting.images], epoch=epoch) for epoch in range(self.num_epochs)]
            return make_scheduler(name, budget=max(float(costs_of(plan).max()) for plan in plans))
        if setting.images == "square":
            return make_scheduler(name, batch_size=self.batch_size)

        def fits(size: int) -> bool:
            return self.peak_bytes(make_scheduler(name, batch_size=size), setting.images) <= limit_bytes

        size = largest_fitting(fits, first=self.batch_size, most=len(self.sizes[setting.images]))
        return make_scheduler(name, batch_size=size)


@dataclass(kw_only=True)
class Arm:
    """A setting: its trainer, its batches, and what its epochs took."""

    name: str
    trainer: FusionTrainer
    loader: Any
    facts: dict[str, Any]
    rounds: list[dict[str, float]] = field(default_factory=list)

    def warm_up(self) -> None:
        """Start the workers and take a few steps that are not timed."""
        for batch, _ in zip(self.loader, range(WARM_UP_BATCHES), strict=False):
            self.trainer.train_step([batch])

    def run_epoch(self) -> None:
        """Train an epoch."""
        events: list[Any] = []
        with DeviceMonitor(events.append, device=self.trainer.device, interval_s=0.25):
            started_s = time.perf_counter()
            steps = self.trainer.fit(self.loader, num_epochs=1)
            taken_s = time.perf_counter() - started_s
        used = [event.values["utilization_ratio"] for event in events[1:] if event.kind == "device"]
        self.rounds.append(
            {
                "epoch_s": taken_s,
                "utilization_ratio": float(np.mean(used)) if used else None,
                "data_wait_s": sum(step["data_wait_s"] for step in steps),
                "num_steps": len(steps),
                "num_samples": sum(step["num_samples"] for step in steps),
                "padded_tokens": sum(step["padded_tokens"] + step["padded_patches"] for step in steps),
                "loss": steps[-1]["loss"],
                "reserved_bytes": max(step.get("reserved_bytes", 0) for step in steps),
            }
        )

    def row(self) -> dict[str, Any]:
        """The setting, what is known beforehand, and every epoch."""
        return {"kind": "articles", "arm": self.name, **self.facts, "rounds": self.rounds}


def measure_articles(
    records: Records, folder: Path, *, num_rounds: int, on: Accelerator
) -> list[dict[str, Any]]:
    """A row a setting; they take turns epoch by epoch, in another order each time: on a GPU, shapes that the setting
    before has just used are quicker.

    Args:
        folder: for the caches, empty.
    """
    num_threads = torch.get_num_threads()
    if on.device == "cpu":
        torch.set_num_threads(1)
    arms = make_arms(records, folder, num_rounds, on)
    for arm in arms:
        arm.warm_up()
    rng = np.random.default_rng(0)
    for _ in range(num_rounds):
        for place in rng.permutation(len(arms)):
            arms[place].run_epoch()
    for arm in arms:
        if isinstance(arm.loader, PlannedLoader):
            arm.loader.close()
    torch.set_num_threads(num_threads)
    return [arm.row() for arm in arms]


def make_arms(records: Records, folder: Path, num_epochs: int, on: Accelerator) -> list[Arm]:
    """An arm a setting, each with the same initial weights."""
    square = MultimodalDataset(records, image_policy=Square(SIDE))
    own = MultimodalDataset(records, tokenizer=square.tokenizer, image_policy=Aspect(SIDE * SIDE))
    plain = {"square": ArticleDataset(square), "own": ArticleDataset(own)}
    cached = {images: plain[images].cached(folder / images, on.num_workers) for images in plain}
    sizes = {images: dataset.sizes for images, dataset in plain.items()}
    vocab_size = len(square.tokenizer)
    memory = fit_memory(on.build(vocab_size), num_held_out=0, progress=False, **on.options)
    baseline = Planner(sizes=sizes, memory=memory, time=None, num_epochs=num_epochs, batch_size=on.batch_size)
    fitted = fit_time(
        on.build(vocab_size),
        sizes["own"],
        cost=memory,
        budget=baseline.limit_bytes,
        num_probes=12,
        num_held_out=4,
        repeats=4,
        seconds=on.fit_s,
        progress=False,
        **on.options,
    )
    planner = replace(baseline, time=fitted)
    arms = []
    for name, setting in SETTINGS.items():
        scheduler = planner.make(setting)
        dataset, fill_s = cached[setting.images] if setting.cache else (plain[setting.images], 0.0)
        loader: Any
        if setting.loader == "planned":
            loader = PlannedLoader(dataset, scheduler, num_workers=on.num_workers, device=on.device)
        else:
            loader = TorchLoader(dataset, EpochBatches(scheduler, sizes[setting.images]), setting, on)
        plans = [scheduler.plan(sizes[setting.images], epoch=epoch) for epoch in range(num_epochs)]
        num_steps = sum(map(len, plans))
        arms.append(
            Arm(
                name=name,
                trainer=FusionTrainer(
                    packed_if_planned(on.build(vocab_size), plans[0]),
                    objectives={"contrastive": Contrastive(num_negatives=on.batch_size - 1)},
                    lr=on.lr,
                    total_steps=num_steps + WARM_UP_BATCHES,
                    **on.options,
                ),
                loader=loader,
                facts={
                    "setting": asdict(setting),
                    "on": asdict(on),
                    "lr": on.lr,
                    "mean_batch_size": num_epochs * len(square) / num_steps,
                    "predicted_peak_bytes": predicted_peak_bytes(planner, setting, scheduler),
                    "cache_fill_s": fill_s,
                    "time_spread_ratio": fitted.spread_ratio,
                },
            )
        )
    return arms


def predicted_peak_bytes(planner: Planner, setting: Setting, scheduler: Scheduler) -> float | None:
    """Of the largest batch; None for packed batches, which cannot be priced."""
    if setting.scheduler == "packed":
        return None
    if setting.texts == "512":
        return planner.memory(BatchShape(planner.batch_size, MAX_TOKENS, SIDE, SIDE))
    return planner.peak_bytes(scheduler, setting.images)
