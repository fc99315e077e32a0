"""How well embeddings of held-out pairs find each other: recall at k both ways, and a loss over candidate sets of a
fixed size.

None of these figures depends on how the samples were batched, so runs under different schedulers compare. Costs one
similarity of every image with every text, in blocks of rows.

Legend: N pairs, G distinct images, D embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mmlab.losses import contrastive_losses

_ROWS_PER_BLOCK = 1024


def recalls(
    image_embedding: Tensor, text_embedding: Tensor, groups: Tensor, *, at: tuple[int, ...] = (1, 5, 10)
) -> dict[str, float]:
    """Recall at k in both directions over all pairs, and what a random ranking would reach.

    An image counts once however many captions it has: G images are ranked for each text, N texts for each image, and
    any text of an image is a hit. A candidate that ties with the right one is ranked before it, so collapsed
    embeddings score zero.

    Args:
        image_embedding, text_embedding: (N, D) of length one.
        groups: (N,) equal values share an image.
        at: the k of recall at k.

    Returns:
        `image_to_text_r1`, `text_to_image_r1` and so on for each k, and `chance_r1`, 1 / G in both directions.
    """
    _, group_of_text = groups.unique(return_inverse=True)  # (N,) 0..G-1
    num_texts, num_images = len(groups), int(group_of_text.max()) + 1
    first = torch.full((num_images,), num_texts, device=groups.device).scatter_reduce(
        0, group_of_text, torch.arange(num_texts, device=groups.device), "amin"
    )
    images = image_embedding[first].float()  # (G, D)
    texts = text_embedding.float()
    group_of_image = torch.arange(num_images, device=groups.device)
    to_text = torch.cat(list(_ranks(images, group_of_image, texts, group_of_text)))
    to_image = torch.cat(list(_ranks(texts, group_of_text, images, group_of_image)))
    found = {"chance_r1": 1 / num_images}
    for k in at:
        found[f"image_to_text_r{k}"] = float((to_text < k).double().mean())
        found[f"text_to_image_r{k}"] = float((to_image < k).double().mean())
    return found


def candidate_loss(
    image_embedding: Tensor,
    text_embedding: Tensor,
    groups: Tensor,
    logit_scale: Tensor,
    *,
    num_candidates: int = 32,
    seed: int = 0,
) -> float:
    """Mean symmetric contrastive loss of each pair among `num_candidates` pairs drawn once from all of them.

    The N pairs are shuffled by `seed` and cut into sets; the last set is filled up from the first, whose pairs are
    not counted twice. Other captions of an image are not its negatives; the rest is scaled up to `num_candidates -
    1`.

    Returns:
        nats; ln(num_candidates) by chance. NaN with fewer than two images.
    """
    num_pairs = len(groups)
    size = min(num_candidates, num_pairs)
    order = torch.randperm(num_pairs, generator=torch.Generator().manual_seed(seed)).to(groups.device)
    total, count = 0.0, 0
    for start in range(0, num_pairs, size):
        rows = order[torch.arange(start, start + size, device=order.device) % num_pairs]
        allowed = groups[rows][:, None] != groups[rows]
        logits = (image_embedding[rows] @ text_embedding[rows].T).float() * logit_scale.float()
        counted = (torch.arange(start, start + size, device=order.device) < num_pairs) & allowed.any(1)
        losses = contrastive_losses(logits, allowed, num_negatives=max(1, num_candidates - 1))
        total += float(losses[counted].double().sum())
        count += int(counted.sum())
    return total / count if count else math.nan


def _ranks(
    queries: Tensor, query_groups: Tensor, candidates: Tensor, candidate_groups: Tensor
) -> Iterator[Tensor]:
    """For blocks of queries: how many wrong candidates stand at or above the best right one."""
    for start in range(0, len(queries), _ROWS_PER_BLOCK):
        rows = slice(start, start + _ROWS_PER_BLOCK)
        similarity = queries[rows] @ candidates.T
        right = query_groups[rows, None] == candidate_groups
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        yield ((similarity >= best) & ~right).sum(1)
