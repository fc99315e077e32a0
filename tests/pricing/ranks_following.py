"""On two ranks: batches follow the memory that either rank is seen to use.

Rank 1 runs out of memory once besides. Both must decide alike, at the same step, and see each sample once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from mmlab.comparison.config import load_config
from mmlab.comparison.options import DataOptions
from mmlab.comparison.preparation import make_datasets
from mmlab.comparison.train import train
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.parallel import make_strategy
from mmlab.parallel.process_group import ProcessGroup
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.resource_aware import ResourceAwareScheduler
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.runs.events import RunEvent, read_events
from mmlab.schedule.cost import MaxPolynomial
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Batch
from tests.training.test_out_of_memory import TINY

CPU = torch.device("cpu")
NUM_EPOCHS = 2


class Recording(PlannedLoader):
    """Keeps what it has delivered."""

    seen: list[tuple[int, str]]

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            self.seen += [(self.epoch, name) for name in batch.record_ids]
            yield batch


def follow(data: str) -> None:
    """The memory model predicts too little, and not the same share of it for every batch."""
    ranks = ProcessGroup()
    dataset, _ = make_datasets(data, DataOptions(path=data, image="aspect:32"), progress=False)
    torch.manual_seed(0)
    device = VirtualDevice()
    events: list[RunEvent] = []
    trainer = FusionTrainer(
        build_model("tiny", vocab_size=len(dataset.tokenizer), **TINY),
        device="cpu",
        strategy=make_strategy("ddp"),
        objectives={"contrastive": Contrastive()},
        live=device,
        emit=events.append,
    )
    probe = PlannedLoader(dataset, make_scheduler("random", batch_size=8), num_workers=0)
    batch = next(iter(probe))
    peak_bytes = ranks.largest(trainer.train_step([batch])["peak_bytes"])
    shape = batch.shape
    a_token = 0.8 * peak_bytes / (shape.batch_size * (shape.num_tokens + shape.height * shape.width // 256))
    cost = MaxPolynomial([[a_token, a_token]], [(1, 1, 0), (1, 0, 1)], unit="bytes")
    scheduler = ResourceAwareScheduler(
        planner=make_scheduler("memory", cost=cost, budget=peak_bytes, world_size=2),
        rank=ranks.rank,
        emit=events.append,
        agree=ranks.largest,
    )
    trainer.memory = cost
    loader = Recording(
        dataset, scheduler, num_workers=1 + ranks.rank, prefetch=1
    )  # one prefetches more than the other
    loader.seen = []
    if ranks.rank == 1:
        device.fail_at = device.num_operations + 2000
    trainer.fit(loader, num_epochs=NUM_EPOCHS)

    decided = [
        (event.step, *(event.values[key] for key in ("action", "old_value", "new_value", "num_replanned")))
        for event in events
        if event.kind == "decision" and event.values["action"] != "hold"
    ]
    found: list = [None, None]
    distributed.all_gather_object(found, (decided, loader.seen, trainer.step))
    (one, seen, num_steps), (other, seen_there, num_there) = found
    assert one == other
    assert num_steps == num_there
    assert any(num_replanned for *_, num_replanned in one), one
    assert len(seen + seen_there) == len({*seen, *seen_there}) == NUM_EPOCHS * len(dataset)
    assert device.num_failures == ranks.rank


def resume(config: Path, runs: Path) -> None:
    """`train` follows on several ranks too: rank 0 prices the model once for all, and for the run that goes on."""
    fitted: list[MemoryModel] = []

    def fit(*arguments: Any, **options: Any) -> MemoryModel:
        fitted.append(fit_memory(*arguments, **options))
        return fitted[-1]

    with patch("mmlab.comparison.plan.fit_memory", fit):
        for num_epochs in (1, 2):
            changes = [f"trainer.num_epochs={num_epochs}", "checkpoint.every_steps=2"]
            result = train(load_config(config, changes), runs=runs, resume="auto", progress=False)
            assert result.num_epochs == num_epochs
    assert len(fitted) == (1 if ProcessGroup().rank == 0 else 0)
    steps = [event for event in read_events(runs / "small" / "events-rank0.jsonl")[0] if event.kind == "step"]
    assert len(steps) == result.num_steps
    assert {"rank_wait_s", "predicted_bytes"} <= steps[-1].values.keys()


def main(scenes: Path, config: Path, runs: Path) -> None:
    follow(str(scenes))
    resume(config, runs)
