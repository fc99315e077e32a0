"""Objectives: sums that do not depend on how samples were cut, fair negatives, finite corners."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mmlab.errors import DataError, OptionError
from mmlab.model.fusion_model import FusionOutput
from mmlab.training.losses.contrastive import Contrastive, Matching, negatives, one_way_losses
from mmlab.training.retrieval import Embeddings, candidate_losses, joined, of_pairs, recalls
from mmlab.types import Batch
from tests.batches import make_batch


def unit(rows: int, dim: int = 6, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def pairs_batch(num_samples: int, groups: list[int] | None = None) -> Batch:
    batch = make_batch([(3, 16, 16)] * num_samples)
    return dataclasses.replace(batch, groups=None if groups is None else torch.tensor(groups))


def output_of(image: torch.Tensor, text: torch.Tensor, match=None) -> FusionOutput:
    rows = torch.arange(len(image))
    return FusionOutput(
        image,
        text,
        torch.tensor(10.0, dtype=torch.float64),
        features=(rows, rows, rows, rows),
        matcher=lambda images, _, texts, __: match(images, texts),
    )


def test_contrastive_is_the_sum_of_two_cross_entropies():
    image, text = unit(5), unit(5, seed=1)
    logits = 10 * image @ text.T
    expected = 0.5 * (
        F.cross_entropy(logits, torch.arange(5), reduction="sum")
        + F.cross_entropy(logits.T, torch.arange(5), reduction="sum")
    )
    batch = pairs_batch(5)
    torch.testing.assert_close(Contrastive()(output_of(image, text), batch), expected)
    torch.testing.assert_close(Contrastive(num_negatives=4)(output_of(image, text), batch), expected)
    assert Contrastive().count(batch) == 5


def test_other_captions_of_the_same_image_are_not_negatives():
    batch = pairs_batch(4, groups=[0, 0, 1, -1])
    assert negatives(batch).tolist() == [
        [False, False, True, True],
        [False, False, True, True],
        [True, True, False, True],
        [True, True, True, False],
    ]
    logits = 10 * unit(4) @ unit(4, seed=1).T
    for way in (logits, logits.T):
        without = one_way_losses(way[[0, 2, 3]][:, [0, 2, 3]], ~torch.eye(3, dtype=torch.bool))
        torch.testing.assert_close(one_way_losses(way, negatives(batch))[0], without[0])


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 3]), st.sampled_from([0, 16]), st.integers(-1, 2)),
        min_size=1,
        max_size=6,
    )
)
def test_samples_with_negatives_are_counted_without_a_matrix(samples):
    batch = make_batch([(tokens, side, side) for tokens, side, _ in samples])
    batch.groups = torch.tensor([group for *_, group in samples])
    assert Contrastive().count(batch) == int(negatives(batch).any(1).sum())
    batch.groups = None
    assert Contrastive().count(batch) == int(negatives(batch).any(1).sum())


def test_the_negatives_sum_has_one_expectation_at_every_batch_size():
    values = torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = values + values.T  # symmetric, so that both directions are one
    mean_of_sums, mean_losses = {}, {}
    for num_others in (1, 2, 4, 6):
        losses = []
        for others in combinations(range(1, 7), num_others):
            rows = torch.tensor([0, *others])
            allowed = ~torch.eye(len(rows), dtype=torch.bool)
            losses.append(one_way_losses(logits[rows][:, rows], allowed, num_negatives=6)[0])
        mean_of_sums[num_others] = torch.stack(losses).exp().mean()
        mean_losses[num_others] = torch.stack(losses).mean()
    for mean in mean_of_sums.values():
        torch.testing.assert_close(mean, mean_of_sums[6])
    assert mean_losses[1] < mean_losses[2] < mean_losses[4] < mean_losses[6]  # the bias that remains


@pytest.mark.parametrize("num_negatives", [None, 31])
def test_samples_without_a_negative_add_nothing_and_no_nan(num_negatives):
    loss = Contrastive(num_negatives=num_negatives)
    for batch in (
        pairs_batch(1),
        pairs_batch(3, groups=[5, 5, 5]),
        make_batch([(3, 16, 16), (0, 16, 16), (2, 0, 0)]),
    ):
        image = unit(len(batch)).requires_grad_()
        total = loss(output_of(image, unit(len(batch), seed=1)), batch)
        total.backward()
        assert loss.count(batch) == 0
        assert total == 0
        assert image.grad is not None
        assert image.grad.eq(0).all()


def test_incomplete_samples_are_neither_counted_nor_negatives():
    whole = [(3, 16, 16)] * 3
    image, text = unit(5), unit(5, seed=1)
    expected = Contrastive()(output_of(image[:3], text[:3]), make_batch(whole))
    batch = make_batch([*whole, (0, 16, 16), (4, 0, 0)])
    torch.testing.assert_close(Contrastive()(output_of(image, text), batch), expected)
    assert Contrastive().count(batch) == 3


def test_matching_draws_only_negatives_and_prefers_the_similar():
    drawn: list[tuple[int, int]] = []

    def match(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        drawn.extend(zip(images.tolist(), texts.tolist(), strict=True))
        return torch.zeros(len(images), dtype=torch.float64)

    image, text = torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)[[0, 1, 3, 2]]
    batch = pairs_batch(4, groups=[0, 0, 2, 3])
    torch.manual_seed(0)
    total = Matching()(output_of(image, text, match), batch)
    assert Matching().count(batch) == 12
    torch.testing.assert_close(total / 12, torch.tensor(math.log(2), dtype=torch.float64))
    assert drawn[:4] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert not {(0, 1), (1, 0)} & set(drawn)
    assert {(2, 3), (3, 2)} <= set(drawn[4:])  # the other's text is nearer than anything else


def test_matching_without_a_negative_is_finite():
    batch = pairs_batch(2, groups=[1, 1])
    output = output_of(unit(2), unit(2, seed=1), lambda images, texts: torch.zeros(len(images)))
    assert Matching().count(batch) == 2
    assert float(Matching()(output, batch)) == pytest.approx(2 * math.log(2))


def test_fewer_than_one_negative_is_refused():
    with pytest.raises(OptionError, match="num_negatives must be at least 1, found 0"):
        Contrastive(num_negatives=0)


def embeddings(image: torch.Tensor, text: torch.Tensor, groups: list[int]) -> Embeddings:
    return Embeddings(image, text, torch.tensor(groups), [f"{row:03}" for row in range(len(groups))])


def test_recall_counts_any_caption_of_an_image_and_each_image_once():
    image = torch.eye(3)[[0, 0, 1, 2]]
    text = torch.eye(3)[[0, 1, 1, 2]]  # the second caption of image 0 looks like image 1
    found = recalls(embeddings(image, text, [7, 7, 8, 9]))
    assert found["image_to_text_r1"] == pytest.approx(2 / 3)  # image 1 ties with the stray caption
    assert found["text_to_image_r1"] == pytest.approx(3 / 4)
    assert found["image_to_text_r5"] == found["text_to_image_r5"] == 1
    assert found["chance_r1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_collapsed_or_broken_embeddings_recall_nothing(value):
    found = recalls(embeddings(torch.full((20, 4), value), torch.full((20, 4), value), list(range(20))))
    assert found["image_to_text_r10"] == found["text_to_image_r10"] == 0


@pytest.mark.parametrize(("num_pairs", "dim"), [(5, 64), (9, 128), (11, 512)])
def test_equal_vectors_recall_nothing_although_their_similarities_differ_by_rounding(num_pairs, dim):
    image, text = (unit(1, dim, seed=seed).expand(num_pairs, -1).contiguous() for seed in (0, 1))
    found = recalls(embeddings(image, text, list(range(num_pairs))))
    assert found["image_to_text_r1"] == found["text_to_image_r1"] == 0


def test_random_embeddings_recall_at_chance():
    found = recalls(embeddings(unit(1500, 16), unit(1500, 16, seed=1), list(range(1500))))
    assert found["chance_r1"] == 1 / 1500
    assert found["image_to_text_r10"] == pytest.approx(10 / 1500, abs=0.006)


def test_candidate_loss_is_about_a_fixed_number_of_candidates():
    scale = torch.tensor(0.0)
    for num_pairs in (8, 20, 33):
        part = embeddings(unit(num_pairs), unit(num_pairs, seed=1), list(range(num_pairs)))
        assert candidate_losses(part, scale, num_candidates=8)["loss"] == pytest.approx(math.log(8))
    assert math.isnan(candidate_losses(embeddings(unit(2), unit(2), [3, 3]), scale)["loss"])


def test_candidate_losses_tell_the_directions_apart():
    image, text = unit(4), unit(4, seed=1)
    logits = 5 * image @ text.T
    found = candidate_losses(embeddings(image, text, [0, 1, 2, 3]), torch.tensor(5.0), num_candidates=4)
    assert found["image_to_text_loss"] == pytest.approx(
        float(F.cross_entropy(logits, torch.arange(4))), rel=1e-5
    )
    assert found["text_to_image_loss"] == pytest.approx(
        float(F.cross_entropy(logits.T, torch.arange(4))), rel=1e-5
    )
    assert found["loss"] == pytest.approx((found["image_to_text_loss"] + found["text_to_image_loss"]) / 2)
    short = embeddings(image.bfloat16(), text.bfloat16(), [0, 1, 2, 3])  # as of a model in bf16
    same = embeddings(short.image.float(), short.text.float(), [0, 1, 2, 3])
    assert candidate_losses(short, torch.tensor(5.0)) == candidate_losses(same, torch.tensor(5.0))


def test_held_out_figures_do_not_depend_on_the_batches():
    image, text = unit(12), unit(12, seed=1)
    batch = pairs_batch(12, groups=[0, 0, 1, 1, *range(2, 10)])

    def measure(cuts: list[list[int]]) -> dict[str, float]:
        parts = []
        for rows in cuts:
            part = dataclasses.replace(
                pairs_batch(len(rows)),
                groups=batch.groups[rows],
                record_ids=[batch.record_ids[row] for row in rows],
            )
            parts.append(of_pairs(part, image[rows], text[rows]))
        together = joined(parts)
        return {**recalls(together), **candidate_losses(together, torch.tensor(5.0), num_candidates=5)}

    assert measure([list(range(12))]) == measure([[11, 3, 5], [0, 1, 2, 4], [10, 9, 8, 7, 6]])


def test_retrieval_without_pairs_is_refused():
    batch = make_batch([(3, 0, 0), (0, 16, 16)])
    with pytest.raises(DataError, match="no held-out sample has both an image and a text"):
        joined([of_pairs(batch, unit(2), unit(2))])
