"""Shared by the examples for other trainers: the bundled captions, a small CLIP and a collator."""

from typing import Any

from torch import Tensor
from transformers import CLIPConfig, CLIPModel

import mmlab

SIDE = 64

records = mmlab.read_records("data/sample", progress=False)
dataset = mmlab.MultimodalDataset(records, image_policy=mmlab.square(SIDE))


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor | bool]:
    """The arguments of CLIP's forward, padded to the longest text."""
    batch = mmlab.collate(samples)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask.long(),
        "pixel_values": batch.pixel_values / 127.5 - 1,
        "return_loss": True,
    }


def small_clip() -> CLIPModel:
    """Random weights: nothing is downloaded. For real training, `CLIPModel.from_pretrained(NAME)`."""
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": dataset.tokenizer.cls_token_id, "eos_token_id": dataset.tokenizer.sep_token_id}
    text = {**layers, **ends, "vocab_size": len(dataset.tokenizer)}
    vision = {**layers, "image_size": SIDE, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
