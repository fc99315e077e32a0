"""Ways to fuse an image with a text, behind one interface: `FUSIONS` by name.

A fusion maps features and masks of N pairs to fused positions (N, L, D) and their mask, in `fuse`. In cross-attention,
and in its multi-scale form, the positions are those of the image; the baselines pool each modality first and give one
vector. A modality that is missing is replaced by a learned vector, so that every row has a position and no NaN arises.

Costs: cross-attention grows with P x T, the baselines with P + T.

Legend: B samples, N pairs, P image positions, T tokens, L fused positions, C width of features, D width of the fusion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmlab.model.fusion import MultimodalFusion, Pair, masked_mean


class MultiScaleFusion(MultimodalFusion):
    """Cross-attention between features of several depths, each with its own projection, mixed by learned gates.

    >>> fusion = MultiScaleFusion([64, 128], [32, 32], hidden_dim=128)
    >>> levels = [torch.randn(2, 49, 64), torch.randn(2, 49, 128)]
    >>> fusion.mix_images(levels).shape
    torch.Size([2, 49, 128])

    Give `fuse` the mixed features. Mixing is done once per sample, however many pairs it is part of.

    Args:
        img_dims, text_dims: widths of the levels.
        hidden_dim, options: as in `MultimodalFusion`.
    """

    def __init__(
        self, img_dims: Sequence[int], text_dims: Sequence[int], *, hidden_dim: int = 512, **options: int
    ) -> None:
        super().__init__(hidden_dim, hidden_dim, hidden_dim=hidden_dim, **options)
        self.mix_images, self.mix_texts = Gates(img_dims, hidden_dim), Gates(text_dims, hidden_dim)


class Gates(nn.Module):
    """Levels of features, projected to one width and added, each position choosing its share of every level.

    All levels count alike at first.

    Args:
        dims: widths of the levels.
        hidden_dim: width that comes out.
    """

    def __init__(self, dims: Sequence[int], hidden_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for dim in dims)
        self.projections = nn.ModuleList(nn.Linear(dim, hidden_dim) for dim in dims)
        self.gates = nn.ModuleList(nn.Linear(dim, 1) for dim in dims)
        for weight in self.gates.parameters():
            nn.init.zeros_(weight)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """(B, P, C_l) each to (B, P, D)."""
        normed = [norm(level) for norm, level in zip(self.norms, levels, strict=True)]
        gates = torch.cat([gate(level) for gate, level in zip(self.gates, normed, strict=True)], dim=2)
        shares = gates.softmax(2).unbind(2)
        projected = [project(level) for project, level in zip(self.projections, normed, strict=True)]
        weighted = [share[..., None] * level for share, level in zip(shares, projected, strict=True)]
        return torch.stack(weighted).sum(0)


class PooledFusion(nn.Module):
    """The base of the baselines: each modality's mean, projected, or a learned vector if it is missing.

    An MLP follows at the end.

    Args:
        img_dim, text_dim: widths of the features that come in.
        hidden_dim: width of the vector that goes out.
        num_heads: accepted so that all fusions take the same arguments; not used.
        num_layers: residual feed-forward blocks after the modalities are combined.
    """

    def __init__(
        self, img_dim: int, text_dim: int, *, hidden_dim: int = 512, num_heads: int = 8, num_layers: int = 1
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.image_projection = nn.Sequential(nn.Linear(img_dim, hidden_dim), nn.LayerNorm(hidden_dim))
        self.text_projection = nn.Sequential(nn.Linear(text_dim, hidden_dim), nn.LayerNorm(hidden_dim))
        self.null_image, self.null_text = (nn.Parameter(torch.randn(hidden_dim) * 0.02) for _ in range(2))
        self.layers = nn.ModuleList(FeedForward(hidden_dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)

    def combine(self, image: Tensor, text: Tensor) -> Tensor:
        """(N, D) and (N, D) to (N, D)."""
        raise NotImplementedError

    def fuse(self, image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> Pair:
        """One fused position per pair, (N, 1, D), and its mask, all True."""
        there = image_mask.any(1, keepdim=True), text_mask.any(1, keepdim=True)
        fused = self.combine(
            torch.where(there[0], self.image_projection(masked_mean(image, image_mask)), self.null_image),
            torch.where(there[1], self.text_projection(masked_mean(text, text_mask)), self.null_text),
        )
        for layer in self.layers:
            fused = layer(fused)
        return self.norm(fused)[:, None], torch.ones_like(there[0])


class ConcatFusion(PooledFusion):
    """Both vectors side by side, through one linear map."""

    def __init__(self, *dims: int, **options: int) -> None:
        super().__init__(*dims, **options)
        self.joint = nn.Linear(2 * self.hidden_dim, self.hidden_dim)

    def combine(self, image: Tensor, text: Tensor) -> Tensor:
        """(N, D) and (N, D) to (N, D)."""
        return self.joint(torch.cat([image, text], dim=1))


class GatedFusion(PooledFusion):
    """A gate chooses, entry by entry, between the image's and the text's vector.

    Source: Arevalo et al. 2017, gated multimodal units (arXiv:1702.01992).
    """

    def __init__(self, *dims: int, **options: int) -> None:
        super().__init__(*dims, **options)
        self.gate = nn.Linear(2 * self.hidden_dim, self.hidden_dim)

    def combine(self, image: Tensor, text: Tensor) -> Tensor:
        """(N, D) and (N, D) to (N, D)."""
        share = self.gate(torch.cat([image, text], dim=1)).sigmoid()
        return share * image.tanh() + (1 - share) * text.tanh()


class LateFusion(PooledFusion):
    """Each modality is processed separately to the end, where the vectors are multiplied element by element.

    A linear head on the product is a weighted dot product. (A sum of two separate scores, which late fusion is in
    classification, could not tell which image belongs to which text.) The feed-forward blocks stand before the product.
    """

    def __init__(self, *dims: int, num_layers: int = 1, **options: int) -> None:
        super().__init__(*dims, num_layers=0, **options)
        self.image_layers = nn.Sequential(*(FeedForward(self.hidden_dim) for _ in range(num_layers)))
        self.text_layers = nn.Sequential(*(FeedForward(self.hidden_dim) for _ in range(num_layers)))

    def combine(self, image: Tensor, text: Tensor) -> Tensor:
        """(N, D) and (N, D) to (N, D)."""
        return self.image_layers(image) * self.text_layers(text)


class FeedForward(nn.Module):
    """One pre-normalised residual block without attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """(N, D) to (N, D)."""
        return vectors + self.mlp(vectors)


FUSIONS: dict[str, type[MultimodalFusion] | type[PooledFusion]] = {
    "cross": MultimodalFusion,
    "multiscale": MultiScaleFusion,
    "gated": GatedFusion,
    "concat": ConcatFusion,
    "late": LateFusion,
}
