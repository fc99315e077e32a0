"""The dataset: one record in, one decoded image and its tokens out.

Texts are tokenised once, when the dataset is made, into one flat integer column: 4 bytes per token and 8
bytes per text, so that a million captions of 13 tokens take 60 MB, and twice that while the column is built.
Each worker process has a copy. Images are read and decoded on access. Nothing is padded here; collating a
batch does that (`mmlab.data.collate`).
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from mmlab.data.collate import Pixels, Sample, collate, put
from mmlab.data.decode import decode_image
from mmlab.data.readers import read_records
from mmlab.data.records import Records, reading_image
from mmlab.data.text import encode_texts, load_tokenizer
from mmlab.errors import OptionError, check_numbers
from mmlab.types import Batch, ImagePolicy, Region, SampleSizes, Square, parse_image_policy, processor_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MultimodalDataset(Dataset[Sample]):
    """Image-text pairs, decoded on access. Picklable; safe to read from many threads or processes.

    Example, as in the articles: `MultimodalDataset(image_paths, texts)[0]["image"]` is the first image. Their other calls
    work too: `MultimodalDataset(image_paths=..., text_prompts=...)`, and `MultimodalDataset(data_list, tokenizer)` with a
    list of dicts; a plain torch `DataLoader` pads the items to batches.

    Args:
        records: the result of `read_records`, anything that it accepts, or a list of image paths together
            with `texts`.
        texts: one text per image, when `records` is a list of paths; not read when it is the result of
            `read_records`, which has its own.
        image_paths, text_prompts: the articles' names of `records` and `texts`.
        tokenizer: a transformers tokenizer, or a name or path for `load_tokenizer`; `"builtin"`, the default
            without a processor, trains one on these texts.
        image_policy: sets the size of the images, also as text ("aspect:224"); `square(224)`, as in the articles, unless given.
        processor: the model's own, from `AutoProcessor.from_pretrained`. Its tokenizer and image policy are
            the defaults, and its longest text limits `max_tokens`; an image model's has no tokenizer and sets
            the images alone. `LossModel(processor=...)` uses its pixel normalisation.
        max_tokens: longer texts are cut to this many tokens, special ones included, with a warning;
            `num_truncated` counts them.

    Set `cache` to a `SampleCache(folder, key=cache_key(dataset))` to keep decoded images for later epochs and
    runs.

    Raises:
        DataError: different numbers of paths and texts, rows that cannot be used, or no such tokenizer.
        OptionError: an image policy that is none or not hashable, or `max_tokens` below 2.
    """

    def __init__(
        self,
        records: Any = None,
        texts: Sequence[str] | PreTrainedTokenizerBase | None = None,
        *,
        image_paths: Sequence[str | Path] | None = None,
        text_prompts: Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        image_policy: ImagePolicy | str | None = None,
        processor: Any = None,
        max_tokens: int = 512,
    ) -> None:
        check_numbers({"max_tokens": max_tokens})
        records = image_paths if records is None else records
        texts = text_prompts if texts is None else texts
        if callable(texts):  # article D's second argument
            texts, tokenizer = None, texts
        if not isinstance(records, Records):
            records = read_records(records, texts, progress=False)
        if processor is not None:
            # that of an image model has none, that of a text model is one
            own = getattr(processor, "tokenizer", None if hasattr(processor, "do_normalize") else processor)
            image_policy, tokenizer = image_policy or processor_policy(processor), tokenizer or own
            max_tokens = min(max_tokens, getattr(own, "model_max_length", max_tokens))
        self.image_processor = getattr(processor, "image_processor", processor)
        tokenizer = tokenizer or "builtin"
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer, records=records)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.max_tokens = max_tokens
        self._cache: Any = None
        policy = parse_image_policy(image_policy) if isinstance(image_policy, str) else image_policy
        self.image_policy = policy if policy is not None else Square(224)
        if (kind := type(self.image_policy)).__hash__ is None:  # decoding caches the target of each size
            raise OptionError(f"image policy {kind.__name__} is not hashable; make it a frozen dataclass")
        if not (hasattr(kind, "target_sizes") and hasattr(kind, "kept")):
            raise OptionError(f"{policy!r:.40} is no image policy; square:224 is one, and aspect:224")
        special = set(tokenizer.all_special_ids)  # type: ignore[union-attr]
        column, lengths, self.num_truncated = array("i"), np.zeros(len(records), np.int64), 0
        for row, ids in encode_texts(tokenizer, records.texts):
            if len(ids) > max_tokens:  # it keeps its first tokens and a closing special token
                ids = [*ids[: max_tokens - 1], ids[-1 if ids[-1] in special else max_tokens - 1]]
                self.num_truncated += 1
            column.fromlist(ids)
            lengths[row] = len(ids)
        if cut := self.num_truncated:
            told = f"{cut:,} of {len(records):,} texts were cut to {max_tokens} tokens (max_tokens)"
            warnings.warn(told, stacklevel=2)
        self._token_ids = np.array(column, np.int32)  # of all texts, one after the other
        self.records = records.with_num_tokens(lengths)
        self._offsets = np.concatenate(([0], np.cumsum(lengths)))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("records", "tokenizer", "image_policy") and hasattr(self, "_offsets"):
            told = "token ids, plans and cache are made from it; make another MultimodalDataset"
            raise OptionError(f"the {name} of a data set cannot be replaced: {told}")
        super().__setattr__(name, value)

    @property
    def cache(self) -> Any:
        """A `SampleCache`, or another object with its `get`, `put` and `announce`; None without one.

        Raises:
            OptionError: when set: a cache whose key is of other images or of another image policy.
        """
        return self._cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        if (key := getattr(cache, "key", None)) is not None:
            made_for = key.records.image_paths, key.settings["image policy"]
            if made_for != (self.records.image_paths, repr(self.image_policy)):
                raise OptionError("this cache is of other images or another size; use cache_key(dataset)")
        self._cache = cache

    @property
    def sizes(self) -> SampleSizes:
        """What a scheduler plans with: tokens, and image sizes after the policy."""
        return self.records.sizes(self.image_policy)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Sample:
        sample = self.decode(row, self.read(row))
        sample["attention_mask"] = torch.ones_like(sample["input_ids"], dtype=torch.bool)
        return sample

    def read(self, row: int, out: Pixels | None = None) -> bytes | Pixels | None:
        """The pixels of a row if the cache has them, else the encoded image; None for a text-only record.

        Args:
            out: (3, h, w) memory for pixels from the cache, see `SampleCache.get`.

        Raises:
            DataError: it cannot be read.
        """
        if self.records.image_paths[row] is None:
            return None
        if self.cache is not None and (pixels := self.cache.get(row, out=out)) is not None:
            return pixels
        with reading_image("record", self.records.ids[row], self.records.image_paths[row]):
            return self.records.read_image(row)

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest image, as stored."""
        return int((self.records.height.astype(np.int64) * self.records.width).max(initial=0))

    def announce(self, row: int) -> None:
        """Tell the operating system that a row will be read soon, so that the disk can start."""
        if self.cache is None or not self.cache.announce(row):
            self.records.announce(row)

    def decode(
        self, row: int, found: bytes | Pixels | None, out: Pixels | None = None, region: Region | None = None
    ) -> Sample:
        """The sample of a row, from what `read` returned; its pixels go into the cache, if there is one.

        Args:
            out: (3, H, W) memory, such as a row of a batch: pixels that fit are put into its top left corner.
            region: the part of the image to resize to the planned size, instead of the part that the policy
                keeps. Only without a cache: a crop that changes with every epoch must not be cached.

        Raises:
            DataError: the image cannot be decoded, or was replaced by one of another planned size.
        """
        records = self.records
        if isinstance(found, bytes):
            planned = int(records.height[row]), int(records.width[row])
            with reading_image("record", records.ids[row], records.image_paths[row]):
                pixels = decode_image(found, self.image_policy, region, planned).transpose(2, 0, 1)
            found = np.ascontiguousarray(pixels) if out is None else put(pixels, out)
            if self.cache is not None:
                self.cache.put(row, found)
        token_ids = self._token_ids[self._offsets[row] : self._offsets[row + 1]]
        return Sample(
            id=records.ids[row],
            image=None if found is None else torch.from_numpy(found),
            text=records.texts[row],
            input_ids=torch.from_numpy(token_ids.astype(np.int64)),
            label=None if records.labels is None else int(records.labels[row]),
            group=int(records.group[row]),
        )

    def collate(self, samples: Sequence[Sample], pixels: Pixels | None = None) -> Batch:
        """`mmlab.data.collate` with the tokenizer's pad token, or 0 where it has none; both are masked."""
        return collate(samples, pad_token_id=self.tokenizer.pad_token_id or 0, pixels=pixels)


MultiModalDataset = MultimodalDataset  # as an article spells it
