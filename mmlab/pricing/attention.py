"""Fused attention on a CUDA device that is not there.

torch asks the GPU which attention kernels it supports; without a GPU it takes the slow path, whose memory
grows with the square of the length. `cuda_attention` makes that choice in torch's place and calls the fused
kernels, for which fake mode knows the shapes of the results. They save query, key, value, output and one
number for each query and head.

The rules are those of a GPU of compute capability 8.0 or later: flash attention for 16 bits without a mask,
memory-efficient attention otherwise, with the mask as a bias padded to a multiple of 8 columns. cuDNN's
attention, which torch prefers on some GPUs, saves the same tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.pricing.torch_internals import efficient_attention, flash_attention, math_attention

_HALVES = (torch.float16, torch.bfloat16)
_ALIGNMENT = 8  # columns of a bias that the memory-efficient kernel reads at once


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` on CUDA tensors, by the kernel that torch would choose on a GPU."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    dim, is_usual = query.shape[-1], query.dim() == 4 and 0 not in (*query.shape, *key.shape)
    if is_usual and query.dtype in _HALVES and bias is None and dim == value.shape[-1] and dim <= 256:
        scale = dim**-0.5 if scale is None else scale
        padded = [F.pad(tensor, (0, -dim % 8)) if dim % 8 else tensor for tensor in (query, key, value)]
        return flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :dim]
    step = 8 if query.dtype in _HALVES else 4
    if not is_usual or dim % step or value.shape[-1] % step:
        return math_attention(query, key, value, bias, dropout_p, is_causal, None, scale=scale)[0]
    if bias is not None:
        # torch makes no copy if there is nothing to pad; the bytes that stay are the same, and this way the
        # order of operations does not depend on the shape
        columns = bias.shape[-1]
        bias = F.pad(bias, (0, -columns % _ALIGNMENT)).narrow(-1, 0, columns)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return efficient_attention(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]
