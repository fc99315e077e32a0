"""How the samples of a batch are read, decoded, augmented and padded, whichever thread or process does it.

A `SampleLoader` is pure: a request gives the same batch wherever and whenever it is loaded. So a resumed run, another
backend and another number of workers see the same pixels, and work lost with a killed worker is simply done again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mmlab.data.collate import Pixels, Sample, put
from mmlab.errors import DataError
from mmlab.types import PATCH, Batch, Region, SampleSizes

# copying a large image from memory takes less, unless other threads or programs are in the way
_SLOW_READ_S = 2.5e-4
_REMOTE_READ_S = 0.01  # so long takes a network file system whose reads Linux does not count
_NUM_ANNOUNCED = 32  # images that the disk is told of at once


class Augmentation(Protocol):
    """Changes an image (3, h, w) uint8 at random, as the key says. Picklable; called from many threads; keeps the size.

    One that knows its crop before there are pixels has `draw` and `apply`, as `mmlab.Augment` has.
    """

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor: ...


class BatchRequest(NamedTuple):
    """A batch to be loaded."""

    number: int  # in its epoch
    epoch: int
    rows: list[int]
    place: Mapping[str, Any] | None = None  # of the plan's iterator behind this batch, to resume there


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, and what was done about it."""

    record_id: str
    image_path: str | None
    message: str
    policy: str  # raise, skip or replace
    replaced_by: str | None = None  # id of the record that came in its place


class Upcoming:
    """Rows that nobody has begun to load, in order. Many threads may take from it."""

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self._rows = deque(rows)
        self._num_announced = 0  # of the next ones: the disk was told of them
        self._lock = Lock()

    def extend(self, rows: Sequence[int]) -> None:
        """More rows, behind the others."""
        with self._lock:
            self._rows.extend(rows)

    def begin(self) -> None:
        """One row fewer: somebody loads it."""
        with self._lock:
            self._rows.popleft()
            self._num_announced = max(0, self._num_announced - 1)

    def to_announce(self) -> list[int]:
        """The next rows that the disk was not told of; each is given once."""
        with self._lock:
            rows = list(islice(self._rows, self._num_announced, _NUM_ANNOUNCED))
            self._num_announced += len(rows)
        return rows


class LoadedSample(NamedTuple):
    """One sample of a batch; none where it was left out."""

    row: int
    sample: Sample | None
    bad: BadSample | None = None
    hit: bool = False  # the cache had it


class LoadedBatch(NamedTuple):
    """What became of a request; no batch where every sample was left out."""

    request: BatchRequest
    rows: list[int]  # of the batch, after skipping and replacing
    batch: Batch | None
    bad_samples: list[BadSample]
    num_hits: int  # samples that the cache had
    # seconds of collating; of the other stages too, where one thread or process did it all
    busy_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SampleLoader:
    """Loads requests. Picklable; safe to call from many threads.

    Without a cache, a random crop is cut from the image as it is stored and resized once. With a cache, it is cut from
    the cached image, which was resized before: the same part of the picture, not as sharp.

    Args:
        on_bad_sample: `raise` ends the epoch, `skip` leaves the sample out, `replace` puts the sample in its place that
            is nearest in size and fits into the planned batch (none fits: it is left out).
    """

    dataset: Any  # a `MultimodalDataset` or a `ConversationDataset`
    augment: Augmentation | None = None
    seed: int = 0
    on_bad_sample: str = "raise"

    @cached_property
    def sizes(self) -> SampleSizes:
        """Of all samples, after the image policy."""
        return self.dataset.sizes

    def batch_bytes(self, rows: list[int]) -> int:
        """Bytes of a batch of these rows: its samples, and their padded copy."""
        height, width, num_tokens = self._padded(rows)
        return len(rows) * (7 * height * width + 9 * num_tokens)

    def pixels(self, request: BatchRequest) -> Pixels:
        """Memory for the images of a batch (B, 3, H, W), into which each is put as soon as it is there."""
        height, width, _ = self._padded(request.rows)
        return np.empty((len(request.rows), 3, height, width), np.uint8)

    def read(self, row: int, out: Pixels | None = None) -> Any:
        """What `sample` needs: the encoded image, or the cache's pixels, read into `out` if they fit; or the error."""
        try:
            return self.dataset.read(row, out)
        except DataError as error:
            return error

    def sample(self, request: BatchRequest, row: int, found: Any, out: Pixels | None = None) -> LoadedSample:
        """The sample of a row, from what `read` found, under the policy on bad samples; its image put into `out`."""
        try:
            loaded = LoadedSample(row, self._decode(request, row, found), hit=isinstance(found, np.ndarray))
        except DataError as error:
            loaded = self._without(request, row, error)
        sample = None if loaded.hit else loaded.sample  # the cache has put it there
        if out is not None and sample is not None and sample["image"] is not None:
            sample["image"] = torch.from_numpy(put(sample["image"].numpy(), out))
        return loaded

    def collate(self, request: BatchRequest, loaded: Sequence[LoadedSample], pixels: Pixels) -> LoadedBatch:
        """Pad the request's samples together, in the memory that `pixels` gave."""
        started = time.perf_counter()
        rows = [item.row for item in loaded if item.sample is not None]
        samples = [item.sample for item in loaded if item.sample is not None]
        batch = self.dataset.collate(samples, pixels) if samples else None
        bad = [item.bad for item in loaded if item.bad is not None]
        busy_s = {"collate": time.perf_counter() - started}
        return LoadedBatch(request, rows, batch, bad, sum(item.hit for item in loaded), busy_s)

    def load(self, request: BatchRequest, holding: Callable[[int], None] = lambda row: None) -> LoadedBatch:
        """Load a whole request here and now; `holding` is told each row before it is touched."""
        pixels = self.pixels(request)
        rows = request.rows
        loaded, busy_s = self.load_part(request, range(len(rows)), pixels, Upcoming(rows), holding)
        batch = self.collate(request, loaded, pixels)
        return batch._replace(busy_s=busy_s | batch.busy_s)

    def load_part(
        self,
        request: BatchRequest,
        places: range,
        pixels: Pixels,
        upcoming: Upcoming,
        holding: Callable[[int], None] = lambda row: None,
    ) -> tuple[list[LoadedSample], dict[str, float]]:
        """The samples at some places of a batch, and the seconds that reading and decoding took.

        Where an image was not in memory, the disk is told of the next ones, of each once.

        Args:
            upcoming: rows that nobody has begun, in order; as many as are loaded are taken from it.
        """
        loaded, busy_s = [], {"read": 0.0, "decode": 0.0}
        blocks = blocks_read()
        for place in places:
            row = request.rows[place]
            holding(row)
            upcoming.begin()
            started = time.perf_counter()
            found = self.read(row, pixels[place])
            read = time.perf_counter()
            if read - started > _REMOTE_READ_S or (read - started > _SLOW_READ_S and blocks_read() > blocks):
                blocks = blocks_read()  # before the announcements: what they read counts, so that they go on
                for following in upcoming.to_announce():
                    self.dataset.announce(following)
            loaded.append(self.sample(request, row, found, pixels[place]))
            busy_s["read"] += read - started
            busy_s["decode"] += time.perf_counter() - read
        return loaded, busy_s

    def _padded(self, rows: list[int]) -> tuple[int, ...]:
        """Height, width and tokens of a batch of these rows."""
        sizes = self.sizes
        return tuple(int(column[rows].max()) for column in (sizes.height, sizes.width, sizes.num_tokens))

    def _decode(self, request: BatchRequest, row: int, found: Any) -> Sample:
        if isinstance(found, DataError):
            raise found
        augment: Any = self.augment
        if augment is None or not self.dataset.records.height[row]:
            return self.dataset.decode(row, found)
        record_id = self.dataset.records.ids[row]
        key: Any = {"seed": self.seed, "epoch": request.epoch, "record_id": record_id}
        if hasattr(augment, "draw") and self.dataset.cache is None:
            drawn = augment.draw(**key)
            sample = self.dataset.decode(row, found, region=self._region(row, drawn))
            sample["image"] = augment.apply(sample["image"], drawn, cropped=True)
        else:
            sample = self.dataset.decode(row, found)
            sample["image"] = augment(sample["image"], **key)
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

    def _without(self, request: BatchRequest, row: int, error: DataError) -> LoadedSample:
        records = self.dataset.records
        about = (records.ids[row], records.image_paths[row], str(error))
        for other in self._substitutes(request, row) if self.on_bad_sample == "replace" else ():
            try:
                sample = self._decode(request, other, self.read(other))
            except DataError:
                continue  # it is reported with the batch that it belongs to
            return LoadedSample(other, sample, BadSample(*about, "replace", records.ids[other]))
        policy = "raise" if self.on_bad_sample == "raise" else "skip"
        return LoadedSample(row, None, BadSample(*about, policy))

    def _substitutes(self, request: BatchRequest, row: int) -> Iterator[int]:
        """Rows outside the batch that fit into its padded shape, the nearest in size first."""
        sizes = self.sizes
        # what must fit, and what counts as one step of a difference
        columns = ((sizes.num_tokens, 1), (sizes.height, PATCH), (sizes.width, PATCH))
        fits = np.ones(len(sizes), dtype=bool)
        fits[request.rows] = False
        for column, _ in columns:
            fits &= (column <= column[request.rows].max()) & ((column > 0) == (column[row] > 0))
        distance = sum(np.abs(column[fits] - int(column[row])) / step for column, step in columns)
        yield from np.flatnonzero(fits)[np.argsort(distance, kind="stable")].tolist()


def blocks_read() -> int:
    """Blocks that this thread has read from disks so far; 0 where the system does not count them for each thread."""
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:  # not Linux
        return 0
    return getrusage(RUSAGE_THREAD).ru_inblock


def _rescaled(start: int, length: int, side: int, target: int) -> tuple[int, int]:
    """A stretch of a resized side, on the side before: where it starts, and its length, at least a pixel."""
    first = min(side - 1, round(start * side / target))
    return first, max(1, round((start + length) * side / target) - first)
