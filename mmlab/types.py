"""The types that every part of mmlab shares: a record, a batch, a batch's shape, an image policy.

Costs nothing to import: torch is needed for type checking only. A `Record` holds metadata, never pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mmlab.errors import OptionError, check_numbers

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Sides = tuple[NDArray[np.int32], NDArray[np.int32]]  # (N,) height and width


@dataclass(frozen=True, slots=True)
class Record:
    """Metadata of one image-text pair.

    A missing modality is `None` with size zero: text-only records have `image_path=None` and `height == width
    == 0`, image-only records have `text=None` and `num_tokens == 0`.
    """

    id: str
    image_path: str | None
    text: str | None
    height: int  # pixels, as displayed (EXIF orientation applied)
    width: int
    num_tokens: int  # special tokens included
    label: int | None = None
    group: int = field(default=-1, kw_only=True)  # records of one image share it
    split: str | None = field(default=None, kw_only=True)


class BatchShape(NamedTuple):
    """The padded shape of a batch: all that its cost and memory depend on."""

    batch_size: int
    num_tokens: int  # T, the longest text
    height: int  # H, pixels of the tallest image
    width: int  # W


class CostModel(Protocol):
    """The cost of a batch of a given padded shape; pure, picklable, thread-safe."""

    @property
    def unit(self) -> str: ...  # "padded tokens", "seconds", "bytes"

    def as_polynomial(self) -> Any: ...  # the same as an `mmlab.schedule.cost.MaxPolynomial`

    def __call__(self, shape: BatchShape) -> float: ...


@dataclass(slots=True, kw_only=True)
class HostColumns:
    """The data that objectives and meters count, in host memory: reading them never waits for the device.

    Counts are computed on construction, which a loader does ahead of the training step.
    """

    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) bool
    height: NDArray[np.int64]  # (B,) pixels of each image; 0 without one
    width: NDArray[np.int64]  # (B,)
    groups: NDArray[np.int64] | None  # (B,)
    labels: torch.Tensor | None  # (B,) int64
    is_pair: NDArray[np.bool_] = field(init=False)  # (B,) samples that have both an image and a text
    num_pairs: int = field(init=False)
    # distinct images of the pairs; each pair of group -1 (unknown) counts as an image of its own
    num_images: int = field(init=False)
    num_tokens: int = field(init=False)  # without padding
    num_patches: int = field(init=False)  # without padding, of 16 x 16 pixels

    def __post_init__(self) -> None:
        mask = self.attention_mask.numpy()
        self.is_pair = (self.height > 0) & mask.any(1)
        self.num_pairs = self.num_images = int(self.is_pair.sum())
        if self.groups is not None:
            known = self.groups[self.is_pair & (self.groups >= 0)]
            self.num_images += len(np.unique(known)) - len(known)
        self.num_tokens = int(np.count_nonzero(mask))
        self.num_patches = int((-(-self.height // PATCH) * -(-self.width // PATCH)).sum())

    def __len__(self) -> int:
        return len(self.height)

    def part(self, rows: slice) -> HostColumns:
        """The columns of some rows."""
        columns = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})


@dataclass(slots=True)
class Batch:
    """One padded batch, on one device.

    B samples, T tokens, C channels, H x W pixels. Masks are 1 (True) where there is data. `pixel_values` stay
    `uint8` until the model normalises them. `collate` fills in `columns`; code that changes masks, tokens,
    groups or labels of a batch must set them to None.
    """

    pixel_values: torch.Tensor  # (B, C, H, W) uint8
    pixel_mask: torch.Tensor  # (B, H, W) bool
    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) bool
    labels: torch.Tensor | None  # (B,) int64
    record_ids: list[str]
    groups: torch.Tensor | None = None  # (B,) int64; equal values share an image
    weights: torch.Tensor | None = None  # (B,) float32; factor of each sample's loss, None: 1 for all
    columns: HostColumns | None = None  # the same masks, tokens, groups and labels on the host
    pads_images: bool = True  # see `SampleSizes`

    def __len__(self) -> int:
        return len(self.record_ids)

    def __repr__(self) -> str:
        pixels, tokens = tuple(self.pixel_values.shape), tuple(self.input_ids.shape)
        return f"<{type(self).__name__} of {len(self)} samples: images {pixels}, tokens {tokens}>"

    @property
    def shape(self) -> BatchShape:
        """The padded shape."""
        height, width = self.pixel_values.shape[-2:]
        return BatchShape(len(self), self.input_ids.shape[1], height, width)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch with every tensor on `device`; itself if they are there already."""
        if self.pixel_values.device == device:
            return self
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def part(self, rows: slice) -> Batch:
        """The samples of some rows, with unchanged padding."""
        columns = None if self.columns is None else self.columns.part(rows)
        part = self.map_tensors(lambda tensor: tensor[rows])
        return replace(part, record_ids=self.record_ids[rows], columns=columns)

    @property
    def host(self) -> HostColumns:
        """The columns on the host; if `collate` did not make them, each call reads them from the tensors."""
        if self.columns is not None:
            return self.columns
        pixels = self.pixel_mask.cpu().numpy()
        return self.columns_with(pixels.any(2).sum(1), pixels.any(1).sum(1))

    def columns_with(self, height: NDArray[np.int64], width: NDArray[np.int64]) -> HostColumns:
        """The columns on the host, given height and width (B,) of each image in pixels."""
        return HostColumns(
            input_ids=self.input_ids.cpu(),
            attention_mask=self.attention_mask.cpu(),
            height=height,
            width=width,
            groups=None if self.groups is None else self.groups.cpu().numpy(),
            labels=None if self.labels is None else self.labels.cpu(),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the batch."""
        return list(self._tensors().values())

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same batch with every tensor changed; the columns stay as they are."""
        return replace(self, **{name: change(tensor) for name, tensor in self._tensors().items()})  # type: ignore[arg-type]

    def _tensors(self) -> dict[str, torch.Tensor]:
        import torch

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSizes:
    """The columns that a scheduler reads: N samples, integers only. Ten million of them take 200 MB.

    Sizes are those after the image policy: what the model will see.

    Args:
        pads_images: whether a batch pads images to the largest. If not, as in Qwen2-VL, which lays the patches of all
            images end to end, height counts: it is `PATCH` times the number of patches, and that of a batch is the mean.

    Raises:
        ValueError: columns of different length, or a size that is not a whole number from 0 to 2^31 - 1.
    """

    num_tokens: NDArray[np.int32]  # (N,)
    height: NDArray[np.int32]  # (N,) pixels
    width: NDArray[np.int32]  # (N,) pixels
    group: NDArray[np.int64]  # (N,) samples of one image share a value
    pads_images: bool = True

    def __post_init__(self) -> None:
        columns = {name: np.asarray(getattr(self, name)) for name in SIZE_COLUMNS}
        if len({len(column) for column in columns.values()}) > 1:
            found = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
            raise ValueError(f"columns must have one length, found {found}")
        for name in ("num_tokens", "height", "width"):
            column = columns[name]
            if column.ndim != 1:
                raise ValueError(f"{name} must have one dimension, found {column.ndim}")
            with np.errstate(invalid="ignore"):  # of NaN
                whole = column.astype(np.int32, copy=False)
            if len(column) and (whole.min() < 0 or (whole is not column and (whole != column).any())):
                row = int(np.argmax((whole < 0) | (whole != column)))
                raise ValueError(f"{name} must be whole numbers below 2^31, found {column[row]} in row {row}")
        for name, column in columns.items():
            dtype = np.int64 if name == "group" else np.int32
            object.__setattr__(self, name, np.ascontiguousarray(column, dtype=dtype))

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def alone(self) -> NDArray[np.int64]:
        """(N, 4) the shape of each sample in a batch of its own, as in `BatchShape`."""
        columns = (np.ones(len(self)), self.num_tokens, self.height, self.width)
        return np.stack(columns, axis=1).astype(np.int64)

    def resized(self, policy: ImagePolicy) -> SampleSizes:
        """The same samples with image sizes after `policy`."""
        height, width = policy.target_sizes(self.height, self.width)
        return replace(self, height=height, width=width)

    def take(self, rows: Sequence[int] | NDArray[np.integer]) -> SampleSizes:
        """The rows asked for, in that order."""
        rows = np.asarray(rows, dtype=None if len(rows) else np.int64)
        return replace(self, **{name: getattr(self, name)[rows] for name in SIZE_COLUMNS})


def mean_height(total: Any, count: Any) -> Any:
    """Height of a batch of images that are not padded, from their sum: a whole number of patches, rounded up."""
    return PATCH * -(-total // (PATCH * count))


SIZE_COLUMNS = ("num_tokens", "height", "width", "group")
IGNORED = -100  # a label that no loss counts, as in transformers
PATCH = 16  # pixels; the grid in which image waste is counted


class Region(NamedTuple):
    """A rectangle of an image, in pixels as displayed."""

    top: int
    left: int
    height: int
    width: int


class ImagePolicy(Protocol):
    """Maps stored sizes to the sizes that the model sees. Pure, picklable and hashable."""

    def target_sizes(self, height: NDArray[np.int32], width: NDArray[np.int32]) -> Sides:
        """Height and width (N,) after the policy, in pixels; zero stays zero (no image)."""

    def kept(self, height: int, width: int) -> Region:
        """The part of an image of this size that is resized to the target size."""


@dataclass(frozen=True, slots=True)
class Square:
    """Resize the short side to `side` and crop the centre.

    Raises:
        OptionError: `side` below 1.
    """

    side: int = 224

    def __post_init__(self) -> None:
        check_numbers(self, "square image ")

    def __str__(self) -> str:
        return f"square:{self.side}"

    def target_sizes(self, height: NDArray[np.int32], width: NDArray[np.int32]) -> Sides:
        """`side` x `side` wherever there is an image."""
        side = np.where(np.asarray(height) > 0, np.int32(self.side), np.int32(0))
        return side, side.copy()

    def kept(self, height: int, width: int) -> Region:
        """The square in the centre."""
        short = min(height, width)
        return Region((height - short) // 2, (width - short) // 2, short, short)


@dataclass(frozen=True, slots=True)
class Aspect:
    """Keep the proportions within `max_area` pixels; sides are multiples of `multiple`; small images are not
    enlarged.

    Raises:
        OptionError: an area that cannot hold one `multiple` x `multiple` cell.
    """

    max_area: int = 224 * 224
    multiple: int = PATCH

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.max_area < self.multiple**2:
            raise OptionError(
                f"max_area {self.max_area} cannot hold one cell of {self.multiple} x {self.multiple} pixels; "
                f"give at least {self.multiple**2}, as aspect:{self.multiple} does"
            )

    def __str__(self) -> str:
        return f"aspect:{round(self.max_area**0.5)}:{self.multiple}"

    def target_sizes(self, height: NDArray[np.int32], width: NDArray[np.int32]) -> Sides:
        """Scaled to the area, each side rounded to a multiple (at least one), the long side cut to fit the area."""
        stored_h, stored_w = np.asarray(height, dtype=np.float64), np.asarray(width, dtype=np.float64)
        scale = np.minimum(1.0, np.sqrt(self.max_area / np.maximum(stored_h * stored_w, 1.0)))
        cells = self.max_area // self.multiple**2
        rows = np.maximum(1, np.rint(stored_h * scale / self.multiple)).astype(np.int32)
        cols = np.maximum(1, np.rint(stored_w * scale / self.multiple)).astype(np.int32)
        tall = rows > cols
        rows = np.where(tall, np.minimum(rows, np.maximum(1, cells // cols)), rows)
        cols = np.where(~tall, np.minimum(cols, np.maximum(1, cells // rows)), cols)
        there = stored_h > 0
        unit = np.int32(self.multiple)
        return tuple(np.where(there, side * unit, 0).astype(np.int32) for side in (rows, cols))  # type: ignore[return-value]

    def kept(self, height: int, width: int) -> Region:
        """All of it."""
        return Region(0, 0, height, width)


def processor_policy(processor: Any) -> ImagePolicy:
    """The policy whose images have the sizes that a model's own `transformers` processor makes.

    A height and width, or a centre crop, gives `Square`; a shortest edge alone keeps proportions and gives
    `Aspect` with the area of that edge squared, in cells of `size_divisor` (default: 16).

    Raises:
        OptionError: the images are not square, or the processor has no image size.
    """
    images = getattr(processor, "image_processor", processor)
    crops = getattr(images, "do_center_crop", None)
    size = dict(getattr(images, "crop_size" if crops else "size", None) or {})
    height, width, edge = size.get("height"), size.get("width"), size.get("shortest_edge")
    if edge is not None:
        return Aspect(edge * edge, getattr(images, "size_divisor", None) or PATCH)
    if height is None or height != width:
        raise OptionError(
            f"{type(images).__name__} makes images of {size}, expected a square or a shortest edge; give image_policy"
        )
    return Square(height)


square, aspect = Square, Aspect  # the names by which users and the command line call them


def parse_image_policy(text: str) -> ImagePolicy:
    """Read a policy from its short form: `square:SIDE` or `aspect:SIDE[:MULTIPLE]`, with max_area = SIDE x
    SIDE.

    >>> parse_image_policy("aspect:128")
    Aspect(max_area=16384, multiple=16)

    Raises:
        OptionError: the text has another form, or the size is impossible.
    """
    match = re.fullmatch(r"(square|aspect):(\d{1,5})(?::(\d{1,5}))?", str(text).strip())
    if match is None or (match[1] == "square" and match[3]) or int(match[2]) > 2**14:
        raise OptionError(
            f"image policy {text!r} is not square:SIDE or aspect:SIDE[:MULTIPLE] of at most 16384 pixels (aspect:224)"
        )
    if match[1] == "square":
        return Square(int(match[2]))
    return Aspect(int(match[2]) ** 2, int(match[3] or PATCH))


@runtime_checkable
class HasSizes(Protocol):
    """Anything that has the columns a scheduler reads, such as `mmlab.Records`."""

    def sizes(self) -> SampleSizes:
        """The scheduler's columns, as stored."""


Samples = HasSizes | SampleSizes | Sequence[Record]  # what schedulers plan
