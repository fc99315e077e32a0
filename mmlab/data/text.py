"""Tokenizers by name, and text lengths measured with them.

Importing this module costs nothing; the first tokenizer imports transformers (0.6 s; 2 s, with torch, for tokenizers
that need a class of their own, such as BERT's). Texts are measured in batches, and never changed or cut off.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, OptionError, check_numbers, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from mmlab.data.records import Records

BUILTIN = "builtin"
NUM_SPECIAL_TOKENS = 2  # [CLS] text [SEP]
_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # all they need is in tokenizer.json
_MAX_ALPHABET = 1000  # distinct characters that get tokens of their own; rarer ones become [UNK]
# Chinese and Japanese have no spaces; tokenizers make a token of about each character
_WORD_OR_MARK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
_BATCH_SIZE = 2048  # texts per call into the tokenizer


def estimate_num_tokens(text: str | None) -> int:
    """Words, or characters of Chinese and Japanese, and punctuation marks, plus `[CLS]` and `[SEP]`; zero for no text.

    >>> estimate_num_tokens("Two dogs, one ball.")
    8
    """
    return 0 if text is None else len(_WORD_OR_MARK.findall(text)) + NUM_SPECIAL_TOKENS


def load_tokenizer(
    name_or_path: str | Path = BUILTIN, *, records: Records | None = None, vocab_size: int = 8192
) -> PreTrainedTokenizerFast:
    """A tokenizer by its Hugging Face name, from a local folder, or trained on the texts at hand.

    Args:
        name_or_path: `"builtin"` trains a BERT-style WordPiece tokenizer on `records`; the same texts always
            give the same tokenizer. Anything else goes to transformers; a name is downloaded once and cached.
        records: texts for `"builtin"`.
        vocab_size: upper limit of the `"builtin"` vocabulary, special tokens included.

    Returns:
        A tokenizer that has a pad token; if it came without one, its end or unknown token is used.

    Raises:
        OptionError: `"builtin"` without texts, a vocabulary too small for their characters, or an empty name.
        DataError: a name or folder that holds no tokenizer or cannot be reached, or a tokenizer without a pad,
            an end and an unknown token.
    """
    if not str(name_or_path):
        raise OptionError("the tokenizer's name is empty; give 'builtin', or a Hugging Face name or path")
    if name_or_path == BUILTIN:
        texts = [text for text in records.texts if text is not None] if records is not None else []
        if not texts:
            raise OptionError("the builtin tokenizer is trained on your texts: pass records=, with texts")
        check_numbers({"vocab_size": vocab_size})
        tokenizer = _train(texts, vocab_size)
    else:
        tokenizer = _load(str(name_or_path))
    if tokenizer.pad_token is None:
        stand_in = tokenizer.eos_token or tokenizer.unk_token
        if stand_in is None:
            raise DataError(f"tokenizer {name_or_path} cannot pad: set its pad_token and save it again")
        tokenizer.pad_token = stand_in
    return tokenizer


def measure_tokens(records: Records, tokenizer: PreTrainedTokenizerFast) -> Records:
    """The same records with `num_tokens` as this tokenizer counts, special tokens included; zero without a text."""
    num_tokens = np.zeros(len(records), dtype=np.int32)
    for row, ids in encode_texts(tokenizer, records.texts):
        num_tokens[row] = len(ids)
    return records.with_num_tokens(num_tokens)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | None]
) -> Iterator[tuple[int, list[int]]]:
    """Row and token ids of every text, in order; holds the ids of a few thousand texts at a time."""
    rows = [row for row, text in enumerate(texts) if text is not None]
    for start in range(0, len(rows), _BATCH_SIZE):
        part = rows[start : start + _BATCH_SIZE]
        encoded = tokenizer(
            [texts[row] for row in part],
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        yield from zip(part, encoded["input_ids"], strict=True)


def _train(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a WordPiece whose vocabulary depends on the texts only.

    The trainer numbers the characters in the order of a randomly seeded hash table, and breaks ties between merges by
    those numbers. Naming every character as a special token in a fixed order fixes the numbers; a second tokenizer
    then takes over the vocabulary without them being special.
    """
    from tokenizers import BertWordPieceTokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    draft = BertWordPieceTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(draft.normalizer.normalize_str(text))
    by_count = sorted((char for char in counts if not char.isspace()), key=lambda char: (-counts[char], char))
    alphabet = sorted(by_count[:_MAX_ALPHABET])
    first = [*_SPECIAL.values(), *alphabet, *(f"##{char}" for char in alphabet)]
    if vocab_size < len(first):
        raise OptionError(f"vocab_size {vocab_size} cannot hold all characters: give at least {len(first)}")
    draft.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        min_frequency=0,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    final = Tokenizer.from_str(BertWordPieceTokenizer(draft.get_vocab()).to_str())
    return PreTrainedTokenizerFast(tokenizer_object=final, model_max_length=512, **_SPECIAL)


def _load(name: str) -> PreTrainedTokenizerFast:
    folder = Path(name).expanduser()
    is_local = folder.exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DataError(f"no tokenizer at {name}: the folder does not exist")
    try:
        return _loader(folder).from_pretrained(str(folder) if is_local else name, local_files_only=True)
    except Exception as error:  # a damaged file makes transformers and tokenizers raise nearly anything
        if is_local:
            raise DataError(f"{name} holds no tokenizer that transformers can load: {error}") from error
    try:
        return _loader(folder).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"tokenizer {name!r} is not in the local cache and cannot be downloaded: {first_line(error)} "
            f"Download it where there is a network (hf download {name}) and pass the folder, or use 'builtin', which "
            "is trained on your texts and needs none."
        ) from error


def _loader(folder: Path) -> Any:
    """The class to load with: `AutoTokenizer`, which imports torch, only for tokenizers that need it."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text("utf-8")).get("tokenizer_class") in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
