"""How long conversations become for a model, by the processor's own rules, before a pixel is decoded.

A sample's sequence is its templated text with every image's placeholder replaced by that image's tokens. transformers'
processors say how many tokens and patches an image of a given height and width becomes (`_get_num_multimodal_tokens`).
That rule is checked against real calls on blank images; where it does not hold, or where there is none, every
sample is measured by a real call, which takes some milliseconds each, and a warning says so.

An encoder-decoder has question and answer in two sequences, and a batch pads each. So the length of a sample
is that of the longest question of all plus its own answer: no batch is then longer than its longest sample.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mmlab.data.conversations import PLACEHOLDER, Conversations, Message, count_images
from mmlab.data.readers.sidecar import Size
from mmlab.errors import OptionError
from mmlab.machine import progress_bar, replace_file
from mmlab.types import PATCH, SampleSizes

_NUM_CHECKED = 8  # samples that are measured to check the processor's rule
_BATCH_SIZE = 1024  # texts per call into the tokenizer


class ConversationSizes(NamedTuple):
    """What a step depends on, for each of N samples."""

    num_tokens: NDArray[np.int32]  # (N,) in the language model's sequence, image tokens included; see above
    num_image_tokens: NDArray[np.int32]  # (N,) those of them that images take
    num_patches: NDArray[np.int32]  # (N,) patches of the vision tower, or tiles if the processor counts those
    pads_images: Any = True  # whether a batch has as many patches for each sample as for the largest

    @property
    def work(self) -> NDArray[np.int32]:
        """(N,) what a sample costs the vision tower: the number of patches or, if the processor counts tiles, of image
        tokens, which is proportional to it.
        """
        return np.maximum(self.num_patches, self.num_image_tokens)

    def sizes(self) -> SampleSizes:
        """The planner's columns: the sequence counts as text, the vision tower's work as image patches."""
        height, width = PATCH * self.work, np.where(self.work > 0, PATCH, 0)
        return SampleSizes(
            num_tokens=self.num_tokens,
            height=height,
            width=width,
            group=np.arange(len(height)),
            pads_images=bool(self.pads_images),
        )


def conversation_sizes(
    conversations: Conversations, processor: Any, *, cache: str | Path | None = None, progress: bool = True
) -> ConversationSizes:
    """Sizes of conversations under a processor of transformers.

    Args:
        conversations: the result of `read_conversations`.
        processor: as `AutoProcessor.from_pretrained(name_or_path)` gives it, with a chat template.
        cache: folder in which the sizes of these conversations under this processor are saved.
        progress: show a bar on stderr.

    Raises:
        OptionError: a processor without a chat template, or one that cannot make sequences of these
            conversations; a text that holds the processor's image token.
    """
    check_processor(processor)
    token = str(getattr(processor, "image_token", None) or PLACEHOLDER)
    for name, own in zip(conversations.ids, conversations.messages, strict=True):
        if any(token in _text(message) for message in own):
            raise OptionError(f"conversation {name}: {token} in a text stands for an image; reword it")
    path = None
    if cache is not None:
        path = Path(cache, f"sizes-{_fingerprint(conversations, processor)}.npz")
        # none yet, or damaged: found again
        with suppress(OSError, ValueError, TypeError, EOFError, BadZipFile), np.load(path) as saved:
            return ConversationSizes(**saved)
    found = _stated_sizes(conversations, processor, progress)
    if found is None:
        found = _measured_sizes(conversations, processor, progress)
    found = found._replace(pads_images=_pads_images(conversations, processor, found.work))
    if is_encoder_decoder(processor):
        answers = [len(answer) for answer in answer_tokens(processor, conversations.messages)]
        found = found._replace(num_tokens=found.num_tokens.max(initial=0) + np.array(answers, dtype=np.int32))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **found._asdict())
        replace_file(path, content.getvalue())  # another process may write the same
    return found


def check_processor(processor: Any) -> None:
    """Raise an OptionError for anything but a processor of images and texts with a fast tokenizer."""
    name, tokenizer = type(processor).__name__, getattr(processor, "tokenizer", None)
    if tokenizer is None or not hasattr(processor, "image_processor"):
        raise OptionError(
            f"expected the processor of a vision-language model, as AutoProcessor.from_pretrained gives it, found {name}"
        )
    if not tokenizer.is_fast:
        raise OptionError(f"{name}'s slow tokenizer does not say where its tokens stand; load a fast one")


def is_encoder_decoder(processor: Any) -> bool:
    """Whether its models are encoder-decoders: its `is_encoder_decoder`, or else what transformers says."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = type(processor).__name__
    models = [model for model, own in PROCESSOR_MAPPING_NAMES.items() if own == name]
    usual = bool(models) and all(CONFIG_MAPPING[model].is_encoder_decoder for model in models)
    return bool(getattr(processor, "is_encoder_decoder", usual))


def answer_tokens(processor: Any, conversations: Sequence[list[Message]]) -> list[list[int]]:
    """What an encoder-decoder generates: the tokens of a conversation's only answer, and the end token.

    Raises:
        OptionError: a conversation with several answers.
    """
    answers = [_question_and_answer(processor, messages)[1] for messages in conversations]
    end, found = processor.tokenizer.eos_token_id, processor.tokenizer(text_target=answers)["input_ids"]
    return [ids if ids[-1:] == [end] else [*ids, end] for ids in found]


def templated(processor: Any, messages: list[Message], *, asks: bool = False) -> str:
    """The text of a conversation by the processor's chat template; `asks` ends it where an answer would begin.

    Raises:
        OptionError: there is no template, or it refuses the conversation.
    """
    if getattr(processor, "chat_template", None) is None:
        raise OptionError(
            f"{type(processor).__name__} has no chat template, so nothing says where answers begin; set "
            "processor.chat_template to the one that the model was trained with"
        )
    try:
        return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    except Exception as error:  # jinja's, or what a template raises itself
        raise OptionError(f"the chat template refuses a conversation: {error}") from error


def processor_inputs(processor: Any, conversations: Sequence[list[Message]]) -> dict[str, Any]:
    """The arguments of a processor's call for these conversations, except the images.

    A processor without a chat template that takes questions and answers separately (`suffix`, as PaliGemma's
    does) gets them separately. An encoder-decoder's processor gets the questions alone.

    Raises:
        OptionError: as `templated`, or several answers for a processor that takes one.
    """
    apart = is_encoder_decoder(processor)
    takes_suffix = "suffix" in signature(type(processor).__call__).parameters
    if processor.chat_template is None and (apart or takes_suffix):
        pairs = [_question_and_answer(processor, messages) for messages in conversations]
        if apart:  # such processors put images first by themselves
            return {"text": [question for question, _ in pairs]}
        places = [processor.image_token * count_images(messages) for messages in conversations]
        questions = [place + question for place, (question, _) in zip(places, pairs, strict=True)]
        return {"text": questions, "suffix": [answer for _, answer in pairs]}
    texts = [templated(processor, own[: -1 if apart else None], asks=apart) for own in conversations]
    # as transformers' own apply_chat_template: no second begin-of-sequence token
    begin = processor.tokenizer.bos_token
    has_begin = begin is not None and texts[0].startswith(begin)
    return {"text": texts, **({"add_special_tokens": False} if has_begin else {})}


def _question_and_answer(processor: Any, messages: list[Message]) -> tuple[str, str]:
    *asked, answer = messages
    if answer["role"] != "assistant" or any(message["role"] == "assistant" for message in asked):
        raise OptionError(
            f"{type(processor).__name__} learns one answer at the end of a sample; give conversations of one question and "
            "one answer, or set processor.chat_template if its model is a decoder"
        )
    return "\n".join(_text(message) for message in asked), _text(answer)


def _text(message: Message) -> str:
    return "".join(part.get("text", "") for part in message["content"])


def image_tokens(processor: Any, sizes: Sequence[Size]) -> tuple[list[int], list[int]] | None:
    """Tokens and patches (or tiles) of images of these heights and widths; None where the processor does not say."""
    if not sizes:
        return [], []
    try:
        data = processor._get_num_multimodal_tokens(image_sizes=[list(size) for size in sizes])
        return list(data["num_image_tokens"]), list(data["num_image_patches"])
    except Exception:  # processors raise nearly anything; the real call will say which image is at fault
        return None


def _stated_sizes(conversations: Conversations, processor: Any, progress: bool) -> ConversationSizes | None:
    """Sizes by the processor's own rule; None where it states none, or where real calls give others."""
    sizes = conversations.image_sizes
    distinct = list({size for own in sizes for size in own})
    stated = image_tokens(processor, distinct)
    if stated is None:
        return None
    tokens_of, patches_of = (dict(zip(distinct, counts, strict=True)) for counts in stated)
    tokens = np.array([sum(tokens_of[size] for size in own) for own in sizes], dtype=np.int64)
    patches = np.array([sum(patches_of[size] for size in own) for own in sizes], dtype=np.int64)
    lengths = _count_tokens(processor, conversations.messages, progress) + tokens
    num_images = np.array([len(own) for own in sizes], dtype=np.int64)
    # a processor adds the same number of tokens to every text, and the same around every image
    rows = _spread(num_images, tokens)
    gaps = np.array([_measured(conversations, processor, row)[0] for row in rows]) - lengths[rows]
    design = np.stack([np.ones(len(rows)), num_images[rows]], axis=1)
    if (num_images[rows] == num_images[rows][:1]).all():
        design[:, 1] = 0  # one gap for all
    around = np.rint(np.linalg.lstsq(design, gaps, rcond=None)[0]).astype(np.int64)
    if not np.array_equal(design @ around, gaps):
        return None
    lengths += around[0] + around[1] * num_images
    return ConversationSizes(*(column.astype(np.int32) for column in (lengths, tokens, patches)))


def _measured_sizes(conversations: Conversations, processor: Any, progress: bool) -> ConversationSizes:
    """Sizes from a call of the processor for every sample."""
    num_samples = len(conversations.messages)
    warnings.warn(
        f"{type(processor).__name__} does not state exact sequence lengths, so all {num_samples} are measured by "
        "calling it, on blank images of their sizes",
        stacklevel=3,
    )
    bar = progress_bar(range(num_samples), "measuring samples", show=progress)
    measured = np.array([_measured(conversations, processor, row) for row in bar], dtype=np.int32)
    return ConversationSizes(*np.ascontiguousarray(measured.reshape(-1, 3).T))


def _pads_images(conversations: Conversations, processor: Any, work: NDArray[np.int32]) -> bool:
    """Whether the images of a batch take more numbers than those of its samples one by one.

    Tried on the samples with the least and the most work; where that fails, a batch counts as padded, which is never
    too little.
    """
    with_images = np.flatnonzero(work)
    if not len(with_images):
        return True
    least, most = (int(with_images[find(work[with_images])]) for find in (np.argmin, np.argmax))

    def num_values(*rows: int) -> int:
        values = _on_blank_images(conversations, processor, rows).values()
        return sum(each.numel() for each in values if hasattr(each, "numel") and each.is_floating_point())

    try:
        return num_values(least, most) > num_values(least) + num_values(most)
    except Exception:  # processors raise nearly anything, for instance where they have no token to pad with
        return True


def _measured(conversations: Conversations, processor: Any, row: int) -> tuple[int, int, int]:
    """Tokens, image tokens and images of a row, from a call of the processor on blank images."""
    try:
        output = _on_blank_images(conversations, processor, [row])
    except OptionError:
        raise
    except Exception as error:  # processors raise nearly anything
        name = conversations.ids[row]
        raise OptionError(f"{type(processor).__name__} cannot take conversation {name}: {error}") from error
    if "input_ids" not in output:
        raise OptionError(f"{type(processor).__name__} makes no input_ids, but {', '.join(output)}")
    num_tokens = len(output["input_ids"][0])
    of_text = int(_count_tokens(processor, [conversations.messages[row]], progress=False)[0])
    return num_tokens, max(0, num_tokens - of_text), len(conversations.image_sizes[row])


def _on_blank_images(conversations: Conversations, processor: Any, rows: Sequence[int]) -> Any:
    """What the processor makes of these rows, with blank images of their sizes."""
    from PIL import Image

    sizes = [conversations.image_sizes[row] for row in rows]
    images = [[Image.new("RGB", (wide, high)) for high, wide in own] for own in sizes]
    inputs = processor_inputs(processor, [conversations.messages[row] for row in rows])
    return processor(
        images=images if any(images) else None, padding=len(rows) > 1, return_tensors="pt", **inputs
    )


def _count_tokens(processor: Any, messages: Sequence[list[Message]], progress: bool) -> NDArray[np.int64]:
    """(N,) tokens of the texts, without the placeholder of each image."""
    counts: list[int] = []
    # an encoder-decoder's processor may rewrite a question, as Florence-2's does its tasks
    plain = is_encoder_decoder(processor) and processor.chat_template is None
    tokenize = processor if plain else processor.tokenizer
    for start in progress_bar(range(0, len(messages), _BATCH_SIZE), "counting tokens", show=progress):
        part = messages[start : start + _BATCH_SIZE]
        inputs = processor_inputs(processor, part)
        encoded = tokenize(text_pair=inputs.pop("suffix", None), verbose=False, **inputs)
        counts += [len(ids) - count_images(own) for ids, own in zip(encoded["input_ids"], part, strict=True)]
    return np.array(counts, dtype=np.int64)


def _spread(num_images: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[int]:
    """Rows to check: the fewest and most image tokens, the most images, and some at even distances."""
    if not len(tokens):
        return []
    extremes = [int(np.argmin(tokens)), int(np.argmax(tokens)), int(np.argmax(num_images))]
    even = np.linspace(0, len(tokens) - 1, _NUM_CHECKED - len(extremes)).astype(int).tolist()
    return sorted({*extremes, *even})


def _fingerprint(conversations: Conversations, processor: Any) -> str:
    """Digest of all that the sizes depend on."""
    digest = hashlib.sha256()
    tokenizer = processor.tokenizer
    own = (type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), is_encoder_decoder(processor))
    about = (processor.to_json_string(), processor.chat_template, *own)
    for part in (*about, *zip(conversations.messages, conversations.image_sizes, strict=True)):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:16]
