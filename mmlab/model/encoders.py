"""Encoders: an image or a text becomes a sequence of features with a mask.

Every image encoder maps (pixels, pixel mask) to (features, feature mask) for any height and width, every text encoder
maps (input ids, attention mask) to features. Pixels arrive normalised; what lies outside the pixel mask is set to
zero, the mean colour. `ViT`, with or without `ConvStem`, gives the same features however much padding surrounds an
image. `ResNet` sees padding at the borders inside each stage, and a Hugging Face vision model sees it everywhere;
there only pooling and fusion leave it out, so prefer one image size (`square`) with those.

Legend: B samples, P image positions, T tokens, H x W pixels, D width.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import DataError, OptionError, unknown_name
from mmlab.images import PATCH


class ViT(nn.Module):
    """A pre-normalised vision transformer for any grid of 16 x 16 patches, attention masked to the real ones.

    Args:
        dim: width; a multiple of 4 x `num_heads`.
        depth: number of blocks.
        num_heads: attention heads.
        conv_stem: cut patches by four small convolutions instead of one large: learns faster on little data.

    Source: Dosovitskiy et al. 2021 (arXiv:2010.11929); sine-cosine positions in two dimensions as in Beyer et al.
    2022 (arXiv:2205.01580); convolutional stem after Xiao et al. 2021 (arXiv:2106.14881).
    """

    def __init__(self, *, dim: int, depth: int, num_heads: int, conv_stem: bool = False) -> None:
        super().__init__()
        if dim % (4 * num_heads):
            raise OptionError(f"ViT width must be a multiple of 4 x num_heads = {4 * num_heads}, found {dim}")
        self.dim = dim
        self.embed = ConvStem(dim) if conv_stem else PatchEmbedding(dim)
        self.embed_norm = nn.LayerNorm(dim)  # without it the positions drown the content
        self.blocks = nn.ModuleList(SelfAttention(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) and (B, H, W) to features (B, P, D) and mask (B, P)."""
        pixels, pixel_mask = _fill_grid(pixels, pixel_mask)
        grid = self.embed(pixels, pixel_mask)  # (B, D, H / 16, W / 16)
        mask = pixel_mask[:, ::PATCH, ::PATCH].flatten(1)  # (B, P)
        positions = _positions(grid.shape[2], grid.shape[3], self.dim, grid.device)
        features = self.embed_norm(rearrange(grid, "b d h w -> b (h w) d")) + positions.to(grid.dtype)
        keys = (mask | ~mask.any(1, keepdim=True))[
            :, None, None, :
        ]  # a missing image attends to its padding: no NaN
        for block in self.blocks:
            features = block(features, keys)
        return self.norm(features), mask


class PatchEmbedding(nn.Module):
    """One linear map of every 16 x 16 patch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, dim, PATCH, PATCH)

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D, H / 16, W / 16)."""
        return self.conv(pixels)


class ConvStem(nn.Module):
    """Four 3 x 3 convolutions of stride 2. After each, padding is set to zero again, as if the image ended there."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        widths = [3, dim // 8, dim // 4, dim // 2, dim]
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1) for inputs, outputs in pairwise(widths)
        )

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D, H / 16, W / 16)."""
        grid, mask = pixels, pixel_mask[:, None]
        for conv in self.convs:
            mask = mask[:, :, ::2, ::2]
            grid = F.gelu(conv(grid)) * mask
        return grid


class SelfAttention(nn.Module):
    """One pre-normalised transformer block."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, features: Tensor, keys: Tensor) -> Tensor:
        """(B, P, D), attending where `keys` (B, 1, 1, P) is True."""
        query, key, value = rearrange(
            self.query_key_value(self.norm(features)),
            "b p (three h d) -> three b h p d",
            three=3,
            h=self.num_heads,
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        features = features + self.out(rearrange(attended, "b h p d -> b p (h d)"))
        return features + self.mlp(self.mlp_norm(features))


class ResNet(nn.Module):
    """A torchvision ResNet up to its last feature grid (stride 32), masked between the stages.

    Batch normalisation makes a sample's features depend on its batch in training.

    Args:
        name: "resnet18", "resnet50" or any other ResNet of torchvision.
        weights: torchvision's name of pretrained weights; None for random ones.

    Raises:
        OptionError: torchvision has no ResNet of that name.
    """

    def __init__(self, name: str = "resnet50", *, weights: str | None = None) -> None:
        super().__init__()
        from torchvision import models

        known = models.list_models(include=["resnet*", "resnext*", "wide_resnet*"])
        if name not in known:
            raise unknown_name("torchvision ResNet", name, known)
        net = models.get_model(name, weights=weights)
        self.dim = net.fc.in_features
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.stages = nn.ModuleList([net.layer1, net.layer2, net.layer3, net.layer4])

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) and (B, H, W) to features (B, P, D) and mask (B, P)."""
        pixels, pixel_mask = _fill_grid(pixels, pixel_mask)
        mask = pixel_mask[:, None, ::4, ::4]
        grid = self.stem(pixels) * mask
        for number, stage in enumerate(self.stages):
            mask = mask if number == 0 else mask[:, :, ::2, ::2]
            grid = stage(grid) * mask
        return rearrange(grid, "b d h w -> b (h w) d"), mask.flatten(1)


class HuggingFaceImages(nn.Module):
    """Any `transformers` vision model: its last hidden state, class token included.

    Args:
        model: a model object, or a name or path for `AutoModel.from_pretrained`.
    """

    def __init__(self, model: nn.Module | str) -> None:
        super().__init__()
        self.model = _load(model)
        self.dim = _hidden_size(self.model.config)
        self.patch = getattr(self.model.config, "patch_size", None)
        accepted = inspect.signature(self.model.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) and (B, H, W) to features (B, P, D) and mask (B, P)."""
        pixels, pixel_mask = _fill_grid(pixels, pixel_mask)
        features = self.model(pixel_values=pixels, **self.options).last_hidden_state
        if features.dim() == 4:  # convolutional models keep the grid
            stride = pixels.shape[-1] // features.shape[-1]
            return rearrange(features, "b d h w -> b (h w) d"), pixel_mask[:, ::stride, ::stride].flatten(1)
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
        DataError: a text is longer than the model's position table.
    """

    def __init__(self, model: nn.Module | str) -> None:
        super().__init__()
        self.model = _load(model)
        self.dim = _hidden_size(self.model.config)
        self.max_tokens = getattr(self.model.config, "max_position_embeddings", None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) and (B, T) to features (B, T, D)."""
        if self.max_tokens and input_ids.shape[1] > self.max_tokens:
            raise DataError(
                f"a text has {input_ids.shape[1]} tokens, the text encoder takes {self.max_tokens}; "
                "truncate when tokenising, or build the model with a longer position table"
            )
        if input_ids.shape[1] == 0:
            return self.model.get_input_embeddings().weight.new_zeros(len(input_ids), 0, self.dim)
        first = torch.arange(input_ids.shape[1], device=input_ids.device) == 0
        keys = attention_mask | (
            first & ~attention_mask.any(1, keepdim=True)
        )  # an empty text attends to one pad token
        return self.model(input_ids=input_ids, attention_mask=keys.long()).last_hidden_state


def bert(
    *, vocab_size: int, dim: int, depth: int, num_heads: int, max_tokens: int, dropout: float
) -> HuggingFaceTexts:
    """A BERT with random weights, built from its configuration."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=num_heads,
        intermediate_size=4 * dim,
        max_position_embeddings=max_tokens,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return HuggingFaceTexts(BertModel(config, add_pooling_layer=False))


def _load(model: nn.Module | str) -> Any:
    if isinstance(model, nn.Module):
        return model
    from transformers import AutoModel

    return AutoModel.from_pretrained(model)


def _hidden_size(config: Any) -> int:
    return config.hidden_size if hasattr(config, "hidden_size") else config.hidden_sizes[-1]


def _fill_grid(pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Zero outside the mask, and pad bottom and right to whole patches, at least one."""
    height, width = pixels.shape[-2:]
    missing = (
        0,
        max(PATCH, -(-width // PATCH) * PATCH) - width,
        0,
        max(PATCH, -(-height // PATCH) * PATCH) - height,
    )
    return F.pad(pixels * pixel_mask[:, None], missing), F.pad(pixel_mask, missing)


@lru_cache(maxsize=256)
def _positions(rows: int, columns: int, dim: int, device: torch.device) -> Tensor:
    """Sine and cosine of row and column, (rows x columns, dim)."""
    frequencies = 10_000.0 ** -(torch.arange(dim // 4, device=device) / (dim // 4))

    def waves(count: int) -> Tensor:  # (count, dim / 2)
        angles = torch.arange(count, device=device)[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    by_row = waves(rows)[:, None].expand(-1, columns, -1)
    by_column = waves(columns)[None].expand(rows, -1, -1)
    return torch.cat([by_row, by_column], dim=2).flatten(0, 1)
