"""Ways to choose a batch size on a device with little memory, each on the same data: ours, and those of other projects.

Every arm trains whole epochs on a `VirtualDevice`: real steps on real tensors of the right shapes, with a limit. An arm
that runs out of memory and has no answer starts again with smaller batches, as a person would: that counts as a
restart, and what it had trained as waste.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from mmlab.model.presets import build_model
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.schedule.base import Scheduler
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Batch, SampleSizes

VOCAB_SIZE = 1000
OBJECTIVES = {"contrastive": Contrastive(num_negatives=31)}


def random_batch(sizes: SampleSizes, rows: Sequence[int], rng: np.random.Generator) -> Batch:
    """A padded batch of samples of these sizes; what it shows is noise."""
    text, high, wide = (column[list(rows)] for column in (sizes.num_tokens, sizes.height, sizes.width))
    shape = (len(rows), int(text.max()), int(high.max()), int(wide.max()))
    pixels = rng.integers(0, 256, (shape[0], 3, shape[2], shape[3]), dtype=np.uint8)
    ids = rng.integers(1, VOCAB_SIZE, shape[:2])
    tall = np.arange(shape[2])[None, :] < high[:, None]
    broad = np.arange(shape[3])[None, :] < wide[:, None]
    return Batch(
        pixel_values=torch.from_numpy(pixels),
        pixel_mask=torch.from_numpy(tall[:, :, None] & broad[:, None, :]),
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(np.arange(shape[1])[None, :] < text[:, None]),
        labels=None,
        record_ids=[str(row) for row in rows],
    )


class RandomBatches:
    """A loader for `FusionTrainer` that makes the batches of a scheduler up, and passes on what steps needed."""

    def __init__(self, sizes: SampleSizes, scheduler: Any) -> None:
        self.sizes, self.scheduler, self.epoch = sizes, scheduler, 0
        self._plan = scheduler.plan(sizes, epoch=0)
        if hasattr(scheduler, "observe"):
            self.observe = scheduler.observe

    def set_epoch(self, epoch: int) -> None:
        """Plan the epoch."""
        self._plan = self.scheduler.plan(self.sizes, epoch=epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        for step, rows in enumerate(self._plan):
            yield random_batch(self.sizes, rows, np.random.default_rng([self.epoch, step]))


@dataclass(slots=True)
class Use:
    """What an arm did to the memory."""

    num_out_of_memory: int = 0
    num_restarts: int = 0
    num_wasted_samples: int = 0  # trained before a restart, or in the search for a batch size
    ratios: list[float] = field(default_factory=list)  # peak of each step of the final run over the limit
    num_samples: int = 0

    def row(self, name: str, package: str, started: float) -> dict[str, Any]:
        """A row of the table."""
        return {
            "kind": "policy",
            "policy": name,
            "package": package,
            "num_out_of_memory": self.num_out_of_memory,
            "num_restarts": self.num_restarts,
            "num_wasted_samples": self.num_wasted_samples,
            "mean_of_limit": float(np.mean(self.ratios)),
            "peak_of_limit": float(np.max(self.ratios)),
            "num_steps": len(self.ratios),
            "num_samples": self.num_samples,
            "wall_s": time.perf_counter() - started,
        }


def make_trainer(device: VirtualDevice, **options: Any) -> FusionTrainer:
    """The same model and weights for every arm, its optimizer's state made before the limit counts."""
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=VOCAB_SIZE)
    limit_bytes, device.limit_bytes = device.limit_bytes, None
    trainer = FusionTrainer(
        model, device="cpu", objectives=OBJECTIVES, live=device, lr=1e-4, total_steps=1000, **options
    )
    sizes = SampleSizes(num_tokens=[4, 4], height=[16, 16], width=[16, 16], group=[0, 1])
    trainer.train_step([random_batch(sizes, [0, 1], np.random.default_rng(0))])
    device.limit_bytes = limit_bytes
    return trainer


def run_ours(
    sizes: SampleSizes,
    limit_bytes: int,
    num_epochs: int,
    make: Callable[[], ResourceAwareScheduler | Scheduler],
) -> Use:
    """A run under one of our schedulers: steps that ran out of memory are done again in parts."""
    device, use = VirtualDevice(limit_bytes=limit_bytes), Use()
    loader = RandomBatches(sizes, make())
    for values in make_trainer(device).fit(loader, num_epochs=num_epochs):
        use.ratios.append(values["peak_bytes"] / limit_bytes)
        use.num_samples += values["num_samples"]
    use.num_out_of_memory = device.num_failures
    return use


def run_restarting(
    sizes: SampleSizes,
    limit_bytes: int,
    num_epochs: int,
    batch_size: int,
    use: Use,
    smaller: Callable[[int], int],
) -> Use:
    """Random batches of a fixed size; started again with smaller ones each time that memory runs out."""
    while True:
        device = VirtualDevice(limit_bytes=limit_bytes)
        trainer = make_trainer(device, on_out_of_memory="raise")
        done: list[dict[str, Any]] = []
        trainer._emit = lambda event: done.append(event.values) if event.kind == "step" else None  # noqa: B023
        loader = RandomBatches(sizes, make_scheduler("random", batch_size=batch_size))
        try:
            trainer.fit(loader, num_epochs=num_epochs)
        except torch.OutOfMemoryError:
            use.num_out_of_memory += 1
            use.num_restarts += 1
            use.num_wasted_samples += sum(values["num_samples"] for values in done)
            batch_size = smaller(batch_size)
            continue
        use.ratios = [values["peak_bytes"] / limit_bytes for values in done]
        use.num_samples = sum(values["num_samples"] for values in done)
        return use


def run_accelerate(sizes: SampleSizes, limit_bytes: int, num_epochs: int) -> Use:
    """accelerate's decorator: the whole training again with a smaller batch, until it comes through."""
    from accelerate.utils import find_executable_batch_size

    use, done = Use(), []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> None:
        device = VirtualDevice(limit_bytes=limit_bytes)
        trainer = make_trainer(device, on_out_of_memory="raise")
        use.num_wasted_samples += sum(values["num_samples"] for values in done)
        done.clear()
        trainer._emit = lambda event: done.append(event.values) if event.kind == "step" else None
        try:
            trainer.fit(
                RandomBatches(sizes, make_scheduler("random", batch_size=batch_size)), num_epochs=num_epochs
            )
        except torch.OutOfMemoryError:
            use.num_out_of_memory += 1
            use.num_restarts += 1
            raise

    train()
    use.ratios = [values["peak_bytes"] / limit_bytes for values in done]
    use.num_samples = sum(values["num_samples"] for values in done)
    return use


def run_lightning(sizes: SampleSizes, limit_bytes: int, num_epochs: int) -> Use:
    """Lightning's BatchSizeFinder on the first batches; then the run, restarted with half where it was too hopeful."""
    warnings.filterwarnings("ignore")
    import logging

    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device, use = VirtualDevice(limit_bytes=limit_bytes), Use()
    trainer = make_trainer(device)
    model, goal = trainer.model, OBJECTIVES["contrastive"]

    class Module(pl.LightningModule):
        batch_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            use.num_wasted_samples += len(batch)
            return goal(self.model(batch), batch) / len(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

        def train_dataloader(self) -> DataLoader:
            rows = np.random.default_rng(0).permutation(len(sizes)).tolist()
            rng = np.random.default_rng(1)
            return DataLoader(
                rows, batch_size=self.batch_size, collate_fn=lambda some: random_batch(sizes, some, rng)
            )

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Module()
    with TemporaryDirectory() as folder, device:
        runner = pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **quiet)
        Tuner(runner).scale_batch_size(module, mode="power", init_val=2, steps_per_trial=3, max_trials=8)
    use.num_out_of_memory = device.num_failures
    return run_restarting(
        sizes, limit_bytes, num_epochs, module.batch_size, use, lambda batch_size: max(1, batch_size // 2)
    )
