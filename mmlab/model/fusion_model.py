"""`FusionModel`: two encoders, an embedding of each modality, and a fusion that matches pairs and predicts tokens.

The embeddings come from the encoders alone, so retrieval over N pairs costs N forward passes; the fusion runs only
where a loss asks for it.

Legend: B samples, P image positions, T tokens, N pairs to match, D embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mmlab.errors import OptionError, check_name
from mmlab.model.encoders import ImageEncoder, NormalisesPixels, ViT
from mmlab.model.fusion import Pair, TokenHead, masked_mean
from mmlab.model.fusions import FUSIONS
from mmlab.types import Batch

# of a `FusionModel`, the modules of the image branch
IMAGE_MODULES = ("image_encoder", "image_head", "fusion.mix_images")
MAX_LOGIT_SCALE = 100.0  # Radford et al. 2021: beyond it training is unstable


Features = tuple[Tensor, Tensor, Tensor, Tensor]


class Encoded(NamedTuple):
    """What one branch, an encoder with its head, hands to the fusion and the objectives."""

    embedding: Tensor  # (B, D) of length one
    features: Tensor  # (B, P, C) or (B, T, C), as the fusion reads them
    mask: Tensor  # (B, P) or (B, T) bool


def rows_of(features: Tensor, rows: Tensor) -> Tensor:
    """`features[rows]`, where rows may repeat, with a gradient that is summed in one order on every device: that of
    indexing is not on a CPU, and that of `index_select` not on a GPU."""
    return F.embedding(rows, features.reshape(len(features), -1)).view(len(rows), *features.shape[1:])


@dataclass(slots=True)
class FusionOutput:
    """What the objectives read. Tensors of one or more dimensions have a row for each sample."""

    image_embedding: Tensor  # (B, D) of length one
    text_embedding: Tensor  # (B, D) of length one
    logit_scale: Tensor  # () inverse temperature
    features: Features  # image (B, P, C), its mask, text (B, T, C), its mask
    matcher: Callable[..., Tensor]  # features of N pairs -> logits (N,)
    # in which pairs are matched; each is recomputed in the backward pass, to save memory
    num_chunks: int = 1
    predictor: Callable[..., Tensor] | None = None  # see `token_losses`

    def match(self, image_rows: Tensor, text_rows: Tensor) -> Tensor:
        """Logits (N,) that image rows (N,) and text rows (N,) belong together."""
        image, image_mask, text, text_mask = self.features

        def logits(image_rows: Tensor, text_rows: Tensor) -> Tensor:
            images, texts = rows_of(image, image_rows), rows_of(text, text_rows)
            return self.matcher(images, image_mask[image_rows], texts, text_mask[text_rows])

        return self._in_chunks(logits, image_rows, text_rows)

    def token_losses(
        self, masked_ids: Tensor, attention_mask: Tensor, positions: Tensor, targets: Tensor
    ) -> Tensor:
        """Cross-entropies (B, K), in nats, of the tokens that stood at hidden positions.

        Args:
            masked_ids: (B, T), the batch's texts with something else at the hidden positions.
            attention_mask: (B, T)
            positions: (B, K) where tokens are hidden; anything in [0, T) for those whose loss is not wanted.
            targets: (B, K) the tokens.

        Raises:
            OptionError: the text encoder has no `embedding`.
        """
        if self.predictor is None:
            raise OptionError("the text encoder has no `embedding` (V, E), which hidden tokens need")
        image = self.features[:2]  # and its mask
        return self._in_chunks(self.predictor, *image, masked_ids, attention_mask, positions, targets)

    def _in_chunks(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if self.num_chunks == 1:
            return compute(*tensors)
        chunks = zip(*(tensor.chunk(self.num_chunks) for tensor in tensors), strict=True)
        return torch.cat([checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks])


class FusionModel(NormalisesPixels):
    """Encoders, embeddings and fusion.

    Args:
        image_encoder: (pixels, pixel mask) -> (features (B, P, C), mask (B, P)); has `dim`, and `normalisation` if its
            pixels are not normalised as ImageNet's.
        text_encoder: (input ids, attention mask) -> features (B, T, C); has `dim`.
        embed_dim: width of the embeddings.
        fusion: a name in `mmlab.model.FUSIONS`.
        hidden_dim, num_heads, num_layers: of the fusion.
        num_levels: depths of each encoder that "multiscale" reads; the encoders need `levels` and `level_dims`.

    Raises:
        OptionError: an unknown fusion, sizes that do not divide, fewer than two levels for "multiscale", or a
            convolutional image encoder of transformers with it.
    """

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        *,
        embed_dim: int = 512,
        fusion: str = "cross",
        hidden_dim: int = 512,
        num_heads: int = 8,
        num_layers: int = 1,
        num_levels: int = 3,
    ) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        check_name("fusion", fusion, FUSIONS)
        if fusion == "multiscale" and num_levels < 2:
            raise OptionError(f"multiscale fusion needs num_levels of at least 2, found {num_levels}")
        self.num_levels = num_levels if fusion == "multiscale" else 1
        encoders = (image_encoder, text_encoder)
        dims = [item.level_dims(num_levels) if fusion == "multiscale" else item.dim for item in encoders]
        sizes = {"hidden_dim": hidden_dim, "num_heads": num_heads, "num_layers": num_layers}
        self.fusion: Any = FUSIONS[fusion](*dims, **sizes)
        self.image_head = nn.Linear(image_encoder.dim, embed_dim)
        self.text_head = nn.Linear(text_encoder.dim, embed_dim)
        self.match_head = nn.Linear(hidden_dim, 1)
        embedding = getattr(text_encoder, "embedding", None)
        self.token_head: Any = (
            None if embedding is None else TokenHead(text_encoder.dim, hidden_dim, num_heads, embedding)
        )
        self.log_logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.set_normalisation(*getattr(image_encoder, "normalisation", ImageEncoder.normalisation))

    @property
    def is_packed(self) -> bool:
        """Whether both encoders run without padding, see `mmlab.model.packing`."""
        return all(getattr(encoder, "packed", False) for encoder in (self.image_encoder, self.text_encoder))

    @property
    def num_words(self) -> int | None:
        """Number of token ids that the text encoder knows; None if it has no `embedding`."""
        embedding = getattr(self.text_encoder, "embedding", None)
        return None if embedding is None else len(embedding)

    def forward(self, batch: Batch) -> FusionOutput:
        """Encode a batch; a missing image or text gets a finite embedding that means nothing."""
        image = self.encode_image(batch.pixel_values, batch.pixel_mask)
        return self.join(image, self.encode_text(batch.input_ids, batch.attention_mask))

    def encode_image(self, pixel_values: Tensor, pixel_mask: Tensor) -> Encoded:
        """The image branch alone: pixels (B, 3, H, W) uint8 and their mask (B, H, W)."""
        pixels = self.normalised(pixel_values)
        if self.num_levels == 1:
            features, mask = self.image_encoder(pixels, pixel_mask)
            fusable = features
        else:
            levels, mask = self.image_encoder.levels(pixels, pixel_mask, num_levels=self.num_levels)
            features, fusable = levels[-1], self.fusion.mix_images(levels)
        return Encoded(self._embed_image(features, mask), fusable, mask)

    def begin_image(self, pixel_values: Tensor, pixel_mask: Tensor, *, num_blocks: int) -> Pair:
        """The image branch up to and including block `num_blocks` of its encoder; `finish_image` does the rest, on any
        device. `why_not_cut` says whether the branch can be cut.

        Returns:
            Features (B, P, C) and their mask (B, P).
        """
        return self.image_encoder.begin(self.normalised(pixel_values), pixel_mask, num_blocks=num_blocks)

    def finish_image(self, features: Tensor, mask: Tensor, *, num_blocks: int) -> Encoded:
        """The rest of the image branch: `begin_image` and this give what `encode_image` gives."""
        features = self.image_encoder.finish(features, mask, num_blocks=num_blocks)
        return Encoded(self._embed_image(features, mask), features, mask)

    def why_not_cut(self, num_blocks: int) -> str:
        """Why the image branch cannot be cut after so many blocks, with some on either side; empty if it can."""
        encoder, why = self.image_encoder, ""
        if not isinstance(encoder, ViT):
            why = f"{type(encoder).__name__} cannot be cut between two blocks, only the built-in vit can"
        elif encoder.packed:
            why = "its samples are packed into one stream"
        elif self.num_levels > 1:
            why = "multiscale fusion takes features of all depths in one place"
        elif not 1 <= num_blocks < len(encoder.blocks):
            why = f"it has {len(encoder.blocks)} blocks, so 1 to {len(encoder.blocks) - 1} of them"
        return why and f"the image branch cannot be cut after block {num_blocks}: {why}"

    def _embed_image(self, features: Tensor, mask: Tensor) -> Tensor:
        return F.normalize(self.image_head(masked_mean(features, mask)), dim=1)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Encoded:
        """The text branch alone: tokens (B, T) and their mask (B, T)."""
        features, fusable = self._encode_texts(input_ids, attention_mask)
        embedding = F.normalize(self.text_head(masked_mean(features, attention_mask)), dim=1)
        return Encoded(embedding, fusable, attention_mask)

    def join(self, image: Encoded, text: Encoded) -> FusionOutput:
        """What the objectives read, from both branches."""
        return FusionOutput(
            image_embedding=image.embedding,
            text_embedding=text.embedding,
            logit_scale=self.log_logit_scale.exp().clamp(max=MAX_LOGIT_SCALE),
            features=(image.features, image.mask, text.features, text.mask),
            matcher=self._match,
            predictor=self._token_losses if self.token_head else None,
        )

    def _encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, T, C), and those that the fusion reads."""
        if self.num_levels == 1:
            features = self.text_encoder(input_ids, attention_mask)
            return features, features
        levels = self.text_encoder.levels(input_ids, attention_mask, num_levels=self.num_levels)
        return levels[-1], self.fusion.mix_texts(levels)

    def _match(self, image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        return self.match_head(masked_mean(*self.fusion.fuse(image, image_mask, text, text_mask))).squeeze(1)

    def _token_losses(
        self,
        image: Tensor,
        image_mask: Tensor,
        masked_ids: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        targets: Tensor,
    ) -> Tensor:
        text, fusable = self._encode_texts(masked_ids, attention_mask)
        fused, fused_mask = self.fusion.fuse(image, image_mask, fusable, attention_mask)
        asked = text.gather(1, positions[..., None].expand(-1, -1, text.shape[2]))
        logits = self.token_head(asked, fused, fused_mask, self.text_encoder.embedding).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
