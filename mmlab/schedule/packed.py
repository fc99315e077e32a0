"""The packed planner: samples laid end to end in two streams, text tokens and image patches, each with its own room.

For models that attend inside each sample of a pack (variable-length or block-diagonal attention): no sample
is padded, both streams have one static length, their room, and a step can be compiled once. A smaller step
uses a half, a quarter, ... of the room (`metrics.padded_streams`). A pack is limited by sums, not by a padded
shape: as a padded batch, it would cost far more than its budget. Takes under a microsecond per sample.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mmlab.errors import OptionError, check_is
from mmlab.schedule.base import BLOCK_SIZE, Scheduler
from mmlab.schedule.collisions import images_of
from mmlab.schedule.columns import Block, Ints, Limits
from mmlab.schedule.cost import PaddedTokens, check_samples_fit
from mmlab.schedule.dense import DEFAULT_MEAN_SAMPLES, mean_lengths
from mmlab.schedule.metrics import cells, lengths, work
from mmlab.schedule.ranks import balance, shorten_last_step
from mmlab.types import PATCH, BatchShape, CostModel, SampleSizes

PACKED_NOTE = "packed: waste is unused room, not computed; seconds include packing only where it was measured"
_POOL_SIZE = 512  # samples that are looked at together, at least


@dataclass(frozen=True, kw_only=True)
class Packed(Scheduler):
    """Packs of samples that fill a text stream and an image stream to the brim; no sample is split.

    When to use: the model packs sequences, or shapes vary so much that padded batches of similar samples stay
    small.

    Args:
        budget: text tokens and image patches that a pack may hold together, shared by the streams in the
            ratio of the data; None takes 32 average samples. Where images come in tiles of equal size, the
            room for images is a number of whole tiles.
        cost: a cost model of packs (`mmlab.price_model` fits one), in whose unit `budget` is then the most
            that a pack may cost.
        patch: side of an image patch in pixels.
        allow_collisions: whether a pack may hold two samples of one image.

    Raises:
        OptionError: a number out of range, or a cost that is no polynomial or comes without a budget.

    Source:
        Two-dimensional bin packing over a bounded pool, first fit followed by exchanges.
    """

    budget: float | None = None
    cost: CostModel | None = None
    patch: int = PATCH
    allow_collisions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is("cost", self.cost, "as_polynomial", "a cost model with as_polynomial()", optional=True)
        if self.cost is not None and self.budget is None:
            raise OptionError(f"cost goes with a budget in {self.cost.unit}; give both")

    def limits(self, sizes: SampleSizes) -> Limits:
        text, image, tile = mean_lengths(sizes, self.patch)
        budget = float(self.budget or max(1.0, DEFAULT_MEAN_SAMPLES * (text + image)))
        share = text / (text + image) if text + image else 0.5
        streams = _rooms(self._most_tokens(sizes, share, budget), share, tile)
        self._warn_of_oversize(sizes, streams)
        return Limits(self.cost or PaddedTokens(self.patch), budget, streams)

    def block_size(self, num_samples: int) -> int:
        return BLOCK_SIZE

    def make_batches(self, sizes: SampleSizes, rows: Ints, rng: np.random.Generator, limits: Limits) -> Block:
        from mmlab.schedule._pack_loops import fill_packs

        assert limits.streams is not None
        text, image = lengths(sizes, self.patch, rows)
        image_number = np.arange(len(rows)) if self.allow_collisions else images_of(sizes, rows).number
        in_pack = sum(limits.streams) / max(1.0, float(text.mean() + image.mean()))
        pool_size = max(_POOL_SIZE, 4 * int(in_pack))
        order, ends = fill_packs(text, image, image_number, *limits.streams, pool_size)
        packs = Block(rows[order], ends)
        return shorten_last_step(packs, work(text[order]) + work(image[order]), self.world_size)

    def order_batches(self, sizes: SampleSizes, batches: Block, rng: np.random.Generator) -> Block:
        text, image = lengths(sizes, self.patch, batches.order)
        pack_work = batches.totals(work(text) + work(image))
        return balance(batches, pack_work, pack_work, self.world_size, rng)

    def _most_tokens(self, sizes: SampleSizes, share: float, budget: float) -> float:
        """Tokens and patches of the largest pack within the budget, of which `share` are tokens."""
        if (cost := self.cost) is None:
            return budget
        check_samples_fit(cost, sizes, budget)

        def price(size: int) -> float:
            text, image = _rooms(size, share)
            return cost(BatchShape(1, text, image * self.patch, self.patch))

        return bisect_right(range(1, 2**40), budget, key=price)

    def _warn_of_oversize(self, sizes: SampleSizes, streams: tuple[int, int]) -> None:
        columns = (sizes.num_tokens, sizes.height, sizes.width)
        text, height, width = (column.max(initial=0) for column in columns)
        if text <= streams[0] and cells(height, self.patch) * cells(width, self.patch) <= streams[1]:
            return  # quick for millions of samples
        text, image = lengths(sizes, self.patch)
        oversize = np.flatnonzero((text > streams[0]) | (image > streams[1]))
        if len(oversize):
            row = oversize[0]
            warnings.warn(
                f"{len(oversize)} samples exceed a stream's room of {streams[0]} tokens or {streams[1]} patches "
                f"and get a pack each (first: sample {row}, {text[row]} tokens, {image[row]} patches); "
                "a larger budget makes them fit",
                stacklevel=4,
            )


def _rooms(tokens: float, share: float, tile: int = 1) -> tuple[int, int]:
    """Rooms of the two streams for `tokens` tokens and patches, of which `share` are tokens."""
    text_room, image_room = tokens * share + 1e-6, tokens * (1 - share) + 1e-6  # 9.9999... is 10
    if image_room >= tile > 1:  # beyond whole tiles no image fits; text is cut in proportion
        text_room *= 1 - image_room % tile / image_room
        image_room -= image_room % tile
    return int(text_room), int(image_room + 1e-6)
