"""Encoders from the `transformers` library behind the interface of `mmlab.model.encoders`.

A vision model treats padding like pixels; only pooling and fusion leave it out, so prefer one image size
(`square`).

Legend: B samples, P image positions, T tokens, H x W pixels, D width, V vocabulary, E width of a token's embedding.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import DataError, OptionError, loading_by_name
from mmlab.model.encoders import ImageEncoder, depths, fill_grid
from mmlab.model.huggingface import forward_parameters, normalisation_of, without_peft
from mmlab.model.packing import Segments
from mmlab.types import PATCH


class HuggingFaceImages(ImageEncoder):
    """Any `transformers` vision model: its last hidden state, class token included.

    Args:
        model: a model object, or a name or path for `AutoModel.from_pretrained`. Pixels are normalised as by the image
            processor saved with it, or else by ImageNet's mean and deviation.

    Raises:
        OptionError: transformers cannot load a model of that name.
    """

    def __init__(self, model: nn.Module | str) -> None:
        super().__init__()
        self.model = _load(model)
        if name := getattr(self.model, "name_or_path", None):
            self.normalisation = _saved_normalisation(name) or self.normalisation
        self.dim = _hidden_size(self.model.config)
        self.patch = getattr(self.model.config, "patch_size", None)
        accepted = forward_parameters(self.model)
        self.options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}

    def level_dims(self, num_levels: int) -> list[int]:
        """Widths of the levels.

        Raises:
            OptionError: a model whose layers do not keep one sequence, such as a convolutional one.
        """
        depth = getattr(self.model.config, "num_hidden_layers", None)
        if depth is None:
            raise OptionError(
                f"{type(self.model).__name__} has no layers of one width, so there are no levels to fuse; "
                "choose another fusion, or image='resnet50' for features of several stages"
            )
        return [self.dim] * len(depths(depth, num_levels))

    def levels(self, pixels: Tensor, pixel_mask: Tensor, *, num_levels: int) -> tuple[list[Tensor], Tensor]:
        """See `ImageEncoder`."""
        pixels, pixel_mask = fill_grid(pixels, pixel_mask)
        options = self.options | ({"output_hidden_states": True} if num_levels > 1 else {})
        output = self.model(pixel_values=pixels, **options)
        features, mask = self._with_mask(output.last_hidden_state, pixel_mask)
        return [*_lower(output, num_levels), features], mask

    def _with_mask(self, features: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        if features.dim() == 4:  # convolutional models keep the grid
            # the mask at each cell's first pixel
            mask = F.interpolate(pixel_mask[:, None].float(), features.shape[2:])
            return rearrange(features, "b d h w -> b (h w) d"), mask.flatten(1).bool()
        patch = self.patch if isinstance(self.patch, int) else PATCH
        mask = pixel_mask[:, ::patch, ::patch].flatten(1)
        num_special = features.shape[1] - mask.shape[1]
        if num_special < 0:
            mask = pixel_mask.flatten(1).any(1, keepdim=True).expand(-1, features.shape[1])
        else:
            mask = F.pad(mask, (num_special, 0), value=True)
        return features, mask & pixel_mask.flatten(1).any(1, keepdim=True)


class HuggingFaceTexts(nn.Module):
    """Any `transformers` text model: its last hidden state.

    Args:
        model: a model object, or a name or path for `AutoModel.from_pretrained`.

    Raises:
        OptionError: transformers cannot load a model of that name.
        DataError: in forward: a text is longer than the model's position table.
    """

    def __init__(self, model: nn.Module | str) -> None:
        super().__init__()
        self.model = _load(model)
        self.dim = _hidden_size(self.model.config)
        self.max_tokens = getattr(self.model.config, "max_position_embeddings", None)
        if getattr(self.model, "_supports_attention_backend", False):
            self.packed = False  # see mmlab.model.packing

    @property
    def embedding(self) -> Tensor:
        """The token embedding's weights, (V, E)."""
        return self.model.get_input_embeddings().weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) and (B, T) to features (B, T, D)."""
        return self.levels(input_ids, attention_mask, num_levels=1)[0]

    def level_dims(self, num_levels: int) -> list[int]:
        """Widths of the levels; a model of fewer layers has fewer levels."""
        return [self.dim] * len(depths(self.model.config.num_hidden_layers, num_levels))

    def levels(self, input_ids: Tensor, attention_mask: Tensor, *, num_levels: int) -> list[Tensor]:
        """Features after several layers, (B, T, D) each."""
        if self.max_tokens and input_ids.shape[1] > self.max_tokens:
            raise DataError(
                f"a text has {input_ids.shape[1]} tokens, the text encoder takes {self.max_tokens}; "
                "truncate when tokenising, or build the model with a longer position table"
            )
        if input_ids.shape[1] == 0:
            num_kept = 1 if num_levels == 1 else len(self.level_dims(num_levels))
            return [self.embedding.new_zeros(len(input_ids), 0, self.dim)] * num_kept
        first = torch.arange(input_ids.shape[1], device=input_ids.device) == 0
        # an empty text attends to one pad token
        keys = attention_mask | (first & ~attention_mask.any(1, keepdim=True))
        options = {"output_hidden_states": True} if num_levels > 1 else {}
        segments = Segments(keys) if getattr(self, "packed", False) else None
        if segments is not None:
            stream = segments.pack(input_ids[..., None])[..., 0]
            output = self.model(input_ids=stream, position_ids=segments.within, segments=segments, **options)
        else:
            output = self.model(input_ids=input_ids, attention_mask=keys.long(), **options)
        levels = [*_lower(output, num_levels), output.last_hidden_state]
        return levels if segments is None else [segments.unpack(level) for level in levels]


def _lower(output: Any, num_levels: int) -> list[Tensor]:
    """All levels but the last; `hidden_states` are the embeddings and the output of every layer."""
    if num_levels == 1:
        return []
    return [output.hidden_states[depth] for depth in depths(len(output.hidden_states) - 1, num_levels)[:-1]]


def _load(model: Any) -> Any:
    """The encoder, in training mode: transformers loads models in evaluation mode."""
    if not isinstance(model, nn.Module):
        from transformers import AutoModel

        with loading_by_name(f"{model!r} is no encoder that transformers can load"):
            model = AutoModel.from_pretrained(model, trust_remote_code=False)
    return model if without_peft(model).training else model.train()


def _saved_normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and deviation of pixels that the image processor saved with a model takes; None without one."""
    from transformers import AutoImageProcessor

    with suppress(OSError, ValueError):
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        return normalisation_of(processor) if hasattr(processor, "do_normalize") else None
    return None


def _hidden_size(config: Any) -> int:
    return config.hidden_size if hasattr(config, "hidden_size") else config.hidden_sizes[-1]
