"""Collation: samples of different sizes become one padded batch.

Copies once, with numpy, in the calling thread alone: torch would share out each copy over as many threads as there are
cores, which are busy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmlab.dataset import Sample
from mmlab.images import PATCH
from mmlab.types import Batch


def collate(samples: Sequence[Sample], *, pad_token_id: int = 0) -> Batch:
    """Pad samples to the largest height, width and text among them.

    Images sit in the top left corner; padding is zero in `pixel_values`, `pad_token_id` in `input_ids` and
    False in the masks. A batch without any image (or text) still gets one fully masked patch (or token), so
    that no tensor is empty.

    Returns:
        Batch of B samples, `pixel_values` (B, 3, H, W) uint8, `input_ids` (B, T) int64.
    """
    images = [None if sample["image"] is None else sample["image"].numpy() for sample in samples]
    height = max((image.shape[1] for image in images if image is not None), default=PATCH)
    width = max((image.shape[2] for image in images if image is not None), default=PATCH)
    num_tokens = max(1, *(len(sample["input_ids"]) for sample in samples))
    pixel_values = np.zeros((len(samples), 3, height, width), np.uint8)
    pixel_mask = np.zeros((len(samples), height, width), bool)
    input_ids = np.full((len(samples), num_tokens), pad_token_id, np.int64)
    attention_mask = np.zeros((len(samples), num_tokens), bool)
    for row, (sample, image) in enumerate(zip(samples, images, strict=True)):
        ids = sample["input_ids"]
        if image is not None:
            pixel_values[row, :, : image.shape[1], : image.shape[2]] = image
            pixel_mask[row, : image.shape[1], : image.shape[2]] = True
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = True
    labels = [sample["label"] for sample in samples]
    return Batch(
        pixel_values=torch.from_numpy(pixel_values),
        pixel_mask=torch.from_numpy(pixel_mask),
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        labels=None if None in labels else torch.tensor(labels),
        record_ids=[sample["id"] for sample in samples],
        groups=torch.tensor([sample["group"] for sample in samples]),
    )
