"""Image encoders, which turn an image into a sequence of features with a mask, and the interface of every encoder.

Every image encoder maps (pixels, pixel mask) to (features, feature mask) for any height and width, every text encoder
maps (input ids, attention mask) to features. Pixels arrive normalised; what lies outside the pixel mask is set to
zero, the mean colour. `ViT`, with or without `ConvStem`, gives the same features however much padding surrounds an
image. `ResNet` sees padding at the borders inside each stage: there only pooling and fusion leave it out.

`levels(..., num_levels=n)` gives features after n evenly spaced depths instead, the last as above, and
`level_dims(n)` their widths.

Legend: B samples, P image positions, T tokens, H x W pixels, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice, pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import OptionError, check_name
from mmlab.model.packing import Keys, Segments, attend
from mmlab.types import PATCH


class NormalisesPixels(nn.Module):
    """The base of models that normalise their pixels; no checkpoint keeps the mean and the deviation."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def set_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and deviation of the three colours, of pixels in [0, 1]."""
        self.register_buffer("pixel_mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def normalised(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 as normalised floats."""
        return (pixels.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std


class ImageEncoder(nn.Module, ABC):
    """The interface of image encoders; each also has `dim`, the width of its features."""

    # mean and deviation of the pixels, in [0, 1], that it was made for; here those of ImageNet
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    @abstractmethod
    def levels(self, pixels: Tensor, pixel_mask: Tensor, *, num_levels: int) -> tuple[list[Tensor], Tensor]:
        """(B, 3, H, W) and (B, H, W) to features (B, P, D_l) at evenly spaced depths, and their mask (B, P)."""

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) and (B, H, W) to features (B, P, D) and mask (B, P)."""
        (features,), mask = self.levels(pixels, pixel_mask, num_levels=1)
        return features, mask


class ViT(ImageEncoder):
    """A pre-normalised vision transformer for any grid of 16 x 16 patches, attention masked to the real ones.

    Args:
        dim: width; a multiple of 4 x `num_heads`.
        depth: number of blocks.
        num_heads: attention heads.
        conv_stem: cut patches by four small convolutions instead of one large: learns faster on little data.

    Raises:
        OptionError: `num_heads` is below 1, or `dim` is no multiple of 4 x `num_heads`.

    Source: Dosovitskiy et al. 2021 (arXiv:2010.11929); sine-cosine positions in two dimensions as in Beyer et al.
    2022 (arXiv:2205.01580); convolutional stem after Xiao et al. 2021 (arXiv:2106.14881).
    """

    def __init__(self, *, dim: int, depth: int, num_heads: int, conv_stem: bool = False) -> None:
        super().__init__()
        if num_heads < 1 or dim % (4 * num_heads):
            raise OptionError(f"ViT width must be a multiple of 4 x num_heads = {4 * num_heads}, found {dim}")
        self.dim = dim
        self.embed = ConvStem(dim) if conv_stem else PatchEmbedding(dim)
        self.embed_norm = nn.LayerNorm(dim)  # without it the positions drown the content
        self.blocks = nn.ModuleList(SelfAttention(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.packed = False  # see mmlab.model.packing

    def level_dims(self, num_levels: int) -> list[int]:
        """Widths of the levels; a model of fewer blocks has fewer levels."""
        return [self.dim] * len(depths(len(self.blocks), num_levels))

    def levels(self, pixels: Tensor, pixel_mask: Tensor, *, num_levels: int) -> tuple[list[Tensor], Tensor]:
        """See `ImageEncoder`; the last level is normalised."""
        features, mask = self._embedded(pixels, pixel_mask)
        segments = Segments(mask) if self.packed else None
        keys: Keys = _attended(mask)
        if segments is not None:
            features, keys = segments.pack(features), (segments, segments)
        levels = []
        for start, stop in pairwise([0, *depths(len(self.blocks), num_levels)]):
            features = self._through(features, keys, start, stop)
            levels.append(features)
        levels[-1] = self.norm(features)
        return levels if segments is None else [segments.unpack(level) for level in levels], mask

    def begin(self, pixels: Tensor, pixel_mask: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
        """The first `num_blocks` blocks of `forward`: features (B, P, D) and mask (B, P), not packed."""
        features, mask = self._embedded(pixels, pixel_mask)
        return self._through(features, _attended(mask), 0, num_blocks), mask

    def finish(self, features: Tensor, mask: Tensor, *, num_blocks: int) -> Tensor:
        """The rest of `forward` after the first `num_blocks` blocks, (B, P, D)."""
        return self.norm(self._through(features, _attended(mask), num_blocks, len(self.blocks)))

    def _embedded(self, pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
        pixels, pixel_mask = fill_grid(pixels, pixel_mask)
        grid = self.embed(pixels, pixel_mask)  # (B, D, H / 16, W / 16)
        mask = pixel_mask[:, ::PATCH, ::PATCH].flatten(1)  # (B, P)
        positions = _positions(grid.shape[2], grid.shape[3], self.dim, grid.device)
        features = self.embed_norm(rearrange(grid, "b d h w -> b (h w) d")) + positions.to(grid.dtype)
        return features, mask

    def _through(self, features: Tensor, keys: Keys, start: int, stop: int) -> Tensor:
        for block in islice(self.blocks, start, stop):
            features = block(features, keys)
        return features


def _attended(mask: Tensor) -> Tensor:
    """(B, P) to (B, 1, 1, P): the keys of attention. A missing image has its padding as keys, which avoids NaN."""
    return (mask | ~mask.any(1, keepdim=True))[:, None, None, :]


class PatchEmbedding(nn.Module):
    """One linear map of every 16 x 16 patch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, dim, PATCH, PATCH)

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D, H / 16, W / 16)."""
        return self.conv(pixels)


class ConvStem(nn.Module):
    """Four 3 x 3 convolutions of stride 2. After each, padding is set to zero again, as if the image ended there."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        widths = [3, dim // 8, dim // 4, dim // 2, dim]
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in pairwise(widths))

    def forward(self, pixels: Tensor, pixel_mask: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, D, H / 16, W / 16)."""
        grid, mask = pixels, pixel_mask[:, None]
        for conv in self.convs:
            mask = mask[:, :, ::2, ::2]
            grid = F.gelu(conv(grid)) * mask
        return grid


class SelfAttention(nn.Module):
    """One pre-normalised transformer block."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, features: Tensor, keys: Keys) -> Tensor:
        """(B, P, D), attending where `keys` (B, 1, 1, P) is True, or inside the segments of a stream."""
        joined = self.query_key_value(self.norm(features))
        query, key, value = rearrange(joined, "b p (three h d) -> three b h p d", three=3, h=self.num_heads)
        attended = attend(query, key, value, keys)
        features = features + self.out(rearrange(attended, "b h p d -> b p (h d)"))
        return features + self.mlp(self.mlp_norm(features))


class ResNet(ImageEncoder):
    """A torchvision ResNet up to its last feature grid (stride 32), masked between the stages.

    Batch normalisation makes a sample's features depend on its batch in training.

    Args:
        name: "resnet18", "resnet50" or any other ResNet of torchvision.
        weights: torchvision's name of pretrained weights; None for random ones.

    Raises:
        OptionError: torchvision has no ResNet of that name.
    """

    def __init__(self, name: str = "resnet50", *, weights: str | None = None) -> None:
        super().__init__()
        from torchvision import models

        known = models.list_models(include=["resnet*", "resnext*", "wide_resnet*"])
        check_name("torchvision ResNet", name, known)
        net = models.get_model(name, weights=weights)
        self.dim = net.fc.in_features
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.stages = nn.ModuleList([net.layer1, net.layer2, net.layer3, net.layer4])

    def level_dims(self, num_levels: int) -> list[int]:
        """Widths of the last stages, four at most."""
        return [self.dim // 8, self.dim // 4, self.dim // 2, self.dim][-num_levels:]

    def levels(self, pixels: Tensor, pixel_mask: Tensor, *, num_levels: int) -> tuple[list[Tensor], Tensor]:
        """See `ImageEncoder`; earlier stages are averaged over the cells of the last stage's grid."""
        pixels, pixel_mask = fill_grid(pixels, pixel_mask)
        mask = pixel_mask[:, None, ::4, ::4]
        grid = self.stem(pixels) * mask
        found = []
        for number, stage in enumerate(self.stages):
            mask = mask if number == 0 else mask[:, :, ::2, ::2]
            grid = stage(grid) * mask
            if number >= len(self.stages) - num_levels:
                found.append((grid, mask))
        lower = [_coarser(*level, 2**number) for number, level in enumerate(found[-2::-1], start=1)]
        kept = [rearrange(grid, "b d h w -> b (h w) d") for grid in [*reversed(lower), grid]]
        return kept, mask.flatten(1)


def depths(depth: int, num_levels: int) -> list[int]:
    """After how many of `depth` layers each level is taken.

    >>> depths(12, 3), depths(2, 3)
    ([4, 8, 12], [1, 2])
    """
    return sorted({-(-depth * level // num_levels) for level in range(1, num_levels + 1)})


def _coarser(grid: Tensor, mask: Tensor, factor: int) -> Tensor:
    """Mean of the real positions in each cell of `factor` x `factor`; the grid is zero outside its mask."""
    share = F.avg_pool2d(mask.to(grid.dtype), factor, ceil_mode=True)
    return F.avg_pool2d(grid, factor, ceil_mode=True) / share.clamp(min=1 / factor**2)


def fill_grid(pixels: Tensor, pixel_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Zero outside the mask, and pad bottom and right to whole patches, at least one."""
    below, right = (-side % PATCH if side else PATCH for side in pixels.shape[-2:])
    missing = (0, right, 0, below)
    return F.pad(pixels * pixel_mask[:, None], missing), F.pad(pixel_mask, missing)


def _positions(rows: int, columns: int, dim: int, device: torch.device) -> Tensor:
    """Sine and cosine of row and column, (rows x columns, dim)."""
    frequencies = 10_000.0 ** -(torch.arange(dim // 4, device=device) / (dim // 4))

    def waves(count: int) -> Tensor:  # (count, dim / 2)
        angles = torch.arange(count, device=device)[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    by_row = waves(rows)[:, None].expand(-1, columns, -1)
    by_column = waves(columns)[None].expand(rows, -1, -1)
    return torch.cat([by_row, by_column], dim=2).flatten(0, 1)
