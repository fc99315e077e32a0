"""How the samples of a batch are read, decoded, augmented and padded, whichever thread or process does it.

A `SampleLoader` is pure: a request gives the same batch wherever and whenever it is loaded. So a resumed run, another
backend and another number of workers see the same pixels, and work lost with a killed worker is simply done again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from mmlab.data.collate import Pixels, Sample, put
from mmlab.errors import DataError, OptionError
from mmlab.types import Batch, Region, SampleSizes

# copying a large image from memory takes less, unless other threads or programs are in the way
_SLOW_READ_S = 2.5e-4
_REMOTE_READ_S = 0.01  # slower reads come from a network file system, whose reads Linux does not count
_NUM_ANNOUNCED = 32  # images that are announced to the disk at once


class Augmentation(Protocol):
    """Changes an image (3, h, w) uint8 at random, determined by (seed, epoch, record id); keeps its size.

    Must be picklable and thread-safe. One that can choose its crop before decoding has `draw` and `apply`, as
    `mmlab.Augment` does.
    """

    def __call__(self, image: torch.Tensor, *, seed: int, epoch: int, record_id: str) -> torch.Tensor: ...


class BatchRequest(NamedTuple):
    """A batch to be loaded."""

    number: int  # in its epoch
    epoch: int
    rows: list[int]
    place: Mapping[str, Any] | None = None  # of the plan's iterator after this batch, to resume there


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read."""

    record_id: str
    image_path: str | None
    message: str


class Upcoming:
    """Rows that no thread has begun to load, in order. Thread-safe."""

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self._rows = deque(rows)
        self._num_announced = 0  # of the next rows, announced to the disk
        self._lock = Lock()

    def extend(self, rows: Sequence[int]) -> None:
        """Append rows."""
        with self._lock:
            self._rows.extend(rows)

    def begin(self) -> None:
        """Remove the first row, because a thread begins to load it."""
        with self._lock:
            self._rows.popleft()
            self._num_announced = max(0, self._num_announced - 1)

    def to_announce(self) -> list[int]:
        """The next rows that were not announced to the disk yet; each is returned once."""
        with self._lock:
            rows = list(islice(self._rows, self._num_announced, _NUM_ANNOUNCED))
            self._num_announced += len(rows)
        return rows


class LoadedSample(NamedTuple):
    """One sample of a batch; `sample` is None if it was left out."""

    row: int
    sample: Sample | None
    bad: BadSample | None = None
    hit: bool = False  # the cache had it


class LoadedBatch(NamedTuple):
    """The outcome of a request; `batch` is None if every sample was left out."""

    request: BatchRequest
    rows: list[int]  # of the batch, those that could not be read left out
    batch: Batch | None
    bad_samples: list[BadSample]
    num_hits: int  # samples that the cache had
    # seconds of collating; of the other stages too, where one thread or process did it all
    busy_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SampleLoader:
    """Loads requests. Picklable; safe to call from many threads.

    Without a cache, a random crop is cut from the image as it is stored and resized once. With a cache, it is
    cut from the cached image, which was already resized: the same part of the picture, but less sharp.
    """

    dataset: Any  # a `MultimodalDataset` or a `ConversationDataset`
    augment: Augmentation | None = None
    seed: int = 0

    @cached_property
    def sizes(self) -> SampleSizes:
        """The sizes of all samples, after the image policy."""
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
        """The sample of a row, from what `read` returned; its image is put into `out`."""
        try:
            sample = self._decode(request, row, found, out)
        except DataError as error:
            records = self.dataset.records
            return LoadedSample(row, None, BadSample(records.ids[row], records.image_paths[row], str(error)))
        return LoadedSample(row, sample, hit=isinstance(found, np.ndarray))

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
        """Load a whole request in this thread; `holding` is called with each row before it is loaded."""
        pixels, rows = self.pixels(request), request.rows
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

        When an image was not in memory, the next ones are announced to the disk, each once.

        Args:
            upcoming: rows that no thread has begun to load, in order; each row loaded here is removed.
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
                blocks = blocks_read()  # before the announcements: what they read triggers the next ones
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

    def _decode(self, request: BatchRequest, row: int, found: Any, out: Pixels | None) -> Sample:
        if isinstance(found, DataError):
            raise found
        augment: Any = self.augment
        if augment is None or not self.dataset.records.height[row]:
            return self.dataset.decode(row, found, out)
        record_id = self.dataset.records.ids[row]
        key: Any = {"seed": self.seed, "epoch": request.epoch, "record_id": record_id}
        try:
            if hasattr(augment, "draw") and self.dataset.cache is None:
                drawn = augment.draw(**key)
                region = self._region(row, drawn)
                if getattr(drawn, "is_crop", False):
                    return self.dataset.decode(row, found, out, region)
                sample = self.dataset.decode(row, found, region=region)
                sample["image"] = augment.apply(sample["image"], drawn, cropped=True)
            else:
                sample = self.dataset.decode(row, found)
                sample["image"] = augment(sample["image"], **key)
            image, planned = sample["image"], (3, int(self.sizes.height[row]), int(self.sizes.width[row]))
            if not isinstance(image, torch.Tensor) or (image.dtype, image.shape) != (torch.uint8, planned):
                found = getattr(image, "dtype", type(image).__name__), *getattr(image, "shape", ())
                raise OptionError(f"augment must return uint8 of shape {planned}, as it got, not {found}")
            if out is not None:
                sample["image"] = torch.from_numpy(put(sample["image"].numpy(), out))
        except Exception as error:
            error.add_note(f"while record {record_id!r} was decoded and augmented")
            raise
        return sample

    def _region(self, row: int, drawn: Any) -> Region | None:
        """The region of the stored image that corresponds to the crop of a cached image."""
        records, sizes = self.dataset.records, self.sizes
        height, width = int(sizes.height[row]), int(sizes.width[row])
        region = drawn.region(height, width, height, width)
        if region is None:
            return None
        kept = self.dataset.image_policy.kept(int(records.height[row]), int(records.width[row]))
        top, rows = _rescaled(region.top, region.height, kept.height, height)
        left, columns = _rescaled(region.left, region.width, kept.width, width)
        return Region(kept.top + top, kept.left + left, rows, columns)


def blocks_read() -> int:
    """Blocks that this thread has read from disks so far; 0 where the system does not count them for each thread."""
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:  # not Linux
        return 0
    return getrusage(RUSAGE_THREAD).ru_inblock


def _rescaled(start: int, length: int, side: int, target: int) -> tuple[int, int]:
    """Map an interval of a resized side to the original side: start, and length of at least a pixel."""
    first = min(side - 1, round(start * side / target))
    return first, max(1, round((start + length) * side / target) - first)
