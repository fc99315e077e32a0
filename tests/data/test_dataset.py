"""The dataset decodes what the plan promised; errors name the record."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.errors import DataError, OptionError
from mmlab.types import Aspect, Square


def test_decoded_sizes_and_lengths_are_those_that_planning_used(records: Records) -> None:
    dataset = MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))
    sizes = dataset.sizes
    for row in range(len(dataset)):
        sample = dataset[row]
        assert sample["image"] is not None
        assert sample["image"].dtype == torch.uint8
        assert tuple(sample["image"].shape) == (3, sizes.height[row], sizes.width[row])
        assert len(sample["input_ids"]) == sizes.num_tokens[row]


@pytest.mark.parametrize("name", ["records", "tokenizer", "image_policy"])
def test_what_token_ids_plans_and_cache_are_made_from_cannot_be_replaced(records: Records, name: str) -> None:
    dataset = MultimodalDataset(records, image_policy=Square(32))
    with pytest.raises(OptionError, match=f"the {name} of a data set cannot be replaced.*make another"):
        setattr(dataset, name, getattr(dataset, name))


def test_takes_paths_and_texts_as_the_articles_do(tmp_path: Path) -> None:
    paths = []
    for index in range(3):
        paths.append(tmp_path / f"{index}.png")
        Image.new("RGB", (40, 30), (80 * index, 0, 0)).save(paths[-1])
    dataset = MultimodalDataset(paths, ["a black field", "a dark red field", "a red field"])
    sample = dataset[2]
    assert sample["text"] == "a red field"
    assert sample["image"] is not None
    assert tuple(sample["image"].shape) == (3, 224, 224)
    assert sample["image"][0].float().mean() == 160


def test_texts_are_cut_to_max_tokens_and_counted(records: Records) -> None:
    whole = MultimodalDataset(records, image_policy=Square(32))
    with pytest.warns(UserWarning, match=r"^\d+ of \d+ texts were cut to 8 tokens \(max_tokens\)$"):
        cut = MultimodalDataset(records, tokenizer=whole.tokenizer, image_policy=Square(32), max_tokens=8)
    assert cut.sizes.num_tokens.max() == 8
    assert cut.num_truncated == int((whole.sizes.num_tokens > 8).sum()) > 0
    row = int(np.argmax(whole.sizes.num_tokens))
    kept, full = cut[row]["input_ids"], whole[row]["input_ids"]
    assert kept[:7].tolist() == full[:7].tolist()
    assert kept[-1] == full[-1] == whole.tokenizer.sep_token_id
    with pytest.raises(OptionError, match="max_tokens must be at least 2"):
        MultimodalDataset(records, max_tokens=1)


def test_a_million_captions_take_62_megabytes(records: Records) -> None:
    """Measured on 15,000 of them, beside what is needed while one batch of texts is in the tokenizer."""
    tokenizer = MultimodalDataset(records, image_policy=Square(32)).tokenizer
    many = records.select(np.arange(15_000) % len(records))
    tracemalloc.start()
    dataset = MultimodalDataset(many, tokenizer=tokenizer, image_policy=Square(32))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_tokens = int(dataset.sizes.num_tokens.sum())
    held_bytes = 4 * num_tokens + 8 * len(many)
    assert dataset._token_ids.nbytes + dataset._offsets.nbytes == pytest.approx(held_bytes, abs=8)
    assert held_bytes / len(many) == pytest.approx(62, abs=5)
    assert peak_bytes < 2 * held_bytes + 8e6


def test_an_image_that_breaks_after_reading_is_named(tmp_path: Path) -> None:
    for name in ("good.png", "bad.png"):
        Image.new("RGB", (20, 20)).save(tmp_path / name)
    dataset = MultimodalDataset([tmp_path / "good.png", tmp_path / "bad.png"], ["one", "two"])
    (tmp_path / "bad.png").write_bytes(b"not an image any more")
    assert dataset[0]["image"] is not None
    with pytest.raises(DataError, match=r"record .*cannot read image .*bad\.png"):
        dataset[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_an_image_that_becomes_a_pipe_is_named_at_once(tmp_path: Path) -> None:
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    dataset = MultimodalDataset([tmp_path / "a.png"], ["one"])
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    dataset.announce(0)
    with pytest.raises(DataError, match=r"record .*cannot read image .*a\.png: .*not a regular file"):
        dataset[0]


def test_survives_pickling(records: Records) -> None:
    dataset = MultimodalDataset(records, image_policy=Square(32))
    again = pickle.loads(pickle.dumps(dataset))
    first, second = dataset[5], again[5]
    assert first["id"] == second["id"]
    assert first["image"] is not None
    assert second["image"] is not None
    assert torch.equal(first["image"], second["image"])
    assert torch.equal(first["input_ids"], second["input_ids"])


def test_an_image_policy_that_cannot_be_hashed_is_refused(records: Records) -> None:
    @dataclass
    class Own:
        side: int = 32

    policy: Any = Own()
    with pytest.raises(OptionError, match="image policy Own is not hashable; make it a frozen dataclass"):
        MultimodalDataset(records, image_policy=policy)
    size: Any = 224
    with pytest.raises(OptionError, match=r"^224 is no image policy; square:224 is one"):
        MultimodalDataset(records, image_policy=size)
    half_type: Any = type("Half", (), {"target_sizes": Square(8).target_sizes})
    for policy in (half_type(), Square):
        with pytest.raises(OptionError, match="is no image policy; square:224 is one"):
            MultimodalDataset(records, image_policy=policy)


def words_tokenizer(texts: list[str | None], **special: str) -> Any:
    """One token per word; neither a pad token nor a closing one, as with GPT-2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts if text for word in text.split()})
    model = models.WordLevel({word: number for number, word in enumerate(["<unk>", *words])}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def test_a_tokenizer_without_a_pad_token_pads_with_zero(records: Records) -> None:
    dataset = MultimodalDataset(records, tokenizer=words_tokenizer(records.texts), image_policy=Square(32))
    assert dataset.tokenizer.pad_token_id is None
    batch = dataset.collate([dataset[row] for row in range(8)])
    assert not batch.attention_mask.all()
    assert (batch.input_ids[~batch.attention_mask] == 0).all()


def test_a_text_without_a_closing_token_keeps_its_first_tokens(records: Records) -> None:
    tokenizer = words_tokenizer(records.texts)
    with pytest.warns(UserWarning, match="texts were cut to 3 tokens"):
        cut = MultimodalDataset(records, tokenizer=tokenizer, image_policy=Square(32), max_tokens=3)
    for row, text in enumerate(records.texts):
        assert text is None or tokenizer.decode(cut[row]["input_ids"]).split() == text.split()[:3]


def test_a_tokenizer_is_found_in_a_folder(records: Records, tmp_path: Path) -> None:
    saved = MultimodalDataset(records).tokenizer
    saved.save_pretrained(str(tmp_path))
    assert MultimodalDataset(records, tokenizer=tmp_path).tokenizer.get_vocab() == saved.get_vocab()
