"""Hidden tokens for masked language modelling: how many and which.

Each text hides the same share of its tokens, so that the count is known before anything is drawn. All hidden
tokens are replaced by the mask token, none left as they were. Costs one random number per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmlab.types import Batch, HostColumns


def can_hide(batch: Batch | HostColumns, special_ids: tuple[int, ...]) -> Tensor:
    """Tokens that are neither padding nor special, (B, T) bool."""
    special = torch.tensor(special_ids, dtype=torch.int64, device=batch.input_ids.device)
    return batch.attention_mask & ~torch.isin(batch.input_ids, special)


def num_hidden(can_hide: Tensor, mask_ratio: float) -> Tensor:
    """How many tokens of each text are hidden, (B,): at least one where there is any."""
    num_tokens = can_hide.sum(1)
    return torch.where(num_tokens > 0, (num_tokens.double() * mask_ratio).round().clamp(min=1).long(), 0)


def draw_hidden(
    can_hide: Tensor, mask_ratio: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the tokens to hide.

    Returns:
        Positions (B, K); `wanted` (B, K) bool, which of them are hidden; and the same as a mask `hidden` (B,
        T) bool.
    """
    num_tokens = can_hide.shape[1]
    most = min(num_tokens, max(1, round(mask_ratio * num_tokens)))
    drawn = torch.rand(can_hide.shape, device=can_hide.device, generator=generator)
    positions = drawn.masked_fill(~can_hide, -1.0).topk(most, dim=1).indices
    wanted = torch.arange(most, device=can_hide.device) < num_hidden(can_hide, mask_ratio)[:, None]
    return positions, wanted, torch.zeros_like(can_hide).scatter(1, positions, wanted)
