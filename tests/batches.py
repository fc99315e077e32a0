"""Small real batches for the tests of model, losses and trainer."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from mmlab.types import Batch


def make_batch(sizes: list[tuple[int, int, int]], *, seed: int = 0, vocab_size: int = 50) -> Batch:
    """One sample per (tokens, height, width); zero tokens or pixels are a missing modality."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, height, width = (max(1, *column) for column in zip(*sizes, strict=True))
    shape = (len(sizes), 3, max(16, height), max(16, width))
    batch = Batch(
        pixel_values=torch.zeros(shape, dtype=torch.uint8),
        pixel_mask=torch.zeros(shape[0], *shape[2:], dtype=torch.bool),
        input_ids=torch.zeros(len(sizes), num_tokens, dtype=torch.int64),
        attention_mask=torch.zeros(len(sizes), num_tokens, dtype=torch.bool),
        labels=torch.arange(len(sizes)) % 2,
        record_ids=[f"sample {row}" for row in range(len(sizes))],
        groups=torch.arange(len(sizes)),
    )
    for row, (tokens, rows, columns) in enumerate(sizes):
        pixels = torch.randint(0, 256, (3, rows, columns), generator=generator, dtype=torch.uint8)
        batch.pixel_values[row, :, :rows, :columns] = pixels
        batch.pixel_mask[row, :rows, :columns] = True
        batch.input_ids[row, :tokens] = torch.randint(1, vocab_size, (tokens,), generator=generator)
        batch.attention_mask[row, :tokens] = True
    return batch


def pad_more(batch: Batch, *, tokens: int, height: int, width: int, noise: bool = False) -> Batch:
    """The same samples with more padding; with `noise` the padding holds anything."""
    pad = nn.functional.pad
    wider = dataclasses.replace(
        batch,
        pixel_values=pad(batch.pixel_values, (0, width, 0, height)),
        pixel_mask=pad(batch.pixel_mask, (0, width, 0, height)),
        input_ids=pad(batch.input_ids, (0, tokens)),
        attention_mask=pad(batch.attention_mask, (0, tokens)),
    )
    if noise:
        random = torch.randint_like(wider.pixel_values, 256)
        wider.pixel_values = torch.where(wider.pixel_mask[:, None], wider.pixel_values, random)
        wider.input_ids = torch.where(wider.attention_mask, wider.input_ids, 7)
    return wider


def merge(batches: list[Batch]) -> Batch:
    """One batch of all samples, padded to the largest."""
    num_tokens = max(batch.shape.num_tokens for batch in batches)
    height, width = (max(batch.shape[axis] for batch in batches) for axis in (2, 3))
    padded = [
        pad_more(
            batch,
            tokens=num_tokens - batch.shape.num_tokens,
            height=height - batch.shape.height,
            width=width - batch.shape.width,
        )
        for batch in batches
    ]
    columns = ("pixel_values", "pixel_mask", "input_ids", "attention_mask", "labels", "groups")
    joined = {name: torch.cat([getattr(batch, name) for batch in padded]) for name in columns}
    return Batch(**joined, record_ids=[record_id for batch in padded for record_id in batch.record_ids])
