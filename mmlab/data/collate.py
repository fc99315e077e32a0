"""One sample, and collation: samples of different sizes become one padded batch.

Each image is copied at most once, by numpy in the calling thread: torch would use one thread per core for
each copy, and the cores are busy decoding. Images that were read or decoded straight into the batch's memory
are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import default_collate_fn_map

from mmlab.types import PATCH, Batch

Pixels = NDArray[np.uint8]  # (3, h, w) of an image, (B, 3, H, W) of a batch


class Sample(dict[str, Any]):
    """One item of the dataset. A plain `torch.utils.data.DataLoader` collates such items by `collate`.

    `id` str; `image` (3, h, w) uint8, None for a text-only record; `text` str or None; `input_ids` (t,) int64, empty for
    an image-only record; `label` int or None; `group` int. Indexing the data set adds `attention_mask` (t,),
    all True, as in the articles; `collate` ignores it and makes the batch's own.
    """


def collate(samples: Sequence[Sample], *, pad_token_id: int = 0, pixels: Pixels | None = None) -> Batch:
    """Pad samples to the largest height, width and text among them.

    Images sit in the top left corner; padding is zero in `pixel_values`, `pad_token_id` in `input_ids` and
    False in the masks. A batch without any image (or text) still gets one fully masked patch (or token), so
    that no tensor is empty.

    Args:
        samples: one or more. `labels` are those of the samples, or None if one of them has none.
        pixels: (B, 3, H, W) memory for `pixel_values`, used if it has that shape; images may already be in
            it.

    Returns:
        Batch of B samples, `pixel_values` (B, 3, H, W) uint8, `input_ids` (B, T) int64.
    """
    images = [None if sample["image"] is None else sample["image"].numpy() for sample in samples]
    sides = np.array([(0, 0) if image is None else image.shape[1:] for image in images])
    height, width = (int(side) or PATCH for side in sides.max(0))
    if pixels is None or pixels.shape != (len(samples), 3, height, width):
        pixels = np.empty((len(samples), 3, height, width), np.uint8)
    pixel_mask = np.ones((len(samples), height, width), bool)
    for image, place, mask in zip(images, pixels, pixel_mask, strict=True):
        _place(image, place, mask)
    input_ids, attention_mask = _padded([sample["input_ids"].numpy() for sample in samples], pad_token_id)
    labels = [sample["label"] for sample in samples]
    batch = Batch(
        pixel_values=torch.from_numpy(pixels),
        pixel_mask=torch.from_numpy(pixel_mask),
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        labels=None if None in labels else torch.tensor(labels),
        record_ids=[sample["id"] for sample in samples],
        groups=torch.tensor([sample["group"] for sample in samples]),
    )
    batch.columns = batch.columns_with(*sides.T)
    return batch


def put(image: Pixels, place: Pixels) -> Pixels:
    """Copy an image into the top left corner of its place (3, H, W) in a batch, unless it is too large.

    Returns:
        The corner that holds the image, or the image itself if it was too large.
    """
    corner = place[:, : image.shape[1], : image.shape[2]]
    if corner.shape != image.shape:
        return image
    if image.strides != corner.strides or not np.may_share_memory(image, corner):  # else it is already there
        corner[:] = image
    return corner


def _place(image: Pixels | None, place: Pixels, mask: NDArray[np.bool_]) -> None:
    """Put an image into its place (3, H, W) of a batch, and mask what is padding."""
    if image is None:
        place[:], mask[:] = 0, False
        return
    height, width = put(image, place).shape[1:]
    if image.shape != place.shape:  # else there is no padding, and looking for it would take longer
        for padding in (np.s_[..., height:, :], np.s_[..., :height, width:]):
            place[padding], mask[padding] = 0, False


def _padded(rows: Sequence[NDArray[np.int64]], padding: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of different length padded to (B, T), T at least 1, and the mask that is True where there is no padding."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(max(1, lengths.max())) < lengths[:, None]
    padded = np.full(mask.shape, padding, np.int64)
    padded[mask] = np.concatenate(rows)
    return padded, mask


# the extension that `torch.utils.data.default_collate` documents
default_collate_fn_map[Sample] = lambda samples, **_: collate(samples)
