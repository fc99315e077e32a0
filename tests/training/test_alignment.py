"""Alignment checks by hand, and what an evaluation reports of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from mmlab.model.presets import build_model
from mmlab.runs.event_keys import EVENT_KEYS
from mmlab.training.evaluation import evaluate
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.retrieval import Embeddings, describe_alignment, uniformity
from tests.batches import make_batch

SMALL = {
    "image_dim": 32,
    "image_depth": 1,
    "text_dim": 32,
    "text_depth": 1,
    "hidden_dim": 32,
    "embed_dim": 16,
}


def embeddings(image: torch.Tensor, text: torch.Tensor, groups: list[int] | None = None) -> Embeddings:
    numbers = torch.arange(len(image)) if groups is None else torch.tensor(groups)
    return Embeddings(image, text, numbers, [str(row) for row in range(len(image))])


def unit(rows: int, dim: int, *, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_by_hand_in_two_dimensions():
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = describe_alignment(embeddings(image, text))
    assert found["alignment"] == pytest.approx((0 + 2) / 2)  # squared distances 0 and 2
    assert found["image_uniformity"] == pytest.approx(-2 * 2)
    assert found["text_uniformity"] == pytest.approx(-2 * 4)
    assert found["modality_gap"] == pytest.approx(math.hypot(0.5, 0.5))


def test_uniformity_is_that_of_the_definition_over_blocks():
    vectors = unit(1300, 8)
    rows = vectors[:, None] - vectors
    near = (-2 * rows.square().sum(2).double()).exp()
    expected = math.log((near.sum() - near.diagonal().sum()) / (1300 * 1299))
    assert uniformity(vectors) == pytest.approx(expected, rel=1e-5)


def test_collapsed_perfect_and_random_embeddings_look_as_they_should():
    collapsed = describe_alignment(embeddings(unit(1, 8).expand(20, -1), unit(1, 8).expand(20, -1)))
    assert collapsed == pytest.approx(dict.fromkeys(collapsed, 0.0), abs=1e-6)
    random = describe_alignment(embeddings(unit(3000, 64), unit(3000, 64, seed=1)))
    assert random["alignment"] == pytest.approx(2, abs=0.02)
    assert random["image_uniformity"] == pytest.approx(-4, abs=0.15)
    assert random["modality_gap"] < 0.05
    apart = F.normalize(unit(3000, 64) + 2 * torch.eye(64)[0], dim=1)
    assert describe_alignment(embeddings(apart, unit(3000, 64)))["modality_gap"] > 0.8


def test_an_image_counts_once_however_many_texts_it_has():
    image, text = unit(3, 4), unit(4, 4, seed=1)
    found = describe_alignment(embeddings(image[[0, 0, 1, 2]], text, [5, 5, 6, 7]))
    assert found["image_uniformity"] == pytest.approx(uniformity(image.double()))
    assert math.isnan(describe_alignment(embeddings(image[:1], text[:1]))["text_uniformity"])


def measure(sizes, **options):
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **SMALL)
    return evaluate(FusionTrainer(model, device="cpu", **options), [make_batch(sizes)])


def test_an_evaluation_reports_every_modality_under_documented_keys():
    objectives = {"contrastive": Contrastive(), "masked_language": MaskedLanguage(mask_id=4)}
    sizes = [(5, 32, 32), (9, 32, 16), (12, 0, 0), (0, 16, 16)]
    found = measure(sizes, objectives=objectives)
    assert all("eval" in EVENT_KEYS[name].kinds for name in found)
    assert found["loss"] == pytest.approx((found["image_to_text_loss"] + found["text_to_image_loss"]) / 2)
    assert found["masked_language_loss"] == pytest.approx(math.log(50), abs=0.5)
    assert found["masked_language_pair_loss"] != found["masked_language_text_loss"]
    before = torch.get_rng_state()
    assert measure(sizes, objectives=objectives) == found
    torch.manual_seed(0)
    build_model("tiny", vocab_size=50, **SMALL)
    drawn = torch.get_rng_state()
    measure(sizes, objectives=objectives)
    assert torch.equal(torch.get_rng_state(), drawn)  # what is hidden is drawn apart
    torch.set_rng_state(before)
    assert not any("masked" in name for name in measure(sizes))


def test_the_parts_of_the_masked_loss_make_up_the_whole():
    objectives = {"masked_language": MaskedLanguage(mask_id=4, mask_ratio=1.0)}
    pair, text_only = (5, 32, 32), (11, 0, 0)
    whole = measure([pair, text_only], objectives=objectives)
    alone = measure([pair], objectives=objectives)
    assert whole["masked_language_pair_loss"] == pytest.approx(alone["masked_language_loss"], rel=1e-5)
    torch.manual_seed(0)
    mixed = (5 * alone["masked_language_loss"] + 11 * _text_only_loss(objectives)) / 16
    assert whole["masked_language_loss"] == pytest.approx(mixed, rel=1e-5)


def _text_only_loss(objectives) -> float:
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **SMALL).eval()
    batch = make_batch([(5, 32, 32), (11, 0, 0)]).part(slice(1, 2))
    goal = objectives["masked_language"]
    with torch.no_grad():
        return float(goal(model(batch), batch)) / goal.count(batch)
