"""What is done to the samples of a batch, whichever thread or process does it.

A `Recipe` is pure: a job gives the same batch wherever and whenever it is done. So a resumed run, another backend and
another number of workers see the same pixels, and work lost with a killed worker is simply done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from mmlab.data.dataset import MultimodalDataset, Sample
from mmlab.errors import DataError
from mmlab.loading.collate import collate
from mmlab.types import PATCH, Batch, Region, SampleSizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

ON_BAD_SAMPLE = ("raise", "skip", "replace")


class Augmentation(Protocol):
    """Changes an image at random, as the key says. Picklable; called from many threads; keeps the size."""

    def __call__(
        self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str
    ) -> torch.Tensor: ...  # (3, h, w) uint8


@runtime_checkable
class CropsFirst(Augmentation, Protocol):
    """Knows what it crops before there are pixels, as `mmlab.Augment` does: what is drawn has `region(...)`."""

    def draw(self, *, seed: int, epoch: int, record_id: str) -> Any: ...

    def apply(self, image: torch.Tensor, drawn: Any, *, cropped: bool = False) -> torch.Tensor: ...


class Setting(NamedTuple):
    """How many workers, and how many batches they prepare ahead."""

    num_workers: int
    prefetch: int


class Job(NamedTuple):
    """A batch to be made."""

    number: int  # in its epoch
    epoch: int
    rows: list[int]


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, and what was done about it."""

    record_id: str
    image_path: str | None
    message: str
    policy: str  # raise, skip or replace
    replaced_by: str | None = None  # id of the record that came in its place


class Made(NamedTuple):
    """One sample; with neither row nor sample where it was left out."""

    row: int | None
    sample: Sample | None
    bad: BadSample | None
    hit: bool = False  # the cache had it


class Done(NamedTuple):
    """A job's outcome; no batch where every sample was left out."""

    job: Job
    rows: list[int]  # of the batch, after skipping and replacing
    batch: Batch | None
    bad_samples: list[BadSample]
    num_hits: int  # samples that the cache had
    busy_s: dict[str, float]  # seconds by stage, where the job was done in one go


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How samples are read, decoded, augmented and padded together.

    Without a cache, a random crop is cut from the image as it is stored and resized once. With a cache, it is cut from
    the cached image, which was resized before: the same part of the picture, not as sharp.

    Args:
        on_bad_sample: `raise` ends the epoch, `skip` leaves the sample out, `replace` puts the sample in its place that
            is nearest in size and fits into the planned batch (none fits: it is left out).
    """

    dataset: MultimodalDataset
    augment: Augmentation | None = None
    seed: int = 0
    on_bad_sample: str = "raise"

    def batch_bytes(self, rows: list[int]) -> int:
        """Bytes of a batch of these rows: its samples, and their padded copy."""
        sizes = self.sizes
        num_pixels = int(sizes.height[rows].max()) * int(sizes.width[rows].max())
        return len(rows) * (7 * num_pixels + 9 * int(sizes.num_tokens[rows].max()))

    @cached_property
    def sizes(self) -> SampleSizes:
        """Of all samples, after the image policy."""
        return self.dataset.sizes

    def pixels(self, job: Job) -> NDArray[np.uint8] | None:
        """Memory for the images of a batch, if the cache may read some of them right into it: (B, 3, H, W)."""
        if self.dataset.cache is None:
            return None
        sizes = self.sizes
        sides = (int(sizes.height[job.rows].max()), int(sizes.width[job.rows].max()))
        return np.empty((len(job.rows), 3, *sides), np.uint8)

    def read(self, row: int, out: NDArray[np.uint8] | None = None) -> Any:
        """What `sample` needs: the encoded image or the cache's arrays, read into `out` if they fit; or the error."""
        try:
            return self.dataset.read(row, out)
        except DataError as error:
            return error

    def sample(self, job: Job, row: int, found: Any) -> Made:
        """The sample of a row, from what `read` found, under the policy on bad samples."""
        try:
            return Made(row, self._sample(job, row, found), None, hit=isinstance(found, np.ndarray))
        except DataError as error:
            return self._without(job, row, error)

    def finish(
        self,
        job: Job,
        made: list[Made],
        busy_s: dict[str, float] | None = None,
        *,
        pixels: NDArray[np.uint8] | None = None,
    ) -> Done:
        """Pad the job's samples together, in the memory that `pixels` gave."""
        there = [(item.row, item.sample) for item in made if item.row is not None and item.sample is not None]
        samples = [sample for _, sample in there]
        pad_token_id = self.dataset.tokenizer.pad_token_id
        batch = collate(samples, pad_token_id=pad_token_id, pixels=pixels) if samples else None
        bad = [item.bad for item in made if item.bad is not None]
        num_hits = sum(item.hit for item in made)
        return Done(job, [row for row, _ in there], batch, bad, num_hits, busy_s or {})

    def run(self, job: Job, holding: Callable[[int], None] = lambda row: None) -> Done:
        """Do a whole job here and now; `holding` is told each row before it is touched."""
        busy_s = {"read": 0.0, "decode": 0.0, "collate": 0.0}
        made, pixels = [], self.pixels(job)
        for place, row in enumerate(job.rows):
            holding(row)
            started = time.perf_counter()
            found = self.read(row, None if pixels is None else pixels[place])
            read = time.perf_counter()
            made.append(self.sample(job, row, found))
            busy_s["read"] += read - started
            busy_s["decode"] += time.perf_counter() - read
        started = time.perf_counter()
        done = self.finish(job, made, busy_s, pixels=pixels)
        busy_s["collate"] = time.perf_counter() - started
        return done

    def _sample(self, job: Job, row: int, found: Any) -> Sample:
        if isinstance(found, DataError):
            raise found
        if self.augment is None or not self.dataset.records.height[row]:
            return self.dataset.decode(row, found)
        record_id = self.dataset.records.ids[row]
        if isinstance(self.augment, CropsFirst) and self.dataset.cache is None:
            drawn = self.augment.draw(seed=self.seed, epoch=job.epoch, record_id=record_id)
            sample = self.dataset.decode(row, found, region=self._region(row, drawn))
            assert sample["image"] is not None
            sample["image"] = self.augment.apply(sample["image"], drawn, cropped=True)
        else:
            sample = self.dataset.decode(row, found)
            assert sample["image"] is not None
            sample["image"] = self.augment(
                sample["image"], seed=self.seed, epoch=job.epoch, record_id=record_id
            )
        return sample

    def _region(self, row: int, drawn: Any) -> Region | None:
        """Where the crop that a cached image would get lies in the stored image."""
        records, sizes = self.dataset.records, self.sizes
        height, width = int(sizes.height[row]), int(sizes.width[row])
        region = drawn.region(height, width, height, width)
        if region is None:
            return None
        kept = self.dataset.image_policy.kept(int(records.height[row]), int(records.width[row]))
        top, rows = _rescaled(region.top, region.height, kept.height, height)
        left, columns = _rescaled(region.left, region.width, kept.width, width)
        return Region(kept.top + top, kept.left + left, rows, columns)

    def _without(self, job: Job, row: int, error: DataError) -> Made:
        records = self.dataset.records
        stand_ins = self._stand_ins(job, row) if self.on_bad_sample == "replace" else iter(())
        for other in stand_ins:
            try:
                sample = self._sample(job, other, self.read(other))
            except DataError:
                continue  # it will be reported where it comes by itself
            bad = BadSample(
                records.ids[row], records.image_paths[row], str(error), "replace", records.ids[other]
            )
            return Made(other, sample, bad)
        policy = "raise" if self.on_bad_sample == "raise" else "skip"
        return Made(None, None, BadSample(records.ids[row], records.image_paths[row], str(error), policy))

    def _stand_ins(self, job: Job, row: int) -> Iterator[int]:
        """Rows outside the batch that fit into its padded shape, the nearest in size first."""
        sizes = self.sizes
        columns = (sizes.num_tokens, sizes.height, sizes.width)
        fits = np.ones(len(sizes), dtype=bool)
        fits[job.rows] = False
        for column in columns:
            fits &= (column <= column[job.rows].max()) & ((column > 0) == (column[row] > 0))
        scales = (1, PATCH, PATCH)
        distance = sum(
            np.abs(column[fits] - int(column[row])) / scale
            for column, scale in zip(columns, scales, strict=True)
        )
        yield from np.flatnonzero(fits)[np.argsort(distance, kind="stable")].tolist()


def _rescaled(start: int, length: int, side: int, target: int) -> tuple[int, int]:
    """A stretch of a resized side, on the side before: where it starts, and its length, at least a pixel."""
    first = min(side - 1, round(start * side / target))
    return first, max(1, round((start + length) * side / target) - first)
