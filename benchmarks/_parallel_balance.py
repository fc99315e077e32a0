"""How long ranks wait for each other's batches, by the plan and measured; and how much of the work is padding."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from mmlab.model.presets import build_model
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.noise import noise_batch
from mmlab.types import Aspect, BatchShape, SampleSizes

VOCAB_SIZE = 1000
_MEAN_SAMPLES = 8
_REPEATS = 5
_SIDE = 96


def sizes_of(num_samples: int) -> SampleSizes:
    """Sizes as captioned photographs have them: long-tailed texts, images of several aspects."""
    draw = np.random.default_rng(0)
    tokens = np.clip(draw.lognormal(2.6, 0.45, num_samples), 5, 64).astype(int)
    aspect = draw.choice([3 / 4, 2 / 3, 1.0, 4 / 3, 3 / 2], num_samples)
    height = np.clip(640 / np.sqrt(aspect), 1, None).astype(int)
    sizes = SampleSizes(
        num_tokens=tokens,
        height=height,
        width=(height * aspect).astype(int),
        group=np.arange(num_samples),
    )
    return sizes.resized(Aspect(_SIDE**2))


def measure_balance(num_steps: int) -> list[dict[str, Any]]:
    """A row a scheduler and number of ranks; step times of 2 ranks are measured, one batch after the other.

    Each batch is timed alone on one thread, so that what a rank waits for is the difference in work and nothing else.
    """
    sizes = sizes_of(4096)
    patches = (sizes.height // 16) * (sizes.width // 16)
    budget = _MEAN_SAMPLES * float((sizes.num_tokens + patches).mean())
    rows = []
    for name, options in (("budget", {"budget": budget}), ("random", {"batch_size": _MEAN_SAMPLES})):
        for num_ranks in (2, 8):
            plan = make_scheduler(name, world_size=num_ranks, **options).plan(sizes)
            report = plan.report(num_ranks=num_ranks)
            row: dict[str, Any] = {
                "kind": "balance",
                "scheduler": name,
                "num_ranks": num_ranks,
                "planned_imbalance": report.straggler,
                "padded_over_useful": 1 / (1 - report.combined_waste),
            }
            if num_ranks == 2:
                row |= _timed(list(plan.shapes[: 2 * num_steps]))
            rows.append(row)
    return rows


def _timed(shapes: list[Any]) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = FusionTrainer(
        build_model("tiny", vocab_size=VOCAB_SIZE), objectives={"contrastive": Contrastive()}, device="cpu"
    )
    batches = [noise_batch(BatchShape(*map(int, shape)), num_ids=VOCAB_SIZE) for shape in shapes]
    trainer.train_step([batches[0]])
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(_REPEATS):
        for place, batch in enumerate(batches):
            started = time.perf_counter()
            trainer.train_step([batch])
            times[place].append(time.perf_counter() - started)
    torch.set_num_threads(before)
    steps = np.median(times, axis=1).reshape(-1, 2)
    return {
        "measured_imbalance": float(1 - steps.mean(1).sum() / steps.max(1).sum()),
        "step_s": steps.tolist(),
        "repeats_s": times,
    }
