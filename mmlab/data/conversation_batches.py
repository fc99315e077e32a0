"""Batches of conversations, made by the model's own processor, with labels on the answers alone.

Runs in a loader's workers. Costs the processor's call, a second tokenisation of the text, and applying the
chat template twice for every answer.

Packed batches have the samples end to end in one row, each attending only to itself. With SDPA, flash or flex
attention, transformers keeps the samples of a row apart if positions restart at each sample and no mask is given. Not
every model passes positions on, and some attend in both directions, so a model is tried once, on two samples of its
own processor, which takes two forward passes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmlab.data.conversation_sizes import (
    answer_tokens,
    check_processor,
    is_encoder_decoder,
    processor_inputs,
    templated,
)
from mmlab.data.conversations import Message, count_images
from mmlab.errors import DataError, OptionError
from mmlab.types import IGNORED

_ONE_AT_A_TIME = threading.Lock()  # a fast tokenizer's padding is state that its calls share
_LEAD = 2  # tokens before an answer that must match together with it
_REFUSED = "%s cannot take packed batches: %s; leave out packed_for"
_OF_TOKENS = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")


class ConversationCollator:
    """`DataLoader(conversations, collate_fn=ConversationCollator(processor), ...)`, or a Trainer's `data_collator`.

    A batch is what `processor(text=..., images=..., padding=True)` gives, and `labels` (B, T): the tokens of
    every answer, including those with which the chat template ends it; -100 elsewhere. Sequences are as long
    as `conversation_sizes` says. For an encoder-decoder, the sequence is the question, and `labels` (B, L)
    are the answer's tokens and the end of the sequence.

    Args:
        processor: of transformers, with a chat template and a fast tokenizer. Its padding side is respected.
        packed_for: the model, to pack its batches: all samples in one row (1, T), with `position_ids` that
            keep them apart and no `attention_mask`. The model is tried on two samples, and refused unless it
            gives each the logits that it has in a padded batch.

    Raises:
        OptionError: another kind of processor, or a model that cannot be packed.
        DataError: the processor cannot make a batch, or answers cannot be told from questions in it.
    """

    def __init__(self, processor: Any, *, packed_for: nn.Module | None = None) -> None:
        check_processor(processor)
        self.processor, self.is_encoder_decoder = processor, is_encoder_decoder(processor)
        self.question_length: int | None = None  # tokens that an encoder-decoder's questions are padded to
        self.pack: Callable[[dict[str, Tensor]], dict[str, Any]] = dict
        if packed_for is not None:
            if self.is_encoder_decoder:
                raise OptionError(_REFUSED % (type(packed_for).__name__, "it is an encoder-decoder"))
            self.pack = Packer(packed_for)
            batch = self.padded(_two_samples())
            _check_packs(packed_for, batch, self.pack(batch))

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.pack(self.padded(rows))

    def padded(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch before it is packed. Safe to call from several threads."""
        with _ONE_AT_A_TIME:
            processor, messages = self.processor, [row["messages"] for row in rows]
            images = [list(row["images"]) for row in rows]
            shown = images if any(images) else None
            inputs = processor_inputs(processor, messages)
            length = self.question_length
            padding: Any = {"padding": "max_length" if length else True, "max_length": length}
            try:
                batch = processor(images=shown, return_tensors="pt", **padding, **inputs)
            except Exception as error:  # processors raise nearly anything
                reason = f"cannot make a batch of {len(rows)} conversations: {error}"
                raise DataError(f"{type(processor).__name__} {reason}".splitlines()[0]) from error
            if self.is_encoder_decoder:
                answers = [torch.tensor(answer) for answer in answer_tokens(processor, messages)]
                return {**batch, "labels": pad_sequence(answers, batch_first=True, padding_value=IGNORED)}
            if "suffix" in inputs:  # such processors label answers themselves
                return dict(batch)
            labels = torch.full_like(batch["input_ids"], IGNORED)
            flags = {name: value for name, value in inputs.items() if name != "text"}
            for row, ids in enumerate(batch["input_ids"]):
                there = batch["attention_mask"][row].bool()
                own = self._label(messages[row], inputs["text"][row], ids[there].tolist(), flags)
                labels[row, there] = torch.tensor(own)
            return {**batch, "labels": labels}

    def check(self, messages: list[Message]) -> None:
        """Check that the answers of a conversation can be told from its questions.

        Raises:
            DataError: they cannot.
        """
        inputs = processor_inputs(self.processor, [messages])
        if not (self.is_encoder_decoder or "suffix" in inputs):
            self._answers(messages, inputs["text"][0])

    def _label(self, messages: list[Message], text: str, ids: list[int], flags: dict[str, Any]) -> list[int]:
        """The labels of a sample without padding.

        Images make the sequence longer than the text alone, which shifts each answer by `shift` tokens. After
        the last image, that is the whole difference in length. Before an image it is less, and is found by
        matching the answer's tokens.
        """
        encoded = self.processor.tokenizer(text, return_offsets_mapping=True, **flags)
        known, offsets = encoded["input_ids"], encoded["offset_mapping"]
        labels, shift = [IGNORED] * len(ids), len(ids) - len(known)
        for number, begin, end in reversed(self._answers(messages, text)):
            first = next(place for place, (_, stop) in enumerate(offsets) if stop > begin)
            last = next((place for place, (start, _) in enumerate(offsets) if start >= end), len(known))
            lead = max(0, first - _LEAD)
            fewest = 0 if count_images(messages[number + 1 :]) else shift
            wanted, tried = known[lead:last], range(shift, fewest - 1, -1)
            shift = next((by for by in tried if ids[lead + by : last + by] == wanted), -1)
            if shift < 0:
                raise DataError(
                    f"{type(self.processor).__name__} tokenises an answer differently from its tokenizer alone, so "
                    "answers cannot be told from questions"
                )
            if messages[number].get("weight") != 0:
                labels[first + shift : last + shift] = known[first:last]
        return labels

    def _answers(self, messages: list[Message], text: str) -> list[tuple[int, int, int]]:
        """For each answer, the number of its message, and where it begins and ends in the templated text."""
        found = []
        for number, message in enumerate(messages):
            if number and message["role"] == "assistant":
                before = asked = templated(self.processor, messages[:number], asks=True)
                if not text.startswith(asked):
                    before = templated(self.processor, messages[:number])
                until = templated(self.processor, messages[: number + 1])
                if not (text.startswith(before) and text.startswith(until)):
                    if message.get("weight") == 0:
                        continue
                    raise DataError(
                        f"the chat template of {type(self.processor).__name__} changes earlier turns when later ones "
                        "follow, so answers cannot be found; give conversations of one answer"
                    )
                # the prompt for an answer may end with a space less than the answer begins with
                found.append((number, len(os.path.commonprefix([asked, text])), len(until)))  # noqa: RUF071
        return found


def _two_samples() -> list[dict[str, Any]]:
    """Two conversations about an image, of different lengths."""
    rows = []
    for question in ("What is this?", "What is in the middle of the image, and what is around it?"):
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        told = {"role": "assistant", "content": [{"type": "text", "text": "A dark circle."}]}
        rows.append({"messages": [asked, told], "images": [Image.radial_gradient("L").convert("RGB")]})
    return rows


class Packer:
    """Lays the samples of a padded batch end to end, at the positions that the model would give them.

    Args:
        model: of transformers. None of its weights are kept, so that a packer can be sent to workers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rope: Any = None  # gives images positions of their own, as in Qwen-VL
        inner: Any = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
        if inner is not None:
            self._rope = nn.Module.__new__(type(inner))
            nn.Module.__init__(self._rope)
            self._rope.config = inner.config

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The T tokens of B samples as one row: `input_ids`, `labels` (1, T), and `position_ids` (1, T),
        or (4, 1, T) with those of the text first; images are unchanged.
        """
        there = batch["attention_mask"].bool()
        places = (there.cumsum(1) - 1)[there][None]
        rope = None
        if self._rope is not None:
            known = signature(self._rope.get_rope_index).parameters
            rope, _ = self._rope.get_rope_index(**{name: batch[name] for name in batch if name in known})
        row = {name: value[there][None] if name in _OF_TOKENS else value for name, value in batch.items()}
        del row["attention_mask"]
        # the last token of a sample must not predict the first of the next
        row["labels"] = row["labels"].masked_fill(places == 0, IGNORED)
        row["position_ids"] = places if rope is None else torch.cat([places[None], rope[:, there][:, None]])
        return {**row, "use_cache": False}  # with a cache, transformers would not keep samples apart


@torch.no_grad()
def _check_packs(model: nn.Module, batch: dict[str, Tensor], packed: dict[str, Any]) -> None:
    """Raise an OptionError if a model's logits of packed samples differ from those in a padded batch.

    Two thirds of the digits must agree; in half precision, where only gross differences stand out from
    rounding, half of them.
    """
    from transformers import BatchFeature

    name = type(model).__name__
    if "token_type_ids" in batch:
        raise OptionError(_REFUSED % (name, "its images attend in both directions (token_type_ids)"))
    device, dtype = next(model.parameters()).device, model.dtype
    modes = {part: part.training for part in model.modules()}
    try:
        model.eval()
        wanted, found = (model(**BatchFeature(inputs).to(device, dtype)).logits for inputs in (batch, packed))
    except Exception as error:  # models raise nearly anything
        raise OptionError(_REFUSED % (name, error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    wanted = wanted[batch["attention_mask"].bool()]
    off = float((found[0] - wanted).abs().max() / wanted.abs().max())
    if not off <= torch.finfo(wanted.dtype).eps ** (2 / 3 if wanted.dtype == torch.float32 else 1 / 2):
        raise OptionError(_REFUSED % (name, f"its logits are off by {off:.2%} from those of a padded batch"))
