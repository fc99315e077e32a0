"""The articles' way of feeding a model beside ours: same samples, same weights, same trainer, other batches.

`articles` decodes with Pillow, resizes to 224 x 224, pads every text to 512 tokens and loads in the training process,
32 samples a batch. `articles, longest text` differs in one thing, padding to the longest text of the batch, so that the
cost of the 512 can be told from the rest. `budget` and `packed` are mmlab as a user has it: images keep their shape
within the same area, threads decode ahead, and a cache keeps what was decoded; it is filled in the first epoch, which
is counted.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from mmlab.comparison.preparation import COST, suit
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.collate import collate
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.types import Aspect, Batch, Square

BATCH_SIZE, SIDE, MAX_TOKENS, LR = 32, 224, 512, 1e-3


class ArticleDataset(Dataset[dict[str, Any]]):
    """One sample as the articles prepare it."""

    def __init__(self, dataset: MultimodalDataset) -> None:
        self.records, self.tokenizer = dataset.records, dataset.tokenizer

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> dict[str, Any]:
        record = self.records[row]
        image = (
            Image.open(io.BytesIO(self.records.read_image(row)))
            .convert("RGB")
            .resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        )
        tokens = self.tokenizer(record.text, padding="max_length", truncation=True, max_length=MAX_TOKENS)
        return {
            "id": record.id,
            "group": record.group,
            "image": torch.from_numpy(np.array(image).transpose(2, 0, 1)),
            "input_ids": torch.tensor(tokens["input_ids"]),
            "attention_mask": torch.tensor(tokens["attention_mask"], dtype=torch.bool),
        }


def stack(samples: list[dict[str, Any]], *, to_longest: bool = False) -> Batch:
    """A batch of samples of one size; texts cut to the longest if asked for."""
    columns = {
        name: torch.stack([sample[name] for sample in samples])
        for name in ("image", "input_ids", "attention_mask")
    }
    longest = int(columns["attention_mask"].sum(1).max()) if to_longest else MAX_TOKENS
    return Batch(
        pixel_values=columns["image"],
        pixel_mask=torch.ones(len(samples), SIDE, SIDE, dtype=torch.bool),
        input_ids=columns["input_ids"][:, :longest],
        attention_mask=columns["attention_mask"][:, :longest],
        labels=None,
        record_ids=[sample["id"] for sample in samples],
        groups=torch.tensor([sample["group"] for sample in samples]),
    )


@dataclass(kw_only=True)
class Arm:
    """One way of feeding the model: its trainer, its batches, and what its epochs took."""

    name: str
    trainer: FusionTrainer
    loader: Any
    held_out: Iterable[Batch]
    epochs: list[dict[str, float]] = field(default_factory=list)

    def run_epoch(self) -> None:
        """Train an epoch and evaluate; the evaluation is not timed."""
        started_s = time.perf_counter()
        steps = self.trainer.fit(self.loader, num_epochs=1)
        epoch_s = time.perf_counter() - started_s
        found = self.trainer.evaluate(self.held_out)
        self.epochs.append(
            {
                "epoch_s": epoch_s,
                "data_wait_s": sum(step["data_wait_s"] for step in steps),
                "num_steps": len(steps),
                "num_samples": sum(step["num_samples"] for step in steps),
                "padded_cost": sum(step["padded_cost"] for step in steps),
                "held_out_loss": found["loss"],
                "image_to_text_r1": found["image_to_text_r1"],
            }
        )

    def row(self) -> dict[str, Any]:
        """Medians over the epochs, each epoch, and the loss at the end."""
        times = [epoch["epoch_s"] for epoch in self.epochs]
        return {
            "kind": "articles",
            "arm": self.name,
            "epoch_s": float(np.median(times)),
            "all_epochs_s": sum(times),
            "data_wait_ratio": sum(epoch["data_wait_s"] for epoch in self.epochs) / sum(times),
            "held_out_loss": self.epochs[-1]["held_out_loss"],
            "epochs": self.epochs,
        }


def measure_articles(scenes: Path, folder: Path, *, num_epochs: int) -> list[dict[str, Any]]:
    """A row an arm; arms take turns epoch by epoch, in rotating order.

    Args:
        scenes: generated data, see `mmlab.make_dataset`.
        folder: for the caches, empty.
    """
    arms = make_arms(scenes, folder, num_epochs)
    for epoch in range(num_epochs):
        for turn in range(len(arms)):
            arms[(turn + epoch) % len(arms)].run_epoch()
    return [arm.row() for arm in arms]


def make_arms(scenes: Path, folder: Path, num_epochs: int) -> list[Arm]:
    """All arms, each with the same initial weights."""
    records = read_records(scenes, progress=False)
    train, held_out = records.split("train"), records.split("val")
    square = MultimodalDataset(train, image_policy=Square(SIDE))
    article_set = ArticleDataset(square)
    tokenizer = square.tokenizer
    arms = []
    for name, to_longest in (("articles", False), ("articles, longest text", True)):
        loader = DataLoader(
            article_set,
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=0,
            collate_fn=partial(stack, to_longest=to_longest),
        )
        arms.append(
            Arm(
                name=name,
                trainer=make_trainer(len(tokenizer), num_epochs * len(loader)),
                loader=loader,
                held_out=batches_of(
                    MultimodalDataset(held_out, tokenizer=tokenizer, image_policy=Square(SIDE))
                ),
            )
        )
    policy = Aspect(SIDE * SIDE)
    for name in ("budget", "packed"):
        dataset = MultimodalDataset(train, tokenizer=tokenizer, image_policy=policy)
        planned = PlannedLoader(
            dataset,
            make_scheduler(name, budget=BATCH_SIZE * float(batch_costs(COST, dataset.sizes.alone).mean())),
            backend="threads",
            cache=SampleCache(folder / name, key=cache_key(dataset)),
        )
        plan = planned.plan
        arms.append(
            Arm(
                name=name,
                trainer=make_trainer(
                    len(tokenizer), num_epochs * len(plan), lambda model, plan=plan: suit(model, plan)
                ),
                loader=planned,
                held_out=batches_of(MultimodalDataset(held_out, tokenizer=tokenizer, image_policy=policy)),
            )
        )
    return arms


def make_trainer(
    vocab_size: int,
    total_steps: int,
    change: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
) -> FusionTrainer:
    """A trainer whose loss does not depend on the batch size, of a model with weights that are always the same."""
    torch.manual_seed(0)
    return FusionTrainer(
        change(build_model("tiny", vocab_size=vocab_size)),
        objectives={"contrastive": Contrastive(num_negatives=BATCH_SIZE - 1)},
        device="cpu",
        lr=LR,
        total_steps=total_steps,
    )


def batches_of(dataset: MultimodalDataset) -> list[Batch]:
    """Every sample, decoded once."""
    plan = make_scheduler("sorted", batch_size=BATCH_SIZE).plan(dataset.sizes)
    return [collate([dataset[row] for row in rows]) for rows in plan]
