"""The nouns that every part of mmlab shares: a record, a batch, a batch's shape.

Costs nothing to import: torch is needed for type checking only. A `Record` holds metadata, never pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from mmlab.images import ImagePolicy


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
    """The padded shape of a batch: all that its cost and memory depend on.

    >>> BatchShape(8, 24, 224, 224).num_pixels
    401408
    """

    batch_size: int
    num_tokens: int  # T, the longest text
    height: int  # H, pixels of the tallest image
    width: int  # W

    @property
    def num_pixels(self) -> int:
        """Padded pixels of the whole batch."""
        return self.batch_size * self.height * self.width


class CostModel(Protocol):
    """What a batch of a given padded shape costs; pure, picklable, thread-safe."""

    @property
    def unit(self) -> str: ...  # "padded tokens", "seconds", "bytes"

    def __call__(self, shape: BatchShape) -> float: ...


@dataclass(slots=True)
class Batch:
    """One padded batch, on one device.

    B samples, T tokens, C channels, H x W pixels. Masks are 1 (True) where there is data. `pixel_values` stay
    `uint8` until the model normalises them.
    """

    pixel_values: torch.Tensor  # (B, C, H, W) uint8
    pixel_mask: torch.Tensor  # (B, H, W) bool
    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) bool
    labels: torch.Tensor | None  # (B,) int64
    record_ids: list[str]
    groups: torch.Tensor | None = None  # (B,) int64; equal values share an image
    weights: torch.Tensor | None = None  # (B,) float32; factor of each sample's loss, 1 where None

    def __len__(self) -> int:
        return len(self.record_ids)

    @property
    def shape(self) -> BatchShape:
        """The padded shape."""
        height, width = self.pixel_values.shape[-2:]
        return BatchShape(len(self), self.input_ids.shape[1], height, width)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def part(self, rows: slice) -> Batch:
        """The samples of some rows, padded as they are."""
        return replace(self._map(lambda tensor: tensor[rows]), record_ids=self.record_ids[rows])

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the batch."""
        import torch

        values = (getattr(self, item.name) for item in fields(self))
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        import torch

        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSizes:
    """The columns that a planner reads: N samples, integers only. Ten million of them take 160 MB.

    Sizes are those after the image policy: what the model will see.

    Raises:
        ValueError: columns of different length, or a negative size.
    """

    num_tokens: NDArray[np.int32]  # (N,)
    height: NDArray[np.int32]  # (N,) pixels
    width: NDArray[np.int32]  # (N,) pixels
    group: NDArray[np.int64]  # (N,) samples of one image share a value

    def __post_init__(self) -> None:
        columns = {name: np.asarray(getattr(self, name)) for name in self.__slots__}
        if len({len(column) for column in columns.values()}) > 1:
            found = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
            raise ValueError(f"columns must have one length, found {found}")
        for name in ("num_tokens", "height", "width"):
            column = columns[name]
            if len(column) and column.min() < 0:
                row = int(np.argmin(column))
                raise ValueError(f"{name} must not be negative, found {column[row]} in row {row}")
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
        rows = np.asarray(rows)
        return SampleSizes(
            num_tokens=self.num_tokens[rows],
            height=self.height[rows],
            width=self.width[rows],
            group=self.group[rows],
        )
