"""`PRESETS`: the shipped sizes of a `FusionModel`; `build_model` makes one, with random weights, without downloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from mmlab.errors import OptionError, check_name, check_numbers
from mmlab.model.encoders import ResNet, ViT
from mmlab.model.fusion_model import FusionModel
from mmlab.model.huggingface_encoders import HuggingFaceImages, HuggingFaceTexts


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
    fusion: str = "cross"  # a name in FUSIONS
    hidden_dim: int = 512  # of the fusion
    fusion_heads: int = 8
    fusion_layers: int = 1
    fusion_levels: int = 3  # depths of each encoder that "multiscale" reads
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
        OptionError: no such preset, a number out of range, sizes that do not divide, or an encoder that
            transformers cannot load.
    """
    check_name("model preset", preset, PRESETS)
    config = replace(PRESETS[preset], **changes)
    check_numbers({"vocab_size": vocab_size})
    check_numbers(config)
    for name in ("image_dim", "text_dim"):
        if (dim := getattr(config, name)) < 1 or dim % config.head_dim:
            raise OptionError(f"head_dim must divide {name}, found {config.head_dim} for width {dim}")
    return FusionModel(
        _image_encoder(config) if image_encoder is None else HuggingFaceImages(image_encoder),
        HuggingFaceTexts(_bert(config, vocab_size) if text_encoder is None else text_encoder),
        embed_dim=config.embed_dim,
        fusion=config.fusion,
        hidden_dim=config.hidden_dim,
        num_heads=config.fusion_heads,
        num_layers=config.fusion_layers,
        num_levels=config.fusion_levels,
    )


MultimodalModel = partial(build_model, "resnet50", vocab_size=30522)  # article E's, for `bert-base-uncased`


def _image_encoder(config: ModelConfig) -> nn.Module:
    if config.image in ("vit", "conv-vit"):
        return ViT(
            dim=config.image_dim,
            depth=config.image_depth,
            num_heads=config.image_dim // config.head_dim,
            conv_stem=config.image == "conv-vit",
        )
    return ResNet(config.image)


def _bert(config: ModelConfig, vocab_size: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = BertConfig(
        vocab_size=vocab_size,
        hidden_size=config.text_dim,
        num_hidden_layers=config.text_depth,
        num_attention_heads=config.text_dim // config.head_dim,
        intermediate_size=4 * config.text_dim,
        max_position_embeddings=config.max_tokens,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        use_cache=False,  # only decoders need one
    )
    return BertModel(sizes, add_pooling_layer=False)
