"""The trainer's benchmark compares like with like, and docs/internals/training_measured.md has its tables."""

from __future__ import annotations

import importlib
import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlab.data.collate import collate
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.types import Aspect, Square
from tests.prices import speck

ROOT = Path(__file__).parents[2]


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
    articles = setting.ArticleDataset(MultimodalDataset(dataset.records, image_policy=Square(224)))
    samples = [articles[row] for row in range(3)]
    padded, longest = (setting.collate_to(samples, texts=texts) for texts in ("512", "longest"))
    assert padded.shape == (3, 512, 224, 224)
    assert longest.shape.num_tokens == max(len(dataset[row]["input_ids"]) for row in range(3))
    for row in range(3):
        tokens = padded.input_ids[row][padded.attention_mask[row]]
        assert torch.equal(tokens, dataset[row]["input_ids"])


def test_neighbours_in_the_chain_differ_in_one_thing(script):
    setting = script("_articles_setting")
    names = [setting.BEFORE, *(name for _, name in setting.CHAIN)]
    assert names[-1] == setting.MMLAB
    for one, other in pairwise(asdict(setting.SETTINGS[name]) for name in names):
        assert sum(one[key] != other[key] for key in one) == 1


def test_settings_train_on_the_same_samples_within_one_memory_limit(script, dataset, tmp_path, monkeypatch):
    setting = script("_articles_setting")
    monkeypatch.setattr(setting, "SIDE", 32)
    with speck() as model:
        on = setting.Accelerator(batch_size=4, fit_s=1.0, model=model)
        rows = setting.measure_articles(dataset.records[:16], tmp_path, num_rounds=1, on=on)
    arms = {row["arm"]: row for row in rows}
    assert list(arms) == list(setting.SETTINGS)
    assert {row["rounds"][0]["num_samples"] for row in rows} == {16}
    same = ("serial, longest text", setting.TODAY, "with a cache", "worker, texts of 512", setting.BEFORE)
    losses = [arms[name]["rounds"][0]["loss"] for name in same]  # of the same batches, however they are fed
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    limit = arms[setting.TODAY]["predicted_peak_bytes"]
    for row in rows:
        if row["setting"]["texts"] == "longest" and row["predicted_peak_bytes"] is not None:
            assert row["predicted_peak_bytes"] <= limit * 1.0001
    assert arms[setting.BEFORE]["predicted_peak_bytes"] > limit
    tables = script("_trainer_tables")
    assert set(tables.tables(rows)) == {"settings", "causes", "claims"}
    assert len(tables.draw(rows).axes[0].texts) == len(setting.CHAIN) + 3
    assert len(script("trainer").judge(rows)) == 7


def test_a_change_is_the_median_of_ratios_within_one_turn(script):
    tables = script("_trainer_tables")
    rounds = [{"epoch_s": seconds, "data_wait_s": 1.0} for seconds in (10.0, 20.0, 40.0)]
    one = {"rounds": rounds}
    other = {"rounds": [{**found, "epoch_s": found["epoch_s"] * 0.5} for found in rounds]}
    assert tables.change(tables.epoch_s(other) / tables.epoch_s(one)) == "-50 (-50 to -50)"
    assert tables.computing(one).tolist() == pytest.approx([0.9, 0.95, 0.975])


def test_the_documented_tables_are_the_measured_ones(script):
    tables = script("_trainer_tables")
    found = tables.tables(tables.kept_rows())
    assert "overhead" in found
    for page in tables.PAGES:
        text = page.read_text("utf-8")
        assert tables.documented(text, found) == text, "run `python benchmarks/_trainer_tables.py`"
        for name in re.findall(r"<!-- table: (\w+) -->\n\nNot yet measured", text):
            assert name not in found
    named = {
        name
        for page in tables.PAGES
        for name in re.findall(r"<!-- table: (\w+) -->", page.read_text("utf-8"))
    }
    assert named == {"overhead", "causes", "settings", "claims"}
