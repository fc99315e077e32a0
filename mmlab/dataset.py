"""The dataset: one record in, one decoded image and its tokens out.

Texts are tokenised once, when the dataset is made, into one flat integer column (4 bytes a token), which
every forked worker shares; images are read and decoded on access. Nothing is padded here: that is the batch's
affair (`mmlab.loader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch.utils.data import Dataset

from mmlab.errors import DataError, OptionError
from mmlab.images import ImagePolicy, Square, decode
from mmlab.readers import read_records
from mmlab.records import Records
from mmlab.text import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmlab.types import SampleSizes


class Sample(TypedDict):
    """One item of the dataset."""

    id: str
    image: torch.Tensor | None  # (3, h, w) uint8, None for a text-only record
    text: str | None
    input_ids: torch.Tensor  # (t,) int64, empty for an image-only record
    label: int | None
    group: int


class MultimodalDataset(Dataset[Sample]):
    """Image-text pairs, decoded on access. Picklable; safe to read from many threads or processes.

    Example, as in the articles: `MultimodalDataset(image_paths, texts)[0]["image"]` is the first image.

    Args:
        records: what `read_records` gave, or a list of image paths together with `texts`.
        texts: one text an image, when `records` is a list of paths.
        tokenizer: a transformers tokenizer, or a name or path for `load_tokenizer`; `"builtin"` trains one on
            these texts.
        image_policy: size of the images, `square(224)` as in the articles unless given.
        max_tokens: longer texts are cut to this many tokens; `num_truncated` counts them.

    Raises:
        DataError: paths and texts of different number, or rows that cannot be used.
    """

    def __init__(
        self,
        records: Records | Sequence[str | Path],
        texts: Sequence[str] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | str = "builtin",
        image_policy: ImagePolicy | None = None,
        max_tokens: int = 512,
    ) -> None:
        if max_tokens < 2:
            raise OptionError(f"max_tokens must be at least 2 (the special tokens), found {max_tokens}")
        if not isinstance(records, Records):
            records = read_records(records, texts, progress=False)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, records=records)
        self.tokenizer = tokenizer
        self.image_policy = image_policy if image_policy is not None else Square(224)
        encoded = _encode(tokenizer, records.texts)
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        self.num_truncated = int((lengths > max_tokens).sum())
        encoded = [_cut(ids, max_tokens) for ids in encoded]
        lengths = np.minimum(lengths, max_tokens)
        self.records = records.with_num_tokens(lengths)
        self._offsets = np.concatenate(([0], np.cumsum(lengths)))
        self._token_ids = np.fromiter(
            (token for ids in encoded for token in ids), np.int32, self._offsets[-1]
        )

    @property
    def sizes(self) -> SampleSizes:
        """What a scheduler plans with: tokens, and image sizes after the policy."""
        return self.records.sizes(self.image_policy)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Sample:
        record = self.records[row]
        start, end = self._offsets[row], self._offsets[row + 1]
        return Sample(
            id=record.id,
            image=None if record.image_path is None else self._read_image(row),
            text=record.text,
            input_ids=torch.from_numpy(self._token_ids[start:end].astype(np.int64)),
            label=record.label,
            group=record.group,
        )

    def _read_image(self, row: int) -> torch.Tensor:
        try:
            pixels = decode(self.records.read_image(row), self.image_policy)
        except (OSError, ValueError) as error:
            record = self.records[row]
            raise DataError(
                f"record {record.id!r}: cannot read image {record.image_path}: {error}; "
                "mend or remove the file, then read the records again"
            ) from error
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | None]) -> list[list[int]]:
    """Token ids of every text, special tokens included; an absent text has none."""
    present = [text for text in texts if text is not None]
    ids = iter(tokenizer(present, truncation=False, verbose=False)["input_ids"] if present else [])
    return [[] if text is None else next(ids) for text in texts]


def _cut(ids: list[int], max_tokens: int) -> list[int]:
    """Keep the first tokens and the closing special token."""
    return ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]]
