"""Models by name, for pricing: on the meta device, without weights, or with newly initialised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmlab.errors import OptionError, loading_by_name
from mmlab.model.conversation_model import ConversationModel, named_vlm
from mmlab.model.huggingface import LossModel
from mmlab.model.presets import PRESETS, build_model


def named_model(name: str, *, vocab_size: int, tokenizer: Any = None, device: str = "meta") -> nn.Module:
    """A preset, or a transformers model from its configuration alone.

    Args:
        vocab_size: of a preset.
        device: "meta" makes no weights and takes no memory.
        tokenizer: of the data; its mask token is used to price a model that predicts hidden tokens.

    Raises:
        OptionError: neither a preset nor a configuration that transformers finds.
    """
    with torch.device(device):
        if name in PRESETS:
            return build_model(name, vocab_size=vocab_size)
        import transformers

        with loading_by_name(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a transformers model"):
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None or not issubclass(kind, nn.Module):
            raise OptionError(f"{name}'s configuration names no architecture that transformers has")
        return LossModel(kind(config), processor=tokenizer)


def conversation_model(name: str, *, device: str = "meta") -> ConversationModel:
    """A vision-language model of transformers from its configuration alone, see `named_model`."""
    with torch.device(device):
        return ConversationModel(named_vlm(name, weights=False))
