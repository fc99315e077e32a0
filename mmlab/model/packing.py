"""Packed execution: the samples of a batch end to end in one stream, so that no block computes padding.

A batch arrives padded (a few bytes per position); `Segments` takes the real positions out of it, the blocks
run on one stream of S positions with attention inside each sample only, and the features go back to their
rows. Same outputs and gradients as the padded model up to rounding. Attention is torch's variable-length
kernel where it exists (CUDA, 16 bits), else one call per sample, which equals a block-diagonal mask but does
not compute what that hides.

Costs one synchronisation with the device for each stream, to read the lengths. Does not pack convolutions (a ResNet, the
stem of "conv-vit"), and cannot be priced on a fake device, where there are no lengths.

Legend: B samples, L positions of the longest, S real positions of all, D width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import OptionError

ATTENTION_NAME = "mmlab_packed"  # under which transformers' models find `attend`


class Segments:
    """Where the samples of a packed stream lie.

    >>> segments = Segments(torch.tensor([[True, True, False], [True, False, False]]))
    >>> stream = segments.pack(torch.arange(6.0).view(2, 3, 1))
    >>> stream.flatten().tolist(), segments.unpack(stream).flatten().tolist()
    ([0.0, 1.0, 3.0], [0.0, 1.0, 0.0, 3.0, 0.0, 0.0])

    Args:
        mask: (B, L) bool, the real positions.
    """

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.lengths: list[int] = mask.sum(1).tolist()
        self.positions = mask.flatten().nonzero().squeeze(1)  # (S,) in the flattened batch
        self.ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)  # (B + 1,)

    @property
    def within(self) -> Tensor:
        """(1, S) number of each position in its row of the batch."""
        return (self.positions % self.shape[1])[None]

    def pack(self, features: Tensor) -> Tensor:
        """(B, L, D) to (1, S, D)."""
        return features.flatten(0, 1)[self.positions][None]

    def unpack(self, stream: Tensor) -> Tensor:
        """(1, S, D) to (B, L, D), zero where there was padding."""
        padded = stream.new_zeros(self.shape.numel(), stream.shape[-1])
        return padded.index_copy(0, self.positions, stream[0]).unflatten(0, self.shape)


Keys = Tensor | tuple[Segments, Segments]  # (B, 1, 1, P) True where attended to, or the segments of a stream


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Keys | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention of (B, H, P, D) over (B, H, T, D), each position to the keys of its own sample.

    Args:
        keys: a mask that broadcasts to (B, H, P, T), True where there is data; or, for streams (B = 1), the
            segments of queries and keys.
    """
    options: Any = {"dropout_p": dropout, "scale": scale}
    if not isinstance(keys, tuple):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keys, **options)
    of_query, of_key = keys
    if not query.shape[2]:
        # no sample has any of this modality: nothing to compute, and gradients are zero
        return query + 0 * (key.sum() + value.sum())
    # the cases that torch's variable-length kernel supports
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not dropout:
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        longest = (max(of_query.lengths), max(of_key.lengths))
        found: Any = varlen_attn(query, key, value, of_query.ends, of_key.ends, *longest, scale=scale)
        return found.transpose(0, 1)[None]
    of_each = (query, of_query), (key, of_key), (value, of_key)
    parts = zip(*[stream.split(segments.lengths, 2) for stream, segments in of_each], strict=True)
    attended = [F.scaled_dot_product_attention(*part, **options) for part in parts if part[0].shape[2]]
    return torch.cat(attended, dim=2)


def enable_packing(model: nn.Module) -> nn.Module:
    """Turn packed execution on in every part of a model that knows it; changes no weight.

    >>> from mmlab.model import build_model
    >>> model = enable_packing(build_model("small", vocab_size=100, image_depth=1, text_depth=1))

    Returns:
        The model.

    Raises:
        OptionError: an encoder that cannot be packed.
    """
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "packed")]
    names = ("image_encoder", "text_encoder")
    unable = [name for name in names if not hasattr(getattr(model, name, None), "packed")]
    if unable:
        kinds = ", ".join(f"{name} {type(getattr(model, name, None)).__name__}" for name in unable)
        raise OptionError(
            f"{type(model).__name__} cannot be packed: {kinds}; packing needs a ViT ('tiny', 'small', 'base') and a "
            "transformers text model with exchangeable attention"
        )
    for part in parts:
        part.packed = True
        if hasattr(getattr(part, "model", None), "set_attn_implementation"):
            _register()
            part.model.set_attn_implementation(ATTENTION_NAME)
    return model


def _register() -> None:
    """Make `attend` known to transformers' models; without segments it is SDPA."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        segments = options.pop("segments", None)
        if segments is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        dropout, scale = options.get("dropout", 0.0), options.get("scaling")
        attended = attend(query, key, value, (segments, segments), dropout=dropout, scale=scale)
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION_NAME, forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
