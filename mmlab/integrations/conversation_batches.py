"""Batches of conversations by the model's own processor, with labels on the answers alone.

Runs in a loader's workers. Costs what the processor costs, and a second tokenisation of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmlab.data.conversations import Message
from mmlab.errors import DataError
from mmlab.integrations.processor_sizes import image_tokens, templated, text_options

IGNORED = -100  # a label that no loss counts, as in transformers


class ConversationCollator:
    """`DataLoader(conversations, collate_fn=ConversationCollator(processor), ...)`, or a Trainer's `data_collator`.

    A batch is what `processor(text=..., images=..., padding=True)` gives, and `labels` (B, T): the tokens of every answer,
    with what the chat template ends it by; -100 elsewhere. Sequences are as long as `conversation_sizes` says.

    Args:
        processor: of transformers, with a chat template and a fast tokenizer. Its padding side is respected.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        processor = self.processor
        texts = [templated(processor, row["messages"]) for row in rows]
        images = [list(row["images"]) for row in rows]
        options = text_options(processor, texts[0])
        batch = dict(
            processor(
                text=texts,
                images=images if any(images) else None,
                padding=True,
                return_tensors="pt",
                **options,
            )
        )
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, ids, own, mask in zip(
            rows, batch["input_ids"], labels, batch["attention_mask"], strict=True
        ):
            places = mask.nonzero().flatten()
            for start, end in self._answers(row, ids[places], options):
                own[places[start:end]] = ids[places[start:end]]
        return {**batch, "labels": labels}

    def _answers(self, row: dict[str, Any], ids: Tensor, options: dict[str, Any]) -> list[tuple[int, int]]:
        """Where each answer begins and ends among the tokens of a sample, without padding.

        Images make the sequence longer than the text's own tokens, so places are found from those in the text: a token
        lies as much further as the images before it have more tokens than their placeholders.
        """
        processor, messages = self.processor, row["messages"]
        whole = templated(processor, messages)
        encoded = processor.tokenizer(whole, return_offsets_mapping=True, **options)
        starts = [start for start, end in encoded["offset_mapping"]]
        ends = [end for start, end in encoded["offset_mapping"]]
        added = self._added(row, len(ids) - len(starts))
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = templated(processor, messages[:number], asks=True)
            behind = templated(processor, messages[: number + 1])
            if not (whole.startswith(before) and whole.startswith(behind)):
                raise DataError(
                    f"the chat template of {type(processor).__name__} changes earlier turns when later ones follow, so "
                    "answers cannot be found; give conversations of one answer"
                )
            shift = sum(added[: _num_images(messages[:number])])
            first = next(place for place, end in enumerate(ends) if end > len(before))
            last = next((place for place, start in enumerate(starts) if start >= len(behind)), len(starts))
            if encoded["input_ids"][first:last] != ids[first + shift : last + shift].tolist():
                raise DataError(
                    f"{type(processor).__name__} makes other tokens of an answer than its tokenizer alone, so answers "
                    "cannot be found"
                )
            found.append((first + shift, last + shift))
        return found

    def _added(self, row: dict[str, Any], total: int) -> list[int]:
        """How many tokens each image adds to its placeholder, given how many all add together."""
        images = row["images"]
        if len(images) < 2 or len({image.size for image in images}) == 1:
            return [total // len(images)] * len(images) if images else []
        told = image_tokens(self.processor, [image.size[::-1] for image in images])
        tokens = [0] * len(images) if told is None else told[0]
        around, rest = divmod(total - sum(tokens), len(images))
        if told is None or rest:
            raise DataError(
                f"{type(self.processor).__name__} does not say how many tokens each of several images becomes; give "
                "conversations of one image, or of images of one size"
            )
        return [count + around for count in tokens]


def _num_images(messages: list[Message]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])
