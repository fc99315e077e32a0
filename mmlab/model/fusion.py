"""Cross-attention between the features of two modalities: the articles' `MultimodalFusion`, batch-first and masked.

Costs one attention of P queries over T keys per layer. It holds no encoder: give it features, or use
`FusionModel`. Other ways to fuse are in `mmlab.model.fusions`.

Legend: B samples, P image positions, T tokens, D width.
"""

from __future__ import annotations

from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import OptionError
from mmlab.model.packing import Keys, Segments, attend

Pair = tuple[Tensor, Tensor]  # features and their mask


class MultimodalFusion(nn.Module):
    """Project both modalities to one width and let every image position attend to the text.

    >>> fusion = MultimodalFusion(img_dim=768, text_dim=768)
    >>> fusion(torch.randn(2, 49, 768), torch.randn(2, 12, 768)).shape
    torch.Size([2, 49, 512])

    A learned null token stands beside the text, so a sample whose text is missing or wholly masked attends to that
    token alone: no row is ever without a key, and no NaN arises.

    Args:
        img_dim, text_dim: widths of the features that come in.
        hidden_dim: width of the features that go out.
        num_heads: attention heads; must divide `hidden_dim`.
        num_layers: attention blocks, each with its own feed-forward part.

    Raises:
        OptionError: `num_heads` is below 1 or does not divide `hidden_dim`.

    Source: article C (`MultimodalFusion`), corrected: its attention was not batch-first and saw the padding.
    """

    def __init__(
        self,
        img_dim: int = 768,
        text_dim: int = 768,
        *,
        hidden_dim: int = 512,
        num_heads: int = 8,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.img_proj = nn.Linear(img_dim, hidden_dim)
        self.text_proj = nn.Linear(text_dim, hidden_dim)
        self.null_token = nn.Parameter(torch.randn(1, 1, hidden_dim) * 0.02)
        self.null_image = nn.Parameter(self.null_token.detach().clone())
        self.layers = nn.ModuleList(CrossAttention(hidden_dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.packed = False  # see mmlab.model.packing

    @property
    def fusion_layer(self) -> CrossAttention:
        """The first attention block, under the article's name."""
        return cast(CrossAttention, self.layers[0])

    def forward(
        self, image_features: Tensor, text_features: Tensor, text_mask: Tensor | None = None
    ) -> Tensor:
        """Fuse.

        Args:
            image_features: (B, P, img_dim); masked positions may hold anything finite, and the caller must
                mask them afterwards.
            text_features: (B, T, text_dim)
            text_mask: (B, T) bool, True where there is a token; None means all.

        Returns:
            (B, P, hidden_dim)
        """
        return self._attend(self.img_proj(image_features), text_features, text_mask)

    def fuse(self, image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> Pair:
        """Fused positions (B, P, D) and their mask; a missing image's first one gets a learned query."""
        stand_in = ~image_mask.any(1, keepdim=True) & (torch.arange(image.shape[1], device=image.device) == 0)
        queries = torch.where(stand_in[..., None], self.null_image, self.img_proj(image))
        mask = image_mask | stand_in
        return self._attend(queries, text, text_mask, mask if self.packed else None), mask

    def _attend(
        self, fused: Tensor, text: Tensor, text_mask: Tensor | None, packed_mask: Tensor | None = None
    ) -> Tensor:
        """Queries (B, P, D) over text; where `packed_mask` (B, P) is given, in streams without padding."""
        null = self.null_token.expand(len(text), -1, -1)
        keys = torch.cat([null, self.text_proj(text)], dim=1)  # (B, 1 + T, D)
        mask = None if text_mask is None else F.pad(text_mask.bool(), (1, 0), value=True)  # (B, 1 + T)
        if packed_mask is not None and mask is not None:
            segments = (Segments(packed_mask), Segments(mask))
            stream, key_stream = segments[0].pack(fused), segments[1].pack(keys)
            for layer in self.layers:
                stream = layer(stream, key_stream, segments)
            return segments[0].unpack(self.norm(stream))
        for layer in self.layers:
            fused = layer(fused, keys, None if mask is None else mask[:, None, None, :])
        return self.norm(fused)


class CrossAttention(nn.Module):
    """One pre-normalised block: queries attend to keys, then a feed-forward part, both residual."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise OptionError(f"num_heads must divide hidden_dim, found {num_heads} heads for width {dim}")
        self.num_heads = num_heads
        self.query_norm, self.key_norm, self.mlp_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key_value, self.out = (nn.Linear(dim, width) for width in (dim, 2 * dim, dim))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, queries: Tensor, keys: Tensor, key_mask: Keys | None) -> Tensor:
        """(B, P, D) attending to (B, T, D) where `key_mask` (B, 1, 1, T) is True, or inside the segments of streams."""
        query = rearrange(self.query(self.query_norm(queries)), "b p (h d) -> b h p d", h=self.num_heads)
        joined = self.key_value(self.key_norm(keys))
        key, value = rearrange(joined, "b t (two h d) -> two b h t d", two=2, h=self.num_heads)
        attended = attend(query, key, value, key_mask)
        queries = queries + self.out(rearrange(attended, "b h p d -> b p (h d)"))
        return queries + self.mlp(self.mlp_norm(queries))


class TokenHead(nn.Module):
    """Predicts hidden tokens from the masked text and its fusion with the image.

    Each hidden token attends to the fused positions, then gets logits over the vocabulary.

    Costs one attention of K hidden tokens over L fused positions, and K x V logits. The text encoder's
    embedding serves as the last layer (Press and Wolf 2017, arXiv:1608.05859), so that each token of the
    vocabulary adds only one bias here.

    Args:
        text_dim: width C of the text's features.
        hidden_dim, num_heads: of the fusion.
        embedding: (V, E) weights of the text encoder, for their shape.
    """

    def __init__(self, text_dim: int, hidden_dim: int, num_heads: int, embedding: Tensor) -> None:
        super().__init__()
        self.query = nn.Linear(text_dim, hidden_dim)
        self.attention = CrossAttention(hidden_dim, num_heads)
        self.out = nn.Sequential(nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, embedding.shape[1]))
        self.bias = nn.Parameter(torch.zeros(len(embedding)))

    def forward(self, text: Tensor, fused: Tensor, fused_mask: Tensor, embedding: Tensor) -> Tensor:
        """(N, K, C), (N, L, D), (N, L) and (V, E) to logits (N, K, V)."""
        attended = self.attention(self.query(text), fused, fused_mask[:, None, None, :])
        return F.linear(self.out(attended), embedding, self.bias)


def masked_mean(features: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where mask (B, P) is True; zero where there is none. (B, P, D) -> (B, D)."""
    weights = mask.to(features.dtype)
    return (features * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
