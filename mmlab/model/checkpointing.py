"""Activation checkpointing: less memory for more computation.

A checkpointed block keeps only its inputs and computes its activations again in the backward pass. A Hugging Face
model draws the same random numbers again, so that the gradient is the same. Memory falls from all activations to one
block's activations and every block's inputs; a step takes about a third longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmlab.errors import OptionError
from mmlab.model.encoders import ResNet, SelfAttention
from mmlab.model.fusion import CrossAttention


def enable_checkpointing(model: nn.Module) -> nn.Module:
    """Turn checkpointing on for every transformer block and ResNet stage, and every Hugging Face model within.

    >>> from mmlab.model import build_model
    >>> model = enable_checkpointing(build_model("tiny", vocab_size=100))

    Args:
        model: changed in place.

    Returns:
        The model.

    Raises:
        OptionError: the model has nothing that can be checkpointed.
    """
    blocks = _blocks(model)
    others = [item for item in model.modules() if getattr(item, "supports_gradient_checkpointing", False)]
    for block in blocks:
        if not isinstance(block.forward, _Checkpointed):
            block.forward = _Checkpointed(block)
    for other in others:
        # the method's name since transformers 5, or before
        prefix = "activation" if hasattr(other, "activation_checkpointing_enable") else "gradient"
        getattr(other, f"{prefix}_checkpointing_enable")({"use_reentrant": False})
    if not blocks and not others:
        raise OptionError(
            f"{type(model).__name__} has no block that can be checkpointed: mmlab's own encoders and fusion can, and "
            "Hugging Face models with gradient checkpointing"
        )
    return model


def has_checkpointed_batch_norm(model: nn.Module) -> bool:
    """Whether a checkpointed block has running statistics, which recomputation must not change."""
    return any(isinstance(block.forward, _Checkpointed) and counting_norms(block) for block in _blocks(model))


class _Checkpointed:
    """Replaces a block's `forward`; changes nothing in evaluation and without gradients."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *inputs: Any) -> Any:
        forward = type(self.block).forward
        if not self.block.training:
            return forward(self.block, *inputs)
        # compiled code updates statistics outside of what it recomputes, and takes contexts of another kind
        options: dict[str, Any] = {"preserve_rng_state": False}  # these blocks draw no random numbers
        if not torch.compiler.is_compiling():
            options["context_fn"] = lambda: (nullcontext(), _keeping_statistics(self.block))
        return checkpoint(forward, self.block, *inputs, use_reentrant=False, **options)


@contextmanager
def _keeping_statistics(block: nn.Module) -> Iterator[None]:
    """Keep running statistics as they are, so that batch normalisation counts a batch only once."""
    kept = [(norm, *named) for norm in counting_norms(block) for named in norm.named_buffers(recurse=False)]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


def counting_norms(block: nn.Module) -> list[nn.Module]:
    """The batch normalisation layers that update running statistics in training."""
    return [module for module in block.modules() if getattr(module, "track_running_stats", False)]


def _blocks(model: nn.Module) -> list[Any]:
    modules = list(model.modules())
    stages = [stage for module in modules if isinstance(module, ResNet) for stage in module.stages]
    return [module for module in modules if isinstance(module, SelfAttention | CrossAttention)] + stages
