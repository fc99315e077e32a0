"""How long conversations become for a model, from the processor's own rules, before a pixel is decoded.

A sample's sequence is its templated text with every image's placeholder replaced by that image's tokens. transformers'
processors say how many tokens and patches an image of a given height and width becomes (`_get_num_multimodal_tokens`).
That rule is checked against real calls on blank images; where it does not hold, or where there is none, every
sample is measured by a real call, which takes some milliseconds each, and a warning says so.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from mmlab.data.conversations import Conversations, Message
from mmlab.errors import OptionError
from mmlab.types import PATCH, SampleSizes

if TYPE_CHECKING:
    from mmlab.data.readers.headers import Size

_NUM_CHECKED = 8  # samples that are measured to check the processor's rule
_BATCH_SIZE = 1024  # texts per call into the tokenizer


class ConversationSizes(NamedTuple):
    """What a step depends on, for each of N samples."""

    num_tokens: NDArray[np.int32]  # (N,) the language model's sequence, image tokens among them
    num_image_tokens: NDArray[np.int32]  # (N,) of these those that images take
    num_patches: NDArray[
        np.int32
    ]  # (N,) patches of the vision tower, or the tiles of processors that count these

    def sizes(self) -> SampleSizes:
        """The planner's columns: the sequence as text, and as image so many patches as the vision tower has work.

        That work is the patches, or where the processor counts tiles the image tokens, which are in proportion to them.
        """
        work = np.maximum(self.num_patches, self.num_image_tokens)
        width = np.where(work > 0, PATCH, 0)
        return SampleSizes(
            num_tokens=self.num_tokens, height=PATCH * work, width=width, group=np.arange(len(work))
        )


def conversation_sizes(
    conversations: Conversations, processor: Any, *, cache: str | Path | None = None, progress: bool = True
) -> ConversationSizes:
    """Sizes of conversations under a processor of transformers.

    Args:
        processor: as `AutoProcessor.from_pretrained(name_or_path)` gives it, with a chat template.
        cache: folder that remembers the sizes of these conversations under this processor.
        progress: show a bar if stderr is a terminal.

    Raises:
        OptionError: a processor without chat template, or one that makes no sequence of these conversations.
    """
    path = None
    if cache is not None:
        path = Path(cache, f"sizes-{_fingerprint(conversations, processor)}.npz")
        if path.is_file():
            with np.load(path) as saved:
                return ConversationSizes(**saved)
    found = _sizes(conversations, processor, progress)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.npz")
        np.savez(draft, **found._asdict())
        draft.replace(path)
    return found


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


def text_options(processor: Any, text: str) -> dict[str, Any]:
    """How transformers' own `apply_chat_template` calls the tokenizer: without a second begin-of-sequence token."""
    begin = processor.tokenizer.bos_token
    return {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}


def image_tokens(processor: Any, sizes: Sequence[Size]) -> tuple[list[int], list[int]] | None:
    """Tokens and patches (or tiles) of images of these heights and widths; None where the processor does not say."""
    rule = getattr(processor, "_get_num_multimodal_tokens", None)
    if rule is None:
        return None
    try:
        data = rule(image_sizes=[list(size) for size in sizes])
        return list(data["num_image_tokens"]), list(data["num_image_patches"])
    except (AttributeError, KeyError, NotImplementedError, TypeError):
        return None


def _sizes(conversations: Conversations, processor: Any, progress: bool) -> ConversationSizes:
    texts = [templated(processor, messages) for messages in conversations.messages]
    num_images = np.array([len(sizes) for sizes in conversations.image_sizes])
    distinct = list({size for sizes in conversations.image_sizes for size in sizes})
    told = image_tokens(processor, distinct) if distinct else ([], [])
    measure = _Measure(conversations, processor, texts)
    if told is not None:
        of_size = dict(zip(distinct, zip(*told, strict=True), strict=True))
        sums = [
            tuple(map(sum, zip(*(of_size[size] for size in sizes), strict=True))) or (0, 0)
            for sizes in conversations.image_sizes
        ]
        tokens, patches = np.array(sums, dtype=np.int64).reshape(-1, 2).T
        without = _count_tokens(processor, texts, progress)
        # what a processor puts around an image's tokens, less the placeholder, is the same for each image
        rows = _spread(num_images, tokens)
        gaps = {
            (measure(row)[0] - without[row] - tokens[row]) / max(1, num_images[row])
            for row in rows
            if num_images[row]
        }
        right = all(measure(row)[0] == without[row] for row in rows if not num_images[row])
        if right and len(gaps) <= 1:
            around = round(gaps.pop()) if gaps else 0
            total = without + tokens + around * num_images
            return ConversationSizes(*(column.astype(np.int32) for column in (total, tokens, patches)))
    warnings.warn(
        f"{type(processor).__name__} does not say exactly how long a sample becomes, so all {len(texts)} are measured by "
        "calling it, on blank images of their sizes",
        stacklevel=3,
    )
    bar = tqdm(range(len(texts)), desc="measuring samples", disable=None if progress else True)
    measured = np.array([measure(row) for row in bar], dtype=np.int32).reshape(-1, 3)
    return ConversationSizes(*(np.ascontiguousarray(column) for column in measured.T))


class _Measure:
    """Tokens, image tokens and patches of a row, from a call of the processor on blank images."""

    def __init__(self, conversations: Conversations, processor: Any, texts: list[str]) -> None:
        self._conversations, self._processor, self._texts = conversations, processor, texts

    def __call__(self, row: int) -> tuple[int, int, int]:
        from PIL import Image

        processor, text = self._processor, self._texts[row]
        images = [Image.new("RGB", (wide, high)) for high, wide in self._conversations.image_sizes[row]]
        options = text_options(processor, text)
        try:
            output = processor(text=[text], images=[images] if images else None, **options)
        except Exception as error:  # processors raise nearly anything
            name = self._conversations.ids[row]
            raise OptionError(
                f"{type(processor).__name__} cannot take conversation {name}: {error}"
            ) from error
        num_tokens = len(output["input_ids"][0])
        alone = len(processor.tokenizer(text, **options)["input_ids"])
        return num_tokens, max(0, num_tokens - alone + len(images)), len(images)


def _count_tokens(processor: Any, texts: list[str], progress: bool) -> NDArray[np.int64]:
    """(N,) tokens of templated texts, every image's placeholder among them."""
    counts: list[int] = []
    for start in tqdm(
        range(0, len(texts), _BATCH_SIZE), desc="counting tokens", disable=None if progress else True
    ):
        part = texts[start : start + _BATCH_SIZE]
        encoded = processor.tokenizer(part, verbose=False, **text_options(processor, part[0]))
        counts += map(len, encoded["input_ids"])
    return np.array(counts, dtype=np.int64)


def _spread(num_images: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[int]:
    """Rows to check: the fewest and most image tokens, the most images, and some at even distances."""
    if not len(tokens):
        return []
    extremes = [int(np.argmin(tokens)), int(np.argmax(tokens)), int(np.argmax(num_images))]
    even = np.linspace(0, len(tokens) - 1, _NUM_CHECKED - len(extremes)).astype(int).tolist()
    return sorted({*extremes, *even})


def _fingerprint(conversations: Conversations, processor: Any) -> str:
    """Of all that sizes depend on."""
    digest = hashlib.sha256()
    tokenizer = processor.tokenizer
    about = (
        processor.to_json_string(),
        processor.chat_template,
        type(tokenizer).__name__,
        len(tokenizer),
        tokenizer.name_or_path,
    )
    for part in (*about, *zip(conversations.messages, conversations.image_sizes, strict=True)):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:16]
