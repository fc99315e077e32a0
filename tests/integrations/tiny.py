"""A tiny CLIP and GPT-2 from configurations, samples of varied length, and a record of what was trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import CLIPConfig, CLIPModel, GPT2Config, GPT2LMHeadModel

from mmlab.integrations import sample_sizes
from mmlab.schedule import make_scheduler
from mmlab.types import SampleSizes

SIDE, WORDS = 16, 50
LENGTHS = np.random.default_rng(3).integers(2, 24, 61)


def sizes() -> SampleSizes:
    return sample_sizes(LENGTHS, SIDE, SIDE)


def budget() -> Any:
    return make_scheduler("budget", budget=150, window=16, seed=1)  # epochs of 18 to 22 batches


class Pairs(Dataset[dict[str, Any]]):
    """Random images and texts."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, row: int) -> dict[str, Any]:
        stream = np.random.default_rng(row)
        pixels = torch.from_numpy(stream.random((3, SIDE, SIDE), np.float32))
        return {"row": row, "input_ids": stream.integers(3, WORDS, LENGTHS[row]), "pixel_values": pixels}


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads the texts."""
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {
        "rows": torch.tensor([sample["row"] for sample in samples]),
        "input_ids": padded,
        "attention_mask": (padded > 0).long(),
        "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
    }


class SeenCLIP(CLIPModel):
    """Keeps the rows of every batch that it was trained with."""

    def forward(self, rows: Tensor, **inputs: Any) -> Any:
        if self.training:
            self.__dict__.setdefault("seen", []).append(rows.tolist())
        return super().forward(**inputs, return_loss=True)


def clip() -> SeenCLIP:
    torch.manual_seed(0)
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 32,
        "eos_token_id": 2,
    }
    vision = {**text, "image_size": SIDE, "patch_size": 8}
    for name in ("vocab_size", "max_position_embeddings", "eos_token_id"):
        del vision[name]
    return SeenCLIP(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


class SeenGPT2(GPT2LMHeadModel):
    """Keeps, for every batch, the number of labels that it was told its loss is divided by, and its shape."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **more: Any) -> Any:
        told = None if num_items_in_batch is None else int(num_items_in_batch)
        record = (told, int(labels[:, 1:].ne(-100).sum()), tuple(input_ids.shape))
        self.__dict__.setdefault("seen", []).append(record)
        return super().forward(
            input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **more
        )


def gpt2() -> SeenGPT2:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return SeenGPT2(config)


def flat(batches: list[list[int]]) -> list[int]:
    return sorted(row for batch in batches for row in batch)
