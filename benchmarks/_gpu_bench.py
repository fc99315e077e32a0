"""Sizes of the cases of `gpu.py`, and the models and batches that they measure with."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

GIB = 2**30
Result = tuple[dict[str, Any], list[dict[str, Any]]]  # a row, its goals


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where to measure, and how large: sizes that fill a big GPU; tests make them small."""

    device: str = "cuda"
    block_bytes: tuple[int, ...] = (GIB, 4 * GIB)
    matrix_side: int = 8192
    busy_s: float = 2.5
    model: str = "base"
    batch_sizes: tuple[int, ...] = (128, 64, 32, 16)  # the first that fits
    image_side: int = 224
    num_tokens: int = 64
    num_repeats: int = 5
    steps_per_repeat: int = 3
    num_warmup_steps: int = 4
    timed_models: tuple[str, ...] = ("tiny", "small", "resnet18", "base")
    timed_budget: float = 30_000  # padded tokens of the largest timed batch
    fit_s: float = 5.0  # of measured steps for each time model
    specification: str | None = None  # in `mmlab.pricing.DEVICES`; None finds the card by its name
    compiled_models: tuple[str, ...] = ("base",)
    compile: bool | str = True  # as in `TrainOptions`
    num_compiled_shapes: int = 6
    overhead_rounds: int = 15
    num_new_shapes: int = 16
    compare_images: int = 600
    compare_model: str = "base"
    compare_image: str = "aspect:224"
    compare_epochs: int = 2
    compare_batch_size: int = 128
    article_images: int = 300
    article_captions: int = 5
    article_rounds: int = 3
    article_batch_size: int = 64
    num_workers: int | None = None  # of loaders and of making data; None takes one a core, at most 8


QUICK = Bench(
    batch_sizes=(16,),
    busy_s=0.5,
    num_repeats=2,
    steps_per_repeat=1,
    timed_models=("tiny", "small"),
    timed_budget=8000,
    fit_s=2.0,
    compiled_models=("tiny",),
    num_compiled_shapes=2,
    overhead_rounds=2,
    num_new_shapes=4,
    compare_images=60,
    compare_model="small",
    compare_epochs=1,
    compare_batch_size=16,
    article_images=40,
    article_rounds=1,
    article_batch_size=8,
)


class Skipped(Exception):
    """A case cannot run here; the message says why."""


def make_trainer(bench: Bench, precision: str, *, model_name: str | None = None, **options: Any) -> Any:
    import torch

    from mmlab.model.presets import build_model
    from mmlab.training.loop import FusionTrainer

    torch.manual_seed(0)
    model = build_model(model_name or bench.model, vocab_size=1000)
    return FusionTrainer(
        model, objectives=("contrastive", "matching"), precision=precision, device=bench.device, **options
    )


def noise(bench: Bench, batch_size: int) -> Any:
    """A batch of noise on the device, texts of one half to the whole of the padded length."""
    import torch

    from mmlab.types import Batch

    draw = torch.Generator().manual_seed(0)
    side, length = bench.image_side, bench.num_tokens
    lengths = torch.randint(length // 2, length + 1, (batch_size, 1), generator=draw)
    lengths[0] = length
    batch = Batch(
        pixel_values=torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, generator=draw),
        pixel_mask=torch.ones(batch_size, side, side, dtype=torch.bool),
        input_ids=torch.randint(0, 1000, (batch_size, length), generator=draw),
        attention_mask=torch.arange(length) < lengths,
        labels=None,
        record_ids=[str(number) for number in range(batch_size)],
        groups=torch.arange(batch_size),
    )
    return batch.to(bench.device)


def synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def empty_cache(device: str) -> None:
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
