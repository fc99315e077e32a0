"""Every call of the five articles works as it is written there, or says in one line what to write instead."""

from __future__ import annotations

import runpy
import sys
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mmlab
from mmlab.comparison.config import load_config
from mmlab.data.readers import read_records
from mmlab.errors import DataError, OptionError

RECORDS = read_records("data/sample", progress=False)[:12]
PATHS, TEXTS = RECORDS.image_paths, RECORDS.texts


def test_article_a() -> None:
    dataset = mmlab.MultimodalDataset(image_paths=PATHS, texts=TEXTS)
    assert set(dataset[0]) >= {"image", "text"}
    plan = mmlab.BatchScheduler(8).optimize_batch(dataset)
    assert [len(batch) for batch in plan] == [8, 4]
    resources = mmlab.ResourceAwareScheduler()
    assert resources.limit_bytes == 16 * 2**30
    found = resources.get_available_resources()
    assert found["limit_gb"] == 16
    assert found["free_gb"] > 0
    assert found["used_gb"] > 0
    assert resources.adjust_batch_size(8) in (4, 8, 16)


def test_article_b_and_d_a_plain_data_loader() -> None:
    dataset = mmlab.MultiModalDataset(PATHS, text_prompts=TEXTS)
    assert dataset[0]["attention_mask"].shape == dataset[0]["input_ids"].shape
    (batch,) = DataLoader(dataset, batch_size=12, num_workers=1, persistent_workers=True, prefetch_factor=2)
    assert batch.pixel_values.shape == (12, 3, 224, 224)
    assert batch.input_ids.shape == batch.attention_mask.shape
    assert torch.equal(batch.pixel_values[3], dataset[3]["image"])
    assert batch.attention_mask[5].sum() == len(dataset[5]["input_ids"])


def test_article_c() -> None:
    dataset = mmlab.MultimodalDataset(PATHS, TEXTS)
    loader = mmlab.AdaptiveDataLoader(dataset, batch_size=4, shuffle=True, num_workers=0, progress=False)
    weights = loader.batch_weights
    assert [len(each) for each in weights] == [4, 4, 4]
    assert np.concatenate(weights).min() > 0
    assert sum(len(batch.record_ids) for batch in loader) == 12
    with pytest.raises(OptionError, match="give scheduler=BatchScheduler"):
        mmlab.AdaptiveDataLoader(dataset, batch_size=4, shuffle=False)
    with pytest.raises(OptionError, match="batch_size must be at least 1, found 0"):
        mmlab.AdaptiveDataLoader(dataset, batch_size=0)
    fusion = mmlab.MultimodalFusion(img_dim=768, text_dim=768)
    assert (fusion.img_proj.out_features, fusion.text_proj.in_features) == (512, 768)
    assert fusion.fusion_layer.num_heads == 8


def test_article_d_a_list_of_dicts_and_a_tokenizer() -> None:
    data = [{"image": path, "text": text} for path, text in zip(PATHS, TEXTS, strict=True)]
    tokenizer = mmlab.load_tokenizer("builtin", records=RECORDS)
    dataset = mmlab.MultimodalDataset(data, tokenizer)
    assert dataset.tokenizer is tokenizer
    assert dataset.records.texts == TEXTS
    with pytest.raises(DataError, match=r"item 1.*no image"):
        mmlab.MultimodalDataset([data[0], {"text": "alone"}], tokenizer)
    with pytest.raises(DataError, match="item 1: expected an object, found 7"):
        mmlab.MultimodalDataset([data[0], 7], tokenizer)
    with pytest.raises(DataError, match="a list: no image column among picture, text"):
        mmlab.MultimodalDataset([{"picture": "a.jpg", "text": "a"}], tokenizer)


def test_article_e() -> None:
    with torch.device("meta"):  # 25 million weights, not made
        model = mmlab.MultimodalModel()
    assert type(model).__name__ == "FusionModel"
    assert model.text_encoder.embedding.shape == (30522, 768)
    names = {name.partition(".")[0] for name, _ in islice(model.named_parameters(), 1000)}
    assert {"image_encoder", "text_encoder", "fusion"} <= names


@pytest.mark.parametrize(
    ("name", "expected"),
    [("article_a", "% of the limit, loss"), ("article_b", "1 of 3 micro-batches reached")],
)
def test_the_recipes_run(
    name: str,
    expected: str,
    scenes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(scenes)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create 4 worker processes")
        runpy.run_path(f"examples/{name}.py")
    assert expected in capsys.readouterr().out


def test_article_e_has_a_run_to_start_from() -> None:
    config = load_config("examples/article_e.toml")
    assert config.model["preset"] == "resnet50"
