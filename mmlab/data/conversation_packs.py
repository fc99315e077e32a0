"""Packed batches of conversations: samples end to end in one row, each attending only to itself.

With SDPA, flash or flex attention, transformers keeps the samples of a row apart if positions restart at each
sample and no mask is given. Not every model passes positions on, and some attend in both directions, so a
model is tried once, on two samples of its own processor, which takes two forward passes.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mmlab.errors import OptionError
from mmlab.types import IGNORED

REFUSED = "%s cannot take packed batches: %s; leave out packed_for"
_OF_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")


class Packer:
    """Lays the samples of a padded batch end to end, at the positions that the model would give them.

    Args:
        model: of transformers. None of its weights are kept, so that a packer can be sent to workers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rope: Any = None  # gives images positions of their own, as in Qwen-VL
        inner: Any = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
        if inner is not None:
            self._rope = nn.Module.__new__(type(inner))
            nn.Module.__init__(self._rope)
            self._rope.config = inner.config

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The T tokens of B samples as one row: `input_ids`, `labels` (1, T), and `position_ids` (1, T),
        or (4, 1, T) with those of the text first; images are unchanged.
        """
        there = batch["attention_mask"].bool()
        places = (there.cumsum(1) - 1)[there][None]
        rope = None
        if self._rope is not None:
            known = signature(self._rope.get_rope_index).parameters
            rope, _ = self._rope.get_rope_index(**{name: batch[name] for name in batch if name in known})
        row = {name: value[there][None] if name in _OF_TOKENS else value for name, value in batch.items()}
        del row["attention_mask"]
        # the last token of a sample must not predict the first of the next
        row["labels"] = row["labels"].masked_fill(places == 0, IGNORED)
        row["position_ids"] = places if rope is None else torch.cat([places[None], rope[:, there][:, None]])
        return {**row, "use_cache": False}  # with a cache, transformers would not keep samples apart


@torch.no_grad()
def check_packs(model: nn.Module, batch: dict[str, Tensor], packed: dict[str, Any]) -> None:
    """Raise an OptionError if a model's logits of packed samples differ from those in a padded batch.

    Two thirds of the digits must agree; in half precision, where only gross differences stand out from
    rounding, half of them.
    """
    from transformers import BatchFeature

    name = type(model).__name__
    if "token_type_ids" in batch:
        raise OptionError(REFUSED % (name, "its images attend in both directions (token_type_ids)"))
    device, dtype = next(model.parameters()).device, model.dtype
    modes = {part: part.training for part in model.modules()}
    try:
        model.eval()
        wanted, found = (model(**BatchFeature(inputs).to(device, dtype)).logits for inputs in (batch, packed))
    except Exception as error:  # models raise nearly anything
        raise OptionError(REFUSED % (name, error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    wanted = wanted[batch["attention_mask"].bool()]
    off = float((found[0] - wanted).abs().max() / wanted.abs().max())
    if not off <= torch.finfo(wanted.dtype).eps ** (2 / 3 if wanted.dtype == torch.float32 else 1 / 2):
        raise OptionError(REFUSED % (name, f"its logits are off by {off:.2%} from those of a padded batch"))
