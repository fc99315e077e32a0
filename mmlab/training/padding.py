"""How much of a window of batches is padding, counted in the batches' own masks.

Texts count in tokens, images in patches of 16 x 16 pixels, as planners count them. Costs a pass over the masks of the
patches, not of the pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmlab.types import PATCH

if TYPE_CHECKING:
    from torch import Tensor

    from mmlab.types import Batch


def measure_padding(batches: Sequence[Batch], *, packed: bool = False) -> dict[str, float]:
    """The padding values of a `step` event.

    Args:
        packed: the model takes the padding out before it computes, see `mmlab.model.packing`: nothing is wasted.

    Returns:
        `text_waste`, `image_waste` and `combined_waste`, the shares of tokens, of patches and of both together that
        are padding, and `predicted_cost`, the number of tokens and patches with padding.
    """
    tokens = padded_tokens = patches = padded_patches = 0
    for batch in batches:
        patch_mask = batch.pixel_mask[:, ::PATCH, ::PATCH]
        tokens += _num_true(batch.attention_mask)
        padded_tokens += batch.attention_mask.numel()
        patches += _num_true(patch_mask)
        padded_patches += patch_mask.numel()
    if packed:
        padded_tokens, padded_patches = max(1, tokens), max(1, patches)
        tokens, patches = padded_tokens, padded_patches
    return {
        "text_waste": 1 - tokens / padded_tokens,
        "image_waste": 1 - patches / padded_patches,
        "combined_waste": 1 - (tokens + patches) / (padded_tokens + padded_patches),
        "predicted_cost": padded_tokens + padded_patches,
    }


def _num_true(mask: Tensor) -> int:
    """NumPy counts a small mask in a tenth of torch's time, and this is done in every step."""
    return int(np.count_nonzero(mask.numpy()) if mask.device.type == "cpu" else mask.count_nonzero())
