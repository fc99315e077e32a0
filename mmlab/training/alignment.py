"""How the two modalities lie on the sphere of embeddings: alignment, uniformity and the gap between them.

Recall says whether pairs find each other; these say why not: pairs far apart (alignment), everything in one spot
(uniformity near zero), or images on one side and texts on the other (gap). None depends on how samples were batched.
Costs one similarity of every image with every image and of every text with every text, in blocks of rows.

Legend: N pairs, G distinct images, D embedding width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.training.retrieval import ROWS_PER_BLOCK, Embeddings, distinct_images


def describe_alignment(embeddings: Embeddings) -> dict[str, float]:
    """Four figures of embeddings of length one.

    Returns:
        `alignment`, the mean squared distance of a pair, 0 to 4, 2 by chance; `image_uniformity` over the G images and
        `text_uniformity` over the N texts, about -4 when spread evenly over many dimensions and 0 when all are one;
        `modality_gap`, the distance of the images' mean from the texts' mean, 0 to 2.

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
        near[torch.arange(len(near)), torch.arange(start, start + len(near))] = 0.0
        total += float(near.sum(dtype=torch.float64))
    num_pairs = len(vectors) * (len(vectors) - 1)
    return math.log(total / num_pairs) if num_pairs and total > 0 else math.nan
