"""`FusionModel`: two encoders, an embedding of each modality, and cross-attention fusion for matching pairs.

The embeddings come from the encoders alone, so retrieval over N pairs costs N forward passes; the fusion runs only
where a loss asks for it. `PRESETS` holds the shipped sizes; `build_model` makes one with random weights, without
downloads.

Legend: B samples, P image positions, T tokens, N pairs to match, D embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import unknown_name
from mmlab.model.encoders import HuggingFaceImages, HuggingFaceTexts, ResNet, ViT, bert
from mmlab.model.fusion import MultimodalFusion
from mmlab.types import Batch

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_LOGIT_SCALE = 100.0  # Radford et al. 2021: beyond it training is unstable


@dataclass(slots=True)
class FusionOutput:
    """What the objectives read."""

    image_embedding: Tensor  # (B, D) of length one
    text_embedding: Tensor  # (B, D) of length one
    logit_scale: Tensor  # () inverse temperature
    match: Callable[
        [Tensor, Tensor], Tensor
    ]  # image rows (N,), text rows (N,) -> logits (N,) that they belong together


class FusionModel(nn.Module):
    """Encoders, embeddings and fusion.

    Args:
        image_encoder: (pixels, pixel mask) -> (features (B, P, C), mask (B, P)); has `dim`.
        text_encoder: (input ids, attention mask) -> features (B, T, C); has `dim`.
        embed_dim: width of the embeddings.
        hidden_dim, num_heads, num_layers: of the fusion.
        mean, std: of the pixels in [0, 1], per channel.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        *,
        embed_dim: int = 512,
        hidden_dim: int = 512,
        num_heads: int = 8,
        num_layers: int = 1,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.fusion = MultimodalFusion(
            image_encoder.dim,
            text_encoder.dim,
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            num_layers=num_layers,
        )
        self.image_head = nn.Linear(image_encoder.dim, embed_dim)
        self.text_head = nn.Linear(text_encoder.dim, embed_dim)
        self.match_head = nn.Linear(hidden_dim, 1)
        self.log_logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.register_buffer("pixel_mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> FusionOutput:
        """Encode a batch; a sample without image or without text gets a finite embedding that means nothing."""
        pixels = (batch.pixel_values.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std
        image_features, image_mask = self.image_encoder(pixels, batch.pixel_mask)
        text_features = self.text_encoder(batch.input_ids, batch.attention_mask)
        text_mask = batch.attention_mask

        def match(image_rows: Tensor, text_rows: Tensor) -> Tensor:
            fused = self.fusion(image_features[image_rows], text_features[text_rows], text_mask[text_rows])
            return self.match_head(_masked_mean(fused, image_mask[image_rows])).squeeze(1)

        return FusionOutput(
            image_embedding=F.normalize(self.image_head(_masked_mean(image_features, image_mask)), dim=1),
            text_embedding=F.normalize(self.text_head(_masked_mean(text_features, text_mask)), dim=1),
            logit_scale=self.log_logit_scale.exp().clamp(max=MAX_LOGIT_SCALE),
            match=match,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a `FusionModel` with random weights."""

    image: str  # "vit", "conv-vit", or a torchvision ResNet
    image_dim: int = 768
    image_depth: int = 12
    text_dim: int = 768
    text_depth: int = 12
    head_dim: int = 64
    embed_dim: int = 512
    hidden_dim: int = 512  # of the fusion
    fusion_heads: int = 8
    fusion_layers: int = 1
    max_tokens: int = 512
    dropout: float = 0.0  # in the text encoder


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        image="conv-vit",
        image_dim=128,
        image_depth=2,
        text_dim=128,
        text_depth=2,
        head_dim=32,
        embed_dim=128,
        hidden_dim=128,
    ),
    "small": ModelConfig(image="vit", image_dim=384, image_depth=6, text_dim=384, text_depth=6),
    "base": ModelConfig(image="vit", fusion_layers=2),
    "resnet18": ModelConfig(image="resnet18", text_dim=384, text_depth=6),
    "resnet50": ModelConfig(image="resnet50"),
}


def build_model(
    preset: str = "small",
    *,
    vocab_size: int,
    image_encoder: nn.Module | str | None = None,
    text_encoder: nn.Module | str | None = None,
    **changes: Any,
) -> FusionModel:
    """Build a preset, with other encoders or sizes where they are given.

    >>> model = build_model("tiny", vocab_size=100, embed_dim=64)
    >>> model.image_head.out_features
    64

    Args:
        preset: a name in `PRESETS`.
        vocab_size: of the tokenizer.
        image_encoder, text_encoder: a `transformers` model, or a name or path for `AutoModel.from_pretrained`,
            instead of the preset's own; a torchvision ResNet is `image="resnet18"`.
        changes: fields of `ModelConfig`.

    Raises:
        OptionError: no such preset, or sizes that do not divide.
    """
    if preset not in PRESETS:
        raise unknown_name("model preset", preset, PRESETS)
    config = replace(PRESETS[preset], **changes)
    return FusionModel(
        _image_encoder(config) if image_encoder is None else HuggingFaceImages(image_encoder),
        bert(
            vocab_size=vocab_size,
            dim=config.text_dim,
            depth=config.text_depth,
            num_heads=config.text_dim // config.head_dim,
            max_tokens=config.max_tokens,
            dropout=config.dropout,
        )
        if text_encoder is None
        else HuggingFaceTexts(text_encoder),
        embed_dim=config.embed_dim,
        hidden_dim=config.hidden_dim,
        num_heads=config.fusion_heads,
        num_layers=config.fusion_layers,
    )


def _image_encoder(config: ModelConfig) -> nn.Module:
    if config.image in ("vit", "conv-vit"):
        return ViT(
            dim=config.image_dim,
            depth=config.image_depth,
            num_heads=config.image_dim // config.head_dim,
            conv_stem=config.image == "conv-vit",
        )
    return ResNet(config.image)


def _masked_mean(features: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where mask (B, P) is True; zero where there is none. (B, P, D) -> (B, D)."""
    weights = mask.to(features.dtype)
    return (features * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
