"""Predicts hidden tokens from a text with gaps and from its fusion with the image.

Costs one attention of K hidden tokens over L fused positions, and K x V logits. The embedding of the text encoder
serves as the last layer (Press and Wolf 2017, arXiv:1608.05859), so that a vocabulary costs one bias a token here.

Legend: N samples, K hidden tokens, L fused positions, V tokens in the vocabulary, C width of the text, D of the fusion.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.model.fusion import CrossAttention


class TokenHead(nn.Module):
    """Hidden tokens attend to the fused positions, then to the vocabulary.

    Args:
        text_dim: width of the text's features.
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
