"""Masked language modelling: predict hidden tokens from the rest of their text and, through the fusion, the image."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import check_is, check_numbers
from mmlab.model.fusion_model import FusionOutput
from mmlab.model.masking import can_hide, draw_hidden, num_hidden
from mmlab.training.losses.base import sample_weights
from mmlab.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLanguage:
    """Masked language modelling: predict hidden tokens from the rest of the text and, through the fusion, the image.

    >>> MaskedLanguage(mask_id=4, special_ids=(0, 1, 2, 3, 4)).mask_ratio
    0.15

    In a text-only sample, hidden tokens are predicted from the text alone; an image-only sample adds nothing
    and is not counted. The same share of tokens is hidden in each text, so the count is known before they are
    drawn. All are replaced by the mask token: the text encoder sees whole texts in its other pass, so none
    needs to stay unchanged.

    Args:
        mask_id: the tokenizer's mask token.
        special_ids: tokens that are never hidden; padding never is.
        mask_ratio: share of the other tokens that is hidden, at least one.

    Raises:
        OptionError: a mask token that is no whole number >= 0, or a share outside (0, 1].

    Source: Devlin et al. 2019 (arXiv:1810.04805); conditioned on the image as in Li et al. 2021 (arXiv:2107.07651).
    """

    mask_id: int | None = None
    special_ids: tuple[int, ...] = ()
    mask_ratio: float = 0.15

    def __post_init__(self) -> None:
        remedy = "objectives={'masked_language': MaskedLanguage.of(tokenizer)}"
        check_is("mask_id", self.mask_id, Integral, f"the tokenizer's mask token; give {remedy}")
        check_numbers(self)

    @classmethod
    def of(cls, tokenizer: Any, *, mask_ratio: float = 0.15) -> MaskedLanguage:
        """With the mask token and the special tokens of a `transformers` tokenizer.

        Raises:
            OptionError: it has no mask token.
        """
        mask_id = getattr(tokenizer, "mask_token_id", None)
        special_ids = () if mask_id is None else tuple(sorted(tokenizer.all_special_ids))
        return cls(mask_id=mask_id, special_ids=special_ids, mask_ratio=mask_ratio)

    def count(self, batch: Batch) -> int:
        """Number of tokens to hide."""
        return int(num_hidden(can_hide(batch.host, self.special_ids), self.mask_ratio).numpy().sum())

    def __call__(self, output: FusionOutput, batch: Batch) -> Tensor:
        """Sum of the hidden tokens' cross-entropies, in nats."""
        assert self.mask_id is not None
        ids = batch.input_ids
        positions, wanted, hidden = draw_hidden(can_hide(batch, self.special_ids), self.mask_ratio)
        masked_ids, targets = torch.where(hidden, self.mask_id, ids), ids.gather(1, positions)
        losses = output.token_losses(masked_ids, batch.attention_mask, positions, targets)
        return (losses * wanted * sample_weights(batch)[:, None]).sum()
