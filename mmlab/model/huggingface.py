"""`LossModel`: any module whose forward returns a loss trains on mmlab's batches.

It calls the module with the arguments that its forward names, out of `input_ids`, `attention_mask`, `pixel_values`,
`pixel_mask`, `labels`, `return_loss`, `interpolate_pos_encoding` and `batch`, and makes only those. Pixels become
floats, normalised, padded to whole patches. Pre-training on hidden patches also has `bool_masked_pos`.

The module computes its own mean, so gradient accumulation is exact only for a loss that is a mean over samples or over
label tokens. CLIP's loss depends on the whole batch, and takes two
captions of one image for a wrong pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import DataError, OptionError, check_is, check_name, check_numbers, first_line
from mmlab.model.encoders import NormalisesPixels
from mmlab.model.masking import can_hide, draw_hidden, num_hidden
from mmlab.types import IGNORED, Batch, HostColumns

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
OFFERED = ("input_ids", "attention_mask", "pixel_values", "pixel_mask", "labels", "batch")
_ALSO = ("return_loss", "interpolate_pos_encoding")
_OF_PATCHES = "spatial_shapes"  # optional, but not of images that are cut into patches beforehand, as SigLIP 2's NaFlex takes
_PATCH_RATIO = 0.4  # of an image's patches are hidden, as in BEiT (Bao et al. 2022, arXiv:2106.08254)


class Loss(NamedTuple):
    """The output of a module that gives its loss alone, or in a dict."""

    loss: Tensor


def accept_batches(model: nn.Module) -> nn.Module:
    """The model where its forward's first argument is `batch`, else a `LossModel` of it.

    Raises:
        OptionError: it is no module, such as a name, or takes none of a batch's tensors.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module, as build_model makes of a preset")
    return model if [*forward_parameters(model)][:1] == ["batch"] else LossModel(model)


class LossModel(NormalisesPixels):
    """Calls a module with the arguments it takes and returns its output, which has `.loss`.

    Args:
        module: its forward returns a mean loss: as a tensor, as `.loss`, or under the key "loss".
        labels: "batch" for `Batch.labels`; "text" for the input ids with padding left out (captioning, language
            modelling); "masked" for predicting hidden tokens. None chooses "text" for a model that can
            generate, "masked" for a `transformers` model for masked language modelling, and
            "batch" for any other.
        processor: the model's own, as `AutoProcessor.from_pretrained` gives it (for an image model that is an image
            processor), or a tokenizer: its mean and deviation of pixels and its mask token are used; without an
            image processor, CLIP's mean and deviation. `MultimodalDataset(processor=...)` takes the rest.
        mask_ratio: share of a text's tokens that "masked" hides, 0 to 1, at least one token. In evaluation the same ones
            are hidden every time. Of an image, 40 % of the patches are hidden, one by one, for a model that takes `bool_masked_pos`.

    Raises:
        OptionError: forward takes none of a batch's tensors, or requires something else; hidden tokens without a mask
            token; unknown `labels`, or a `mask_ratio` out of range; a model that reads an image as tokens in the
            text, such as LLaVA.
    """

    def __init__(
        self, module: nn.Module, *, labels: str | None = None, processor: Any = None, mask_ratio: float = 0.15
    ) -> None:
        super().__init__()
        check_numbers({"mask_ratio": mask_ratio})
        self.module, self.mask_ratio = module, mask_ratio
        # from_pretrained gives a model in evaluation mode; the first step then puts all of it into training mode. Wrappers
        # and adapters of peft are in training mode, whatever the model inside them is in.
        self.training = without_peft(module).training
        config = getattr(module, "config", None)
        tokens = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
        if "pixel_values" in forward_parameters(module) and any(token is not None for token in tokens):
            raise OptionError(
                f"{type(module).__name__} reads an image as tokens in the text, which these batches do not have; give its "
                "processor and conversations: --processor, or a ConversationModel and a ConversationDataset "
                "(docs/guide/models.md)"
            )
        self.accepted = tuple(_check_signature(module))
        self.labels = _usual_labels(module) if labels is None else labels
        check_name("kind of labels", self.labels, ("batch", "text", "masked"))
        self.shifts_labels = self.labels == "text" and not getattr(config, "is_encoder_decoder", False)
        tokenizer = getattr(processor, "tokenizer", processor)
        self.mask_id: Any = getattr(tokenizer, "mask_token_id", None)
        self.special_ids = tuple(sorted(getattr(tokenizer, "all_special_ids", ())))
        if self.labels == "masked" and self.mask_id is None:
            raise OptionError(
                f"{type(module).__name__} predicts hidden tokens and needs the tokenizer's mask token: "
                "LossModel(module, processor=...) with a processor or tokenizer that has one, or labels='text'"
            )
        self.normalisation = normalisation_of(getattr(processor, "image_processor", processor))
        self.set_normalisation(*self.normalisation)
        image_config = _first(config, "vision_config", "image_config", "encoder")
        self.image_size = _pair(getattr(image_config, "image_size", None))
        self.patch = _pair(getattr(image_config, "patch_size", None)) or (1, 1)
        reads_text = "input_ids" in self.accepted or self.labels == "text"
        text_config = _first(config, "text_config", "decoder") if reads_text else None
        self.max_tokens: Any = getattr(text_config, "max_position_embeddings", None)
        self.num_words = getattr(text_config, "vocab_size", None)  # token ids that it knows
        # SigLIP reads the last position, of texts that are all padded to one length; it does not mask the padding
        self._is_siglip = getattr(text_config, "model_type", None) == "siglip_text_model"
        self._pad_id: Any = getattr(tokenizer, "pad_token_id", getattr(text_config, "pad_token_id", None))
        encoder = getattr(module, "encoder", None)
        takes = forward_parameters(encoder) if isinstance(encoder, nn.Module) else ()
        self._interpolates = "interpolate_pos_encoding" in takes

    @property
    def compares_samples(self) -> bool:
        """Whether the loss compares the samples of a batch with each other, as CLIP's does."""
        return self.logit_scale is not None

    @property
    def logit_scale(self) -> Tensor | None:
        """() inverse temperature of a model such as CLIP; None of one that has none."""
        logarithm = getattr(getattr(self.module, "base_model", self.module), "logit_scale", None)
        return None if logarithm is None else logarithm.exp()

    def num_terms(self, batch: Batch | HostColumns) -> Tensor | int:
        """How many samples or label tokens the module's mean is over."""
        if "labels" not in self.accepted:
            return len(batch)
        if self.labels == "masked":
            return num_hidden(can_hide(batch, self.special_ids), self.mask_ratio).sum()
        labels = _text_labels(batch) if self.labels == "text" else batch.labels
        if labels is None:
            return len(batch)
        return (labels[:, 1:] if self.shifts_labels else labels).ne(IGNORED).sum()

    def forward(self, batch: Batch) -> Any:
        """The module's own output.

        Raises:
            DataError: the module gave no loss, or a text is too long for it.
            OptionError: the module takes images of one size, and these have another.
        """
        values, name = self._arguments(batch), type(self.module).__name__
        try:
            output = self.module(**values)
        except (ValueError, RuntimeError) as error:
            size = tuple(batch.pixel_values.shape[-2:])
            if isinstance(error, torch.OutOfMemoryError) or self.image_size in (None, size):
                raise
            if "pixel_values" not in values or "interpolate_pos_encoding" in values or "pixel_mask" in values:
                raise
            height, width = self.image_size
            raise OptionError(
                f"{name} takes images of {height} x {width} pixels, the batch has {size[0]} x "
                f"{size[1]} ({first_line(error)}); use the image policy square:{height}"
            ) from error
        if isinstance(output, Tensor):
            output = Loss(output)
        elif isinstance(output, dict) and not hasattr(output, "loss") and "loss" in output:
            output = Loss(output["loss"])
        loss = getattr(output, "loss", None)
        if loss is None:
            has_labels = self.labels != "batch" or batch.labels is not None
            had = [each for each in OFFERED if each != "labels" or has_labels]
            returned = ", ".join(output) if isinstance(output, dict) else type(output).__name__
            raise DataError(
                f"{name} returned no loss but {returned}; it takes {', '.join(self.accepted)}, the batch has {', '.join(had)}"
            )
        if loss.numel() != 1:
            raise DataError(f"{name} returned a loss of shape {tuple(loss.shape)}; expected one mean")
        return output

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        """The arguments that forward takes, by name."""
        self._refuse_longer(batch.input_ids.shape[1], f"use MultimodalDataset(max_tokens={self.max_tokens})")
        input_ids, labels = batch.input_ids, batch.labels
        if self.labels == "masked" and "labels" in self.accepted:
            input_ids, labels = self._hide(batch)
        elif "labels" in self.accepted and self.labels == "text":
            labels = _text_labels(batch)
        makers: dict[str, Callable[[], Any]] = {
            "batch": lambda: batch,
            "input_ids": lambda: input_ids,
            "attention_mask": lambda: batch.attention_mask.long(),
            "pixel_values": lambda: self._pixels(batch),
            "pixel_mask": lambda: self._whole_patches(batch.pixel_mask).long(),
            "labels": lambda: labels,
            "bool_masked_pos": lambda: self._hidden_patches(batch),
            **dict.fromkeys(_ALSO, lambda: True),
        }
        if self._is_siglip:
            input_ids = input_ids.masked_fill(~batch.attention_mask, self._pad_id)
            input_ids = F.pad(input_ids, (0, self.max_tokens - input_ids.shape[1]), value=self._pad_id)
        # an image model's `attention_mask` is not the text's
        if "input_ids" not in self.accepted or self._is_siglip:
            del makers["attention_mask"]
        values = {name: makers[name]() for name in self.accepted if name in makers}
        return values | {"interpolate_pos_encoding": True} if self._interpolates else values

    def _refuse_longer(self, num_tokens: int, told: str) -> None:
        """Refuse a text for which the model has no positions; on a GPU it would end the process."""
        if self.max_tokens and num_tokens > self.max_tokens:
            name = type(self.module).__name__
            raise DataError(f"a text has {num_tokens} tokens, {name} takes {self.max_tokens}; {told}")

    def _pixels(self, batch: Batch) -> Tensor:
        """(B, 3, H, W) normalised, zero outside the images."""
        return self._whole_patches(self.normalised(batch.pixel_values) * batch.pixel_mask[:, None])

    def _whole_patches(self, pixels: Tensor) -> Tensor:
        rows, columns = (-side % patch for side, patch in zip(pixels.shape[-2:], self.patch, strict=True))
        return F.pad(pixels, (0, columns, 0, rows)) if rows or columns else pixels

    def _hidden_patches(self, batch: Batch) -> Tensor:
        """(B, P) bool."""
        height, width = self.patch
        there = self._whole_patches(batch.pixel_mask)[:, ::height, ::width].flatten(1)
        return draw_hidden(there, _PATCH_RATIO, self._generator(batch))[2]

    def _generator(self, batch: Batch) -> torch.Generator | None:
        """None in training; else one that draws the same every time."""
        return None if self.training else torch.Generator(batch.input_ids.device).manual_seed(0)

    def _hide(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Ids with the mask token at the hidden positions, and labels for those alone."""
        _, _, hidden = draw_hidden(can_hide(batch, self.special_ids), self.mask_ratio, self._generator(batch))
        ids = batch.input_ids
        return ids.masked_fill(hidden, self.mask_id), ids.masked_fill(~hidden, IGNORED)


def _check_signature(module: nn.Module) -> list[str]:
    """Names that forward takes.

    Raises:
        OptionError: no tensor of a batch among them, or a required one that a batch does not have.
    """
    parameters = forward_parameters(module)
    name, takes = type(module).__name__, ", ".join(parameters)
    if not {"input_ids", "pixel_values", "batch"} & set(parameters):
        raise OptionError(
            f"{name}.forward takes {takes}; expected input_ids or pixel_values, or one argument named batch"
        )
    own = inspect.signature(module.forward).parameters
    if "input_ids" in own and "pixel_values" in parameters.keys() - own:
        raise OptionError(
            f"{name} is peft's wrapper of a model of texts; leave task_type out of the LoraConfig"
        )
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.name not in OFFERED + _ALSO
        and (parameter.default is parameter.empty or parameter.name == _OF_PATCHES)
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise OptionError(
            f"{name}.forward requires {', '.join(missing)}; it takes {takes}, a batch has {', '.join(OFFERED[:-1])}; "
            "wrap it in a module whose forward takes one argument named batch"
        )
    return list(parameters)


def _usual_labels(module: nn.Module) -> str:
    if getattr(module, "can_generate", lambda: False)():
        return "text"
    return "masked" if type(without_peft(module)).__name__.endswith("ForMaskedLM") else "batch"


def _text_labels(batch: Batch | HostColumns) -> Tensor:
    return batch.input_ids.masked_fill(~batch.attention_mask, IGNORED)


def normalisation_of(images: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation, of pixels in [0, 1], that an image processor takes; CLIP's without one."""
    if not hasattr(images, "do_normalize"):
        return CLIP_MEAN, CLIP_STD
    scale = 255 * images.rescale_factor if images.do_rescale else 255.0
    mean, std = (images.image_mean, images.image_std) if images.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _first(config: Any, *names: str) -> Any:
    """The first part of a configuration that exists, or else the whole."""
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _pair(size: Any) -> tuple[int, int] | None:
    """Height and width, from one side or from both."""
    if isinstance(size, int):
        return size, size
    return tuple(size) if isinstance(size, list | tuple) and len(size) == 2 else None


def without_peft(module: Any) -> nn.Module:
    """The model inside of peft's wrapper, to which its forward passes all arguments; any other module itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, in order."""
    return inspect.signature(without_peft(module).forward).parameters
