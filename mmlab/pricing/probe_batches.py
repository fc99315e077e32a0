"""Batches of conversations for pricing: as many samples and tokens as asked for, with images of the data set.

Only its processor knows which inputs a vision-language model has, and how they follow from images and text.
So a batch repeats one sample of the data set, as the processor collates it, and its text (the answer's, for
an encoder-decoder) is extended by repeating its last token.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmlab.data.conversation_dataset import ConversationBatch, ConversationDataset
from mmlab.types import IGNORED, PATCH, BatchShape

_NUM_ROWS, _NUM_TEXTS = 8, 5  # candidates for probes: samples to repeat, and text lengths of each
_SIZES = (2, 3, 4, 6, 8)  # samples in a probe: some towers go through images one by one
_LARGEST_SIZE, _MOST_PRICED = 16, 4096  # most samples in a batch that is made, and for which prices hold
_MORE_TOKENS = 64  # by which the longest batches exceed the longest sample
_MOST_VALUES = 2**25  # most elements of an input, in batches of more than four samples


class ProbeBatches:
    """Makes batches of the shapes that `candidates` and `spread` give, each by repeating one sample.

    Args:
        dataset: samples without images are left out, unless no sample has one.
    """

    def __init__(self, dataset: ConversationDataset) -> None:
        self.dataset, sizes = dataset, dataset.sizes
        work = sizes.height.astype(np.int64) * sizes.width
        shortest_first = np.lexsort((sizes.num_tokens, work))
        amounts, first = np.unique(work[shortest_first], return_index=True)
        rows = shortest_first[first][amounts > 0 if amounts.any() else slice(None)]
        self.rows = rows[np.unique(np.geomspace(1, len(rows), _NUM_ROWS).round().astype(int)) - 1]
        self._longest = int(sizes.num_tokens.max()) + _MORE_TOKENS
        self._shapes = sizes.take(self.rows).alone  # (R, 4)
        most_patches = int(self._shapes[:, 2:].prod(axis=1).max()) // PATCH**2
        # samples, tokens and patches up to which prices must hold
        self.largest = (_MOST_PRICED, 2 * self._longest, 2 * most_patches)

    def candidates(self) -> NDArray[np.int64]:
        """(n, 4) shapes to choose probes from; lengths are 8k + 1."""
        shapes = []
        for place, (_, shortest, height, width) in enumerate(self._shapes.tolist()):
            lengths = np.geomspace(shortest, self._longest, _NUM_TEXTS)
            texts = np.unique(8 * np.ceil((lengths - 1) / 8) + 1).astype(int).tolist()
            sizes = [size for size in _SIZES if size <= max(4, self._most_samples(place))]
            shapes += [(size, text, height, width) for size, text in product(sizes, texts)]
        return np.array(shapes)

    def spread(self, number: int) -> NDArray[np.int64]:
        """(number, 4) shapes of any length and of more samples than `candidates` have."""
        rng, shapes = np.random.default_rng(0), []
        for place in rng.integers(len(self.rows), size=number).tolist():
            _, shortest, height, width = self._shapes[place].tolist()
            size = rng.integers(2, max(4, min(_LARGEST_SIZE, self._most_samples(place))), endpoint=True)
            shapes.append((size, rng.integers(shortest, self._longest, endpoint=True), height, width))
        return np.array(shapes, dtype=np.int64).reshape(-1, 4)

    def __call__(self, shape: BatchShape) -> ConversationBatch:
        """A batch of this shape; its first sample has one token less, so that something is padded."""
        size, num_tokens, height, width = shape
        place = int((self._shapes[:, 2:] == (height, width)).all(axis=1).argmax())
        row, more = int(self.rows[place]), num_tokens - int(self._shapes[place, 1])
        sample, inputs = self._inputs[place], {}
        length, apart = sample["input_ids"].shape[1], self.dataset.collator.is_encoder_decoder
        for name, value in sample.items():
            of_tokens = name == "labels" if apart else value.shape[1:2] == (length,)
            if of_tokens:
                value = torch.cat([value, *[value[:, -1:]] * more], dim=1)
            inputs[name] = value.repeat(size, *[1] * (value.dim() - 1))
        inputs["attention_mask"][0, -1] = 0
        inputs["labels"][0, -1] = IGNORED
        return self.dataset.batch(inputs, [row] * size)

    @cached_property
    def _inputs(self) -> list[dict[str, Tensor]]:
        """For each row, what the processor makes of it."""
        return [self.dataset.collator.padded([self.dataset[row]]) for row in self.rows.tolist()]

    def _most_samples(self, place: int) -> int:
        return _MOST_VALUES // max(value.numel() for value in self._inputs[place].values())
