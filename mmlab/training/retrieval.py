"""How well embeddings of held-out pairs find each other: recall at k both ways, a loss over candidate sets of a
fixed size, and how the two modalities lie on the sphere of embeddings.

Recall says whether pairs find each other; alignment, uniformity and gap say why not: pairs far apart, everything in one
spot (uniformity near zero), or images on one side and texts on the other.

None of these figures depends on how the samples were batched, so runs under different schedulers can be
compared. Costs one similarity of every image with every text, image with image and text with text, in blocks
of rows.

Legend: N pairs, G distinct images, D embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.errors import DataError
from mmlab.training.losses.base import pairs
from mmlab.training.losses.contrastive import one_way_losses
from mmlab.types import Batch

_TIE = 1e-6  # of similarities: equal vectors differ by rounding
ROWS_PER_BLOCK = 1024


class Embeddings(NamedTuple):
    """Embeddings of the samples that have both modalities."""

    image: Tensor  # (N, D) of length one
    text: Tensor  # (N, D) of length one
    groups: Tensor  # (N,) equal values share an image; -1 where unknown
    record_ids: list[str]


def of_pairs(batch: Batch, image_embedding: Tensor, text_embedding: Tensor) -> Embeddings:
    """Keep the rows of a batch that are whole pairs."""
    whole = pairs(batch)
    groups = torch.full_like(whole, -1, dtype=torch.int64) if batch.groups is None else batch.groups
    record_ids = [record_id for record_id, keep in zip(batch.record_ids, whole.tolist(), strict=True) if keep]
    return Embeddings(image_embedding[whole], text_embedding[whole], groups[whole], record_ids)


def figures_of(parts: Sequence[Embeddings], logit_scale: Tensor) -> dict[str, float]:
    """All figures of this module, over the embeddings of all batches.

    Raises:
        DataError: there is no pair.
    """
    whole = joined(parts)
    return {**recalls(whole), **candidate_losses(whole, logit_scale), **describe_alignment(whole)}


def joined(parts: Sequence[Embeddings]) -> Embeddings:
    """All batches' embeddings, in order of record ids; a row of unknown group counts as an image of its own.

    Raises:
        DataError: there is no pair.
    """
    record_ids = [record_id for part in parts for record_id in part.record_ids]
    if not record_ids:
        raise DataError("no held-out sample has both an image and a text, and retrieval needs pairs")
    order = sorted(range(len(record_ids)), key=record_ids.__getitem__)
    image, text, groups = (torch.cat([part[column] for part in parts])[order] for column in range(3))  # type: ignore[misc]
    alone = -1 - torch.arange(len(groups), device=groups.device)
    return Embeddings(image, text, torch.where(groups < 0, alone, groups), [record_ids[row] for row in order])


def recalls(embeddings: Embeddings) -> dict[str, float]:
    """Recall at k in both directions over all pairs, and the recall at 1 of a random ranking.

    An image counts once however many captions it has: G images are ranked for each text, N texts for each
    image, and any text of an image is a hit. A wrong candidate that ties with the right one is ranked before
    it, so collapsed embeddings score zero.

    Returns:
        `image_to_text_r1`, `text_to_image_r1` and so on for k = 1, 5 and 10, and `chance_r1`, 1 / G in both directions.
    """
    first, group_of_text = distinct_images(embeddings.groups)
    num_images = len(first)
    group_of_image = torch.arange(num_images, device=first.device)
    images, texts = embeddings.image[first].float(), embeddings.text.float()  # (G, D), (N, D)
    to_text = torch.cat(list(_ranks(images, group_of_image, texts, group_of_text)))
    to_image = torch.cat(list(_ranks(texts, group_of_text, images, group_of_image)))
    found = {"chance_r1": 1 / num_images}
    for k in (1, 5, 10):
        found[f"image_to_text_r{k}"] = float((to_text < k).double().mean())
        found[f"text_to_image_r{k}"] = float((to_image < k).double().mean())
    return found


def distinct_images(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Each image's first row, (G,), and the number of each row's image, (N,) in 0..G-1."""
    _, number = groups.unique(return_inverse=True)
    rows = torch.arange(len(groups), device=groups.device)
    first = rows.new_full((int(number.max()) + 1,), len(groups)).scatter_reduce(0, number, rows, "amin")
    return first, number


def candidate_losses(
    embeddings: Embeddings, logit_scale: Tensor, *, num_candidates: int = 32
) -> dict[str, float]:
    """Mean contrastive losses of each pair among `num_candidates` pairs drawn once from all of them.

    The N pairs are shuffled, always in the same way, and cut into sets; the last set is filled up from the
    first, whose pairs are not counted twice. Other captions of an image are not its negatives; the remaining
    negatives are scaled up to `num_candidates - 1`.

    Returns:
        In nats: `image_to_text_loss`, in which an image chooses among texts, `text_to_image_loss`, and
        `loss`, the mean of the two; ln(num_candidates) by chance. NaN with fewer than two images.
    """
    groups, scale = embeddings.groups, logit_scale.float()
    size = min(num_candidates, len(groups))
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).to(groups.device)
    total, count = torch.zeros(2, dtype=torch.float64), 0
    for start in range(0, len(groups), size):
        places = torch.arange(start, start + size, device=groups.device)
        rows = order[places % len(groups)]
        allowed = groups[rows][:, None] != groups[rows]
        logits = embeddings.image[rows].float() @ embeddings.text[rows].float().T * scale
        losses = torch.stack(
            [one_way_losses(way, allowed, num_negatives=num_candidates - 1) for way in (logits, logits.T)]
        )
        counted = (places < len(groups)) & allowed.any(1)
        total += losses[:, counted].double().sum(1).cpu()
        count += int(counted.sum())
    to_text, to_image = (total / count).tolist() if count else (math.nan, math.nan)
    return {"loss": (to_text + to_image) / 2, "image_to_text_loss": to_text, "text_to_image_loss": to_image}


def describe_alignment(embeddings: Embeddings) -> dict[str, float]:
    """Four figures of embeddings of length one.

    Returns:
        `alignment`, the mean squared distance of a pair, 0 to 4, 2 by chance; `image_uniformity` over the G
        images and `text_uniformity` over the N texts, about -4 if spread evenly over many dimensions and 0 if
        all are the same; `modality_gap`, the distance of the images' mean from the texts' mean, 0 to 2.

    Source: Wang and Isola 2020 (arXiv:2005.10242); Liang et al. 2022 (arXiv:2203.02053).
    """
    image, text = (F.normalize(side.double(), dim=1) for side in (embeddings.image, embeddings.text))
    first, _ = distinct_images(embeddings.groups)
    return {
        "alignment": float((image - text).square().sum(1).mean()),
        "image_uniformity": uniformity(image[first]),
        "text_uniformity": uniformity(text),
        "modality_gap": float((image[first].mean(0) - text.mean(0)).norm()),
    }


def uniformity(vectors: Tensor) -> float:
    """Logarithm of the mean of exp(-2 d^2) over all pairs of different rows, d their distance; NaN with fewer than two.

    >>> round(uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), 6)  # d = 2
    -8.0

    Args:
        vectors: (N, D) of length one.
    """
    total = 0.0
    for start in range(0, len(vectors), ROWS_PER_BLOCK):
        similarity = vectors[start : start + ROWS_PER_BLOCK] @ vectors.T
        near = (4 * similarity - 4).exp()  # d^2 = 2 - 2 x similarity
        near.diagonal(start).zero_()  # a row with itself
        total += float(near.sum(dtype=torch.float64))
    num_pairs = len(vectors) * (len(vectors) - 1)
    return math.log(total / num_pairs) if num_pairs and total > 0 else math.nan


def _ranks(
    queries: Tensor, query_groups: Tensor, candidates: Tensor, candidate_groups: Tensor
) -> Iterator[Tensor]:
    """For blocks of queries: how many wrong candidates are ranked at or above the best right one."""
    for block, groups in zip(queries.split(ROWS_PER_BLOCK), query_groups.split(ROWS_PER_BLOCK), strict=True):
        similarity = block @ candidates.T
        right = groups[:, None] == candidate_groups
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        yield (~(similarity < best - _TIE) & ~right).sum(1)  # a NaN never wins
