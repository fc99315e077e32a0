"""A rank of a run that goes on with another number of ranks, and perhaps another strategy, each time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

from mmlab.comparison import plan
from mmlab.comparison.config import load_config
from mmlab.comparison.train import train
from mmlab.training.loop import FusionTrainer

_FREE_BYTES = 16 * 2**20


def train_and_note(config: Path, runs: Path, stage: int, strategy: str, stop_after: int | None) -> None:
    """Train until a step; write a line for every step: stage, epoch, step, learning rate and the samples' ids."""
    rank, plain = int(os.environ.get("RANK", "0")), FusionTrainer.train_step

    def noted(trainer, batches, **options):
        values = plain(trainer, batches, **options)
        if not trainer.options.lr:  # a step that is measured
            return values
        ids = [record_id for batch in batches for record_id in batch.record_ids]
        if strategy == "branch" and rank:  # both read all samples; they count once
            ids = []
        line = [stage, values["epoch"], trainer.step, values["lr"], ids]
        with (runs / f"seen-{stage}-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trainer.step == stop_after:
            trainer.stop()
        return values

    FusionTrainer.train_step = noted
    # each start finds more memory free than the one before
    plan.memory_limit = lambda *_, **__: SimpleNamespace(usable_bytes=(1 + stage) * _FREE_BYTES)
    changes = [f"parallel.strategy={strategy}"]
    train(load_config(config, changes), runs=runs, resume="auto", progress=False)
