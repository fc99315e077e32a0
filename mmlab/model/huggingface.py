"""`LossModel`: any module whose forward returns `.loss` trains on mmlab's batches.

It calls the module with the arguments that its forward names, out of `input_ids`, `attention_mask`, `pixel_values`,
`pixel_mask`, `labels`, `return_loss` and `interpolate_pos_encoding`. Pixels become floats, normalised. The module
computes its own mean, so only a loss that is a mean over samples or over label tokens accumulates exactly; CLIP's
depends on the batch.

Does not mask tokens: a masked-language-modelling model needs its labels in `Batch.labels`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mmlab.errors import DataError, OptionError
from mmlab.types import Batch

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IGNORED = -100  # the label that transformers leaves out of a loss


class LossModel(nn.Module):
    """Calls a module with what it takes and gives its loss as a sum.

    Args:
        module: its forward returns an object with `.loss`, a mean.
        labels: "batch" for `Batch.labels`, "text" for the input ids with padding left out (captioning, language
            modelling); None chooses "text" for a model that can generate.
        mean, std: of the pixels in [0, 1], per channel; CLIP's by default.

    Raises:
        OptionError: forward names none of the arguments above.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        module: nn.Module,
        *,
        labels: str | None = None,
        mean: tuple[float, float, float] = CLIP_MEAN,
        std: tuple[float, float, float] = CLIP_STD,
    ) -> None:
        super().__init__()
        self.module = module
        self.accepted = inspect.signature(module.forward).parameters
        if not {"input_ids", "pixel_values"} & self.accepted.keys():
            raise OptionError(
                f"{type(module).__name__}.forward takes {', '.join(self.accepted)}; "
                "expected input_ids or pixel_values, or one argument named batch"
            )
        can_generate = getattr(module, "can_generate", lambda: False)()
        self.labels = labels or ("text" if can_generate else "batch")
        config = getattr(module, "config", None)
        self.shifts_labels = self.labels == "text" and not getattr(config, "is_encoder_decoder", False)
        self.register_buffer("pixel_mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def num_terms(self, batch: Batch) -> Tensor | int:
        """How many samples or label tokens the module's mean is over."""
        labels = self._labels(batch)
        if "labels" not in self.accepted or labels is None:
            return len(batch)
        return (labels[:, 1:] if self.shifts_labels else labels).ne(_IGNORED).sum()

    def forward(self, batch: Batch) -> Any:
        """The module's own output.

        Raises:
            DataError: the module gave no loss.
        """
        offered = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask.long(),
            "pixel_mask": batch.pixel_mask.long(),
            "labels": self._labels(batch),
            "return_loss": True,
            "interpolate_pos_encoding": True,
        }
        if "pixel_values" in self.accepted:
            pixels = (batch.pixel_values.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std
            offered["pixel_values"] = pixels * batch.pixel_mask[:, None]
        output = self.module(**{name: value for name, value in offered.items() if name in self.accepted})
        if getattr(output, "loss", None) is None:
            raise DataError(
                f"{type(self.module).__name__} returned no loss; it takes {', '.join(self.accepted)}, the batch has "
                f"{', '.join(name for name, value in offered.items() if value is not None)}"
            )
        return output

    def _labels(self, batch: Batch) -> Tensor | None:
        if self.labels == "batch":
            return batch.labels
        return batch.input_ids.masked_fill(~batch.attention_mask, _IGNORED)
