"""Tokenizers by name and by training; text lengths measured with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmlab.data.records import Records
from mmlab.data.text import estimate_num_tokens, load_tokenizer, measure_tokens
from mmlab.errors import DataError, OptionError

TEXTS = ["A dog runs.", "Two dogs, running!", "Ein Käfer läuft über den Tisch", "一只猫 sits"]


def records_of(texts: list[str | None]) -> Records:
    size = np.zeros(len(texts), dtype=np.int32)
    return Records(
        ids=[str(row) for row in range(len(texts))],
        image_paths=[None] * len(texts),
        texts=texts,
        height=size,
        width=size,
        num_tokens=size,
        group=np.arange(len(texts)),
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(records=records_of(TEXTS))


@pytest.mark.parametrize(
    ("text", "number"),
    [(None, 0), ("", 2), ("a dog", 4), ("it's (fine)!", 9), ("Käfer läuft", 4), ("一只dog跑。犬が", 9)],
)
def test_the_estimate_counts_words_and_marks(text, number):
    assert estimate_num_tokens(text) == number


def test_builtin_knows_every_character_of_its_texts(tokenizer):
    unknown = tokenizer.unk_token_id
    assert all(unknown not in tokenizer(text)["input_ids"] for text in TEXTS)
    assert tokenizer("ʭ")["input_ids"] == [tokenizer.cls_token_id, unknown, tokenizer.sep_token_id]


def test_builtin_frames_texts_as_bert_does(tokenizer):
    ids = tokenizer("A dog RUNS")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a dog runs"
    assert tokenizer.pad_token_id == 0
    pair = tokenizer("a dog", "two dogs")
    assert pair["input_ids"].count(tokenizer.sep_token_id) == 2
    assert max(pair.get("token_type_ids", [1])) == 1


def test_only_the_five_special_tokens_are_special(tokenizer):
    assert sorted(tokenizer.all_special_tokens) == ["[CLS]", "[MASK]", "[PAD]", "[SEP]", "[UNK]"]
    assert (
        len(tokenizer("##a")["input_ids"])
        == len(tokenizer("#", add_special_tokens=False)["input_ids"]) * 2 + 3
    )


def test_the_same_texts_give_the_same_bytes_in_every_process(tmp_path):
    code = (
        "import sys; from mmlab.data.text import load_tokenizer; from tests.data.test_text import records_of; "
        "texts = ['ab cd ef gh', 'ba dc fe hg', 'qr st uv', 'rq ts vu'] * 3; "
        "load_tokenizer(records=records_of(texts), vocab_size=60).save_pretrained(sys.argv[1])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for number, threads in enumerate(("1", "2")):
        command = [sys.executable, "-c", code, str(tmp_path / str(number))]
        subprocess.run(command, check=True, env=environment | {"RAYON_NUM_THREADS": threads})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(tmp_path / str(number) / name).read_bytes() for number in range(2)}) == 1


def test_a_saved_tokenizer_comes_back(tmp_path):
    saved = load_tokenizer(records=records_of(TEXTS))
    saved.save_pretrained(tmp_path / "my tokenizer")
    loaded = load_tokenizer(tmp_path / "my tokenizer")
    assert [loaded(text)["input_ids"] for text in TEXTS] == [saved(text)["input_ids"] for text in TEXTS]
    assert loaded.special_tokens_map == saved.special_tokens_map


def test_a_saved_builtin_is_loaded_without_torch(tmp_path, tokenizer):
    tokenizer.save_pretrained(str(tmp_path))
    code = "import sys, mmlab.data.text; mmlab.data.text.load_tokenizer(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_vocabulary_keeps_to_its_limit():
    records = records_of(["the quick brown fox jumps over the lazy dog " * 3] * 5)
    assert len(load_tokenizer(records=records, vocab_size=70)) == 70
    with pytest.raises(OptionError, match="vocab_size 20 cannot hold all characters: give at least 57"):
        load_tokenizer(records=records, vocab_size=20)
    with pytest.raises(OptionError, match=r"vocab_size must be a whole number, found 500\.5"):
        load_tokenizer(records=records, vocab_size=500.5)


def test_builtin_needs_texts():
    for records in (None, records_of([]), records_of([None])):
        with pytest.raises(OptionError, match="pass records=, with texts"):
            load_tokenizer("builtin", records=records)


def bare_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer without a pad token, as GPT-2's is."""
    vocab = {token: number for number, token in enumerate([*special.values(), "a", "dog"])}
    model = Tokenizer(models.WordLevel(vocab, unk_token=special.get("unk_token", "a")))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def test_the_end_token_pads_where_there_is_no_pad_token(tmp_path):
    bare_tokenizer(eos_token="<end>", unk_token="<unk>").save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token == "<end>"
    padded = tokenizer(["a", "a dog"], padding=True)
    assert padded["attention_mask"] == [[1, 0], [1, 1]]


def test_a_tokenizer_that_cannot_pad_is_refused(tmp_path):
    bare_tokenizer().save_pretrained(str(tmp_path))
    with pytest.raises(DataError, match="cannot pad: set its pad_token"):
        load_tokenizer(tmp_path)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataError, match="the folder does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused(tmp_path, tokenizer, name):
    tokenizer.save_pretrained(str(tmp_path))
    content = (tmp_path / name).read_text()
    (tmp_path / name).write_text(content[: len(content) // 2])
    with pytest.raises(DataError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)


def test_a_name_that_cannot_be_downloaded_says_what_to_do(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    wanted = r"tokenizer 'no-such-owner/no-such-tokenizer' is not in the local cache .* or use 'builtin'"
    with pytest.raises(DataError, match=wanted):
        load_tokenizer("no-such-owner/no-such-tokenizer")


def test_lengths_are_those_of_the_ids_in_any_batch(tokenizer, monkeypatch):
    records = records_of([*TEXTS, None, ""])
    expected = [0 if text is None else len(tokenizer(text)["input_ids"]) for text in records.texts]
    assert measure_tokens(records, tokenizer).num_tokens.tolist() == expected
    monkeypatch.setattr("mmlab.data.text._BATCH_SIZE", 2)
    assert measure_tokens(records, tokenizer).num_tokens.tolist() == expected
    assert records.num_tokens.tolist() == [0] * 6


def test_an_empty_name_of_a_tokenizer_is_refused_in_one_line():
    with pytest.raises(OptionError, match=r"^the tokenizer's name is empty; give 'builtin'.*$"):
        load_tokenizer("")
