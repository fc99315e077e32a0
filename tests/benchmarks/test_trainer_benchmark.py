"""The trainer's benchmark compares like with like, and docs/training.md has its tables."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.loading.collate import collate
from mmlab.types import Aspect

ROOT = Path(__file__).parents[2]
RESULTS = [ROOT / f"benchmarks/results/{name}.json" for name in ("trainer_overhead", "trainer")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture(scope="module")
def dataset() -> MultimodalDataset:
    return MultimodalDataset(read_records(ROOT / "data/sample", progress=False), image_policy=Aspect(48 * 48))


def test_the_loop_by_hand_and_the_trainer_take_the_same_steps(script, dataset):
    batches = [collate([dataset[row] for row in range(first, 40, 10)]) for first in range(2)]
    rows = script("_trainer_loops").measure_overhead(batches, vocab_size=len(dataset.tokenizer), num_rounds=2)
    losses = {row["loop"]: row["loss"] for row in rows}
    assert len(losses["FusionTrainer"]) == 6
    assert losses["FusionTrainer"] == pytest.approx(losses["by hand"], rel=1e-4)
    assert all(len(row["step_s"]) == 4 for row in rows)


def test_the_articles_batch_is_padded_as_in_the_articles(script, dataset):
    setting = script("_articles_setting")
    articles = setting.ArticleDataset(dataset)
    padded = setting.stack([articles[row] for row in range(3)])
    assert padded.shape == (3, 512, 224, 224)
    longest = setting.stack([articles[row] for row in range(3)], to_longest=True)
    assert longest.shape.num_tokens == max(len(dataset[row]["input_ids"]) for row in range(3))
    for row in range(3):
        tokens = padded.input_ids[row][padded.attention_mask[row]]
        assert torch.equal(tokens, dataset[row]["input_ids"])


def test_a_verdict_is_worse_only_beyond_the_noise(script):
    runs = [
        {"scheduler": name, "num_steps": 10, "held_out_loss": loss + noise, "recall": 0.1 + noise}
        for name, loss in {"random": 2.0, "alike": 2.01, "bad": 2.5, "good": 1.5}.items()
        for noise in (-0.05, 0.0, 0.05)
    ]
    verdicts = {row["scheduler"]: row for row in script("trainer").compare_means(runs)}
    found = {name: row["held_out_loss_verdict"] for name, row in verdicts.items()}
    assert found == {"random": "same", "alike": "same", "bad": "worse", "good": "better"}
    assert {row["recall_verdict"] for row in verdicts.values()} == {"same"}


def test_the_documented_tables_are_the_measured_ones(script):
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = [row for path in RESULTS for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    tables = script("_trainer_tables").tables(rows)
    assert tables
    assert len(tables) + text.count("Not yet measured.") == 3
    for table in tables:
        assert table in text
