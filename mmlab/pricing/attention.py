"""Fused attention on a CUDA device that is not there.

torch asks the GPU which attention kernels it has; without one it takes the slow path, whose memory grows with the
square of the length. `cuda_attention` takes torch's place in that choice and calls the fused kernels, which are known
in fake mode by their shapes. They keep query, key, value, output and one number a query and head.

The rules are those of a GPU of compute capability 8.0 or later: flash attention for 16 bits without a mask, memory-
efficient attention otherwise, with the mask as a bias padded to 16 columns. cuDNN's attention, which torch prefers on
some GPUs, keeps the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmlab.errors import OptionError, unknown_name

ATTENTIONS = ("auto", "flash", "efficient", "math")

_aten = torch.ops.aten
_ALIGNMENT = 16  # columns of a bias that the memory-efficient kernel reads at once


@contextmanager
def cuda_attention(attention: str = "auto") -> Iterator[None]:
    """Within it `scaled_dot_product_attention` on CUDA tensors calls the kernel that a GPU would take.

    Raises:
        OptionError: no such attention.
    """
    if attention not in ATTENTIONS:
        raise unknown_name("attention", attention, ATTENTIONS)

    def attend(
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
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        kernel = _kernel(query, key, value, attn_mask) if attention == "auto" else attention
        if kernel == "flash":
            return _flash(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if kernel == "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _aten._scaled_dot_product_attention_math(
            query, key, value, _bias(attn_mask, query), dropout_p, is_causal, None, scale=scale
        )[0]

    # at the dispatcher, below autocast: a patched function would miss whoever imported it by name
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
        yield
    finally:
        library._destroy()


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    halves = query.dtype in (torch.float16, torch.bfloat16)
    same_dim = query.shape[-1] == value.shape[-1]
    if query.dim() != 4 or 0 in (*query.shape, *key.shape):
        return "math"
    if halves and mask is None and same_dim and query.shape[-1] <= 256:
        return "flash"
    step = 8 if halves else 4
    return "math" if query.shape[-1] % step or value.shape[-1] % step else "efficient"


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
        raise OptionError(
            f"flash attention takes 16-bit tensors without a mask, found {query.dtype} "
            f"{'with' if mask is not None else 'without'} a mask; use attention='auto'"
        )
    dim = query.shape[-1]
    scale = dim**-0.5 if scale is None else scale
    padded = [F.pad(tensor, (0, -dim % 8)) if dim % 8 else tensor for tensor in (query, key, value)]
    out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :dim]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    bias = _bias(mask, query)
    if bias is not None:
        columns = bias.shape[-1]
        # torch makes no copy where nothing is to be padded; the bytes that stay are the same, and this way the order of
        # operations does not depend on the shape
        bias = F.pad(bias, (0, -columns % _ALIGNMENT)).narrow(-1, 0, columns)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    learns = any(tensor.requires_grad for tensor in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, learns and torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: Any, query: Tensor) -> Any:
    """A mask as numbers to add to the scores: minus infinity where it is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
