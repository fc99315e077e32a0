"""A hash that tells whether two models need the same memory."""

from __future__ import annotations

import hashlib

from torch import nn

from mmlab.model.huggingface import LossModel


def fingerprint(model: nn.Module) -> str:
    """A hash of what a model's memory depends on: modules, parameters, dropout, checkpointing. Not of its weights.

    >>> from mmlab.model import build_model
    >>> small = build_model("tiny", vocab_size=100)
    >>> fingerprint(small) == fingerprint(build_model("tiny", vocab_size=100))
    True
    >>> fingerprint(small) == fingerprint(build_model("tiny", vocab_size=100, dropout=0.1))
    False
    """
    if isinstance(model, LossModel):  # as the trainer wraps it
        model = model.module
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)
        }
        settings.pop("training", None)
        settings.pop("_output_capturing_hooks_installed", None)  # transformers sets it in the first step
        # set by Hugging Face models
        settings["gradient_checkpointing"] = getattr(module, "gradient_checkpointing", False)
        digest.update(f"{name} {type(module).__qualname__} {sorted(settings.items())}\n".encode())
        digest.update(f"{type(vars(module).get('forward')).__name__}\n".encode())
    first: dict[int, str] = {}
    weights, buffers = model.named_parameters, model.named_buffers
    for name, tensor in [*weights(remove_duplicate=False), *buffers(remove_duplicate=False)]:
        same = first.setdefault(id(tensor), name)  # tied weights exist once
        digest.update(f"{name} {same} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
    return digest.hexdigest()[:16]
