"""`ConversationModel`: a vision-language model on batches that its own processor made."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from mmlab.errors import MmlabError, OptionError, first_line, loading_by_name
from mmlab.model.huggingface import LossModel, without_peft
from mmlab.model.presets import PRESETS
from mmlab.types import IGNORED, Batch, HostColumns


class ConversationModel(LossModel):
    """Calls a model with a `ConversationBatch`'s inputs and gives its output; its loss is a mean over the answers' tokens.

    Args:
        module: of transformers; its forward takes what its processor makes, and `labels`.

    Raises:
        DataError: in forward: a conversation longer than the model's table of positions.
        OptionError: in forward: a batch that is no `ConversationBatch`, or one that the processor of another kind of
            model made.
    """

    module: Any
    accepted, labels, image_size = ("labels",), "batch", None

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.training = without_peft(module).training  # as in LossModel
        # a table of positions has an end, rotations have none
        has_table = any(name.endswith("embed_positions.weight") for name, _ in module.named_parameters())
        self.max_tokens = self.module.config.get_text_config().max_position_embeddings if has_table else None
        self.pack: Callable[[dict[str, Tensor]], dict[str, Any]] | None = None  # lays samples end to end

    @property
    def is_packed(self) -> bool:
        """Whether it removes the padding before it computes."""
        return self.pack is not None

    def num_terms(self, batch: Batch | HostColumns) -> Tensor | int:
        """How many tokens of answers the mean is over; nothing predicts the first of a sequence."""
        host = batch.host if isinstance(batch, Batch) else batch
        assert host.labels is not None
        return int((host.labels.ne(IGNORED) & host.attention_mask)[:, 1:].sum())

    def forward(self, batch: Any) -> Any:
        try:
            return super().forward(batch)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

            usual = PROCESSOR_MAPPING_NAMES.get(self.module.config.model_type)
            if usual is None or (isinstance(error, MmlabError | RuntimeError) and "shape" not in str(error)):
                raise
            made = type(batch.dataset.collator.processor).__name__
            if made == usual:
                raise
            problem = f"{type(self.module).__name__} cannot read what {made} makes; give it a {usual}"
            raise OptionError(f"{problem} ({first_line(error)})") from error

    def _arguments(self, batch: Any) -> dict[str, Any]:
        from transformers import BatchFeature

        if not hasattr(batch, "inputs"):
            raise OptionError(f"{type(self.module).__name__} takes batches of a ConversationDataset alone")
        is_apart = _is_encoder_decoder(self.module.config)
        if is_apart != (batch.input_ids.shape != batch.inputs["input_ids"].shape):
            raise OptionError(
                f"{type(self.module).__name__} is {'an' if is_apart else 'no'} encoder-decoder; set "
                f"processor.is_encoder_decoder = {is_apart}, then read the conversations again"
            )
        num_tokens = max(batch.inputs[name].shape[1] for name in ("input_ids", "labels"))
        self._refuse_longer(num_tokens, "shorten or leave out conversations that are longer")
        # processors make pixels in fp32, or in a precision of their own
        inputs = dict(BatchFeature(batch.inputs).to(self.module.dtype))
        return inputs if self.pack is None else self.pack(inputs)


def _is_encoder_decoder(config: Any) -> bool:
    """Whether it is an encoder-decoder; also true of a BLIP-2 whose language model is a T5."""
    return config.is_encoder_decoder or config.get_text_config().is_encoder_decoder


def refuse_preset(name: str, option: str) -> None:
    """Raise an `OptionError` where a fusion model is named instead of a vision-language model, before a hub is asked."""
    if name in PRESETS:
        raise OptionError(f"{option} {name!r} takes pairs; name the vision-language model")


def named_processor(name: str) -> Any:
    """The processor of a name or path.

    Raises:
        OptionError: transformers finds none.
    """
    from transformers import AutoConfig, AutoProcessor

    refuse_preset(name, "processor")
    with loading_by_name(f"{name!r} is no processor that transformers finds"):
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    # BLIP-2's class drops the template that was saved with it
    if os.path.exists(os.path.join(name, "chat_template.jinja")) and processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    with suppress(OSError, ValueError):  # the model's configuration, if it is there, says what kind it is
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        processor.is_encoder_decoder = _is_encoder_decoder(config)
    return processor


def named_vlm(name: str, *, weights: bool = True, lora_rank: int | None = None) -> nn.Module:
    """The vision-language model of a name or path.

    Args:
        weights: load them; otherwise only the configuration is read, and they are random.
        lora_rank: train adapters of this rank around every linear layer, and nothing else (Hu et al. 2021,
            arXiv:2106.09685; needs peft).

    Raises:
        OptionError: transformers finds none, what it finds has adapters already, or peft is not installed.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    refuse_preset(name, "model")
    # what is trained is kept in fp32, whatever the file has; frozen weights stay as they are
    options: Any = {"trust_remote_code": False} | ({"dtype": torch.float32} if lora_rank is None else {})
    if os.path.isdir(name):
        name = os.path.abspath(name)  # adapters are saved with the name of what they belong to
    with loading_by_name(f"{name!r} is no vision-language model that transformers has"):
        if weights:
            module = AutoModelForImageTextToText.from_pretrained(name, **options)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            module = AutoModelForImageTextToText.from_config(config, **options)
    if hasattr(module, "peft_config"):  # peft would put new adapters in their place
        raise OptionError(
            f"{name!r} holds adapters, which would not be trained on: merge_and_unload() them (peft), save that model and name it"
        )
    if lora_rank is None:
        return module
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise OptionError("lora_rank needs peft: pip install 'mmlab[lora]'") from error
    return get_peft_model(module, LoraConfig(r=lora_rank, target_modules="all-linear"))
