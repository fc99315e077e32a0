"""Conversations for mmlab's own loader and trainer, in batches that the model's processor makes.

`PlannedLoader(ConversationDataset(conversations, processor), scheduler)` reads and decodes images ahead, and makes the
batches in its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mmlab.data.collate import Sample
from mmlab.data.conversation_batches import ConversationCollator
from mmlab.data.conversation_sizes import answer_tokens, conversation_sizes
from mmlab.data.conversations import Conversations, decode
from mmlab.data.records import reading_image
from mmlab.errors import DataError
from mmlab.types import IGNORED, Batch, HostColumns, SampleSizes, mean_height


@dataclass(kw_only=True, repr=False)
class ConversationBatch(Batch):
    """A batch whose tensors are the arguments of a vision-language model.

    The images are in `inputs`: `pixel_values` (B, 0, H, W) is empty and only carries the planned shape, that
    of the sample with the most patches or, where the processor does not pad images, of the mean. The `labels` of
    `columns`, (B, T), are those of the answers. For an encoder-decoder, `input_ids` are the question, padded to the
    longest of the data set, followed by the answer.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)  # what the model is called with, by name
    rows: list[int] = field(default_factory=list)  # of the data set
    dataset: ConversationDataset | None = None  # read by `part`; not pickled, the loader sets it again

    def part(self, rows: slice) -> Batch:
        """The samples of some rows, made again: only the processor knows which patches are whose."""
        assert self.dataset is not None
        return self.dataset.collate([self.dataset[row] for row in self.rows[rows]]).to(self.input_ids.device)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        return [*super().tensors(), *self.inputs.values()]

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = super().map_tensors(change)
        inputs = {
            name: changed.input_ids if tensor is self.input_ids else change(tensor)
            for name, tensor in self.inputs.items()
        }
        return replace(changed, inputs=inputs)  # type: ignore[call-arg]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return None, {**fields, "dataset": None}  # restored by setattr, as the slots of `Batch` need


class ConversationDataset(Dataset[Sample]):
    """Conversations under a model's processor, decoded on access. Picklable.

    Args:
        conversations: the result of `read_conversations`.
        processor: of transformers, with a chat template and a fast tokenizer.
        cache: folder in which the sizes are saved.
        progress: show a bar on stderr while the sizes are found.

    Raises:
        OptionError: a processor that cannot be used, or not with these conversations.
        DataError: answers cannot be told from questions; tried on one conversation of each sequence of roles.
    """

    cache: Any = None  # a processor's pixels are not cached

    def __init__(
        self,
        conversations: Conversations,
        processor: Any,
        *,
        cache: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.collator = ConversationCollator(processor)
        self.records, self.tokenizer = conversations, processor.tokenizer
        rows = {tuple(turn["role"] for turn in own): row for row, own in enumerate(conversations.messages)}
        for roles, row in rows.items():
            try:
                self.collator.check(conversations.messages[row])
            except DataError as error:
                like = f"conversation {conversations.ids[row]}, with the roles {', '.join(roles)}"
                raise DataError(f"{like}: {error}") from error
        found = conversation_sizes(conversations, processor, cache=cache, progress=progress)
        self.sizes: SampleSizes = found.sizes()
        if self.collator.is_encoder_decoder and len(conversations):
            (answer,) = answer_tokens(processor, conversations.messages[:1])
            self.collator.question_length = int(found.num_tokens[0]) - len(answer)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Sample:
        return self.decode(row, self.read(row))

    def read(self, row: int, out: NDArray | None = None) -> list[bytes]:
        """The encoded images of a row.

        Raises:
            DataError: one cannot be read.
        """
        found = []
        for image in self.records.images[row]:
            with reading_image("conversation", self.records.ids[row], image.path):
                found.append(image.read())
        return found

    @property
    def most_pixels(self) -> int:
        """The most pixels that the images of one conversation have together, as stored."""
        return max(sum(high * wide for high, wide in own) for own in self.records.image_sizes)

    def announce(self, row: int) -> None:
        """Does nothing: reading ahead would not help, because a processor takes longer than a disk."""

    def decode(self, row: int, found: list[bytes], out: NDArray | None = None) -> Sample:
        """The sample of a row, from what `read` gave.

        Raises:
            DataError: an image cannot be decoded.
        """
        images = []
        for image, encoded in zip(self.records.images[row], found, strict=True):
            with reading_image("conversation", self.records.ids[row], image.path):
                images.append(decode(encoded))
        messages = self.records.messages[row]
        return Sample(id=self.records.ids[row], row=row, image=None, messages=messages, images=images)

    def collate(self, samples: Sequence[Sample], pixels: NDArray | None = None) -> ConversationBatch:
        """The processor's batch of these samples."""
        return self.batch(self.collator.padded(samples), [sample["row"] for sample in samples])

    def batch(self, inputs: dict[str, Tensor], rows: list[int]) -> ConversationBatch:
        """The batch of these rows, from the processor's output for them."""
        sizes, there = self.sizes.take(rows), inputs["attention_mask"].bool()
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        if self.collator.is_encoder_decoder:
            there = torch.cat([there, labels != IGNORED], 1)
            labels = torch.cat([torch.full_like(input_ids, IGNORED), labels], 1)
            input_ids = torch.cat([input_ids, inputs["labels"].clamp(min=0)], 1)
        columns = HostColumns(
            input_ids=input_ids,
            attention_mask=there,
            height=sizes.height.astype("int64"),
            width=sizes.width.astype("int64"),
            groups=None,
            labels=labels,
        )
        height = sizes.height.max() if sizes.pads_images else mean_height(columns.height.sum(), len(rows))
        return ConversationBatch(
            pixel_values=torch.empty(len(rows), 0, int(height), int(sizes.width.max())),
            pixel_mask=torch.empty(len(rows), 0),
            input_ids=input_ids,
            attention_mask=there,
            labels=None,
            record_ids=[self.records.ids[row] for row in rows],
            columns=columns,
            pads_images=sizes.pads_images,
            inputs=inputs,
            rows=rows,
            dataset=self,
        )
