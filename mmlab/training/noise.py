"""Batches of noise, for steps whose time, bytes or gradients are measured."""

from __future__ import annotations

import torch

from mmlab.data.collate import Sample, collate
from mmlab.types import PATCH, Batch, BatchShape


def noise_batch(shape: BatchShape, *, num_ids: int, seed: int = 0, ragged: bool = False) -> Batch:
    """Random images and texts, as the loader collates them.

    Args:
        num_ids: token ids are below it.
        ragged: the last sample has one token and one row of patches less, if possible; otherwise nothing is
            padded.
    """
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for row in range(shape.batch_size):
        length, height = shape.num_tokens, shape.height
        if ragged and row == shape.batch_size - 1 and row > 0:
            length = max(1, length - 1)
            height = height - PATCH if height > PATCH else height
        samples.append(noise_sample(row, (length, height, shape.width), num_ids=num_ids, generator=generator))
    return collate(samples)


def noise_sample(
    group: int, size: tuple[int, int, int], *, num_ids: int, generator: torch.Generator
) -> Sample:
    """A decoded sample of noise; `size` is its tokens, height and width."""
    length, height, width = size
    return Sample(
        id=str(group),
        image=torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator),
        text=None,
        input_ids=torch.randint(1, num_ids, (length,), generator=generator),
        label=0,
        group=group,
    )
