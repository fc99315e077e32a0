"""Small models of every kind that the trainer accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    ViltConfig,
    ViltModel,
)

from mmlab.model.presets import build_model

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SIZES, "vocab_size": 50}


class Vilt(nn.Module):
    """ViLT with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vilt = ViltModel(ViltConfig(**_TEXT, image_size=96, patch_size=16))
        self.head = nn.Linear(64, 2)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor,
        pixel_mask: torch.Tensor,
        labels: torch.Tensor,
    ) -> Any:
        pooled = self.vilt(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            pixel_mask=pixel_mask,
        ).pooler_output
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(pooled), labels))


def clip() -> CLIPModel:
    text = {**_TEXT, "bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
    vision = {**_SIZES, "image_size": 64, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(**_TEXT, num_labels=2))


def resnet() -> nn.Module:
    return build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1, hidden_dim=64, embed_dim=32)


def tiny(**changes: Any) -> nn.Module:
    return build_model("tiny", vocab_size=50, **{"image_depth": 1, "text_depth": 1, **changes})


MODELS = {"tiny": tiny, "resnet18": resnet, "clip": clip, "vilt": Vilt, "bert": bert}
