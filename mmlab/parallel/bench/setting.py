"""What is measured: one picklable object that every rank gets, and the batch that all strategies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mmlab.types import Batch

VOCAB_SIZE = 30_522  # of bert-base-uncased: its embedding is reduced like any other weight
OBJECTIVES = ("contrastive", "matching")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of the benchmark; the same for every strategy."""

    strategies: tuple[str, ...]
    model: str = "small"
    num_ranks: int = 2
    threads_per_rank: int = 1
    batch_size: int = 16  # samples of a step, over all ranks
    image_side: int = 128  # pixels
    num_tokens: int = 32
    num_steps: int = 4  # timed in a row
    num_rounds: int = 3
    num_warmup_steps: int = 1
    device_type: str = "cpu"
    precision: str = "fp32"
    seed: int = 0
    progress: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)  # strategies beside those of `ARMS`, by name

    @property
    def backend(self) -> str:
        """Of `torch.distributed`."""
        return "nccl" if self.device_type == "cuda" else "gloo"

    def device(self, rank: int) -> torch.device:
        """Of a rank."""
        return torch.device(self.device_type, rank) if self.device_type == "cuda" else torch.device("cpu")


def make_batch(setting: Setting, rows: slice = slice(None)) -> Batch:
    """Some rows of the batch that every strategy trains on: noise, texts from half the padded length to all of it."""
    size, side, length = setting.batch_size, setting.image_side, setting.num_tokens
    draw = torch.Generator().manual_seed(setting.seed)
    lengths = torch.randint((length + 1) // 2, length + 1, (size, 1), generator=draw)
    lengths[:: max(1, size // setting.num_ranks)] = length  # every rank's share is padded alike
    whole = Batch(
        pixel_values=torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=draw),
        pixel_mask=torch.ones(size, side, side, dtype=torch.bool),
        input_ids=torch.randint(0, VOCAB_SIZE, (size, length), generator=draw),
        attention_mask=torch.arange(length) < lengths,
        labels=None,
        record_ids=[str(number) for number in range(size)],
        groups=torch.arange(size),
    )
    return whole.part(rows)
