"""Masked language modelling: what is hidden, what it is told from, and sums that do not depend on the batches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mmlab.data.text import load_tokenizer
from mmlab.errors import OptionError
from mmlab.model.fusion_model import FusionOutput
from mmlab.model.fusions import FUSIONS
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.losses.names import parse_objectives
from mmlab.types import Batch
from tests.batches import make_batch, merge

MASK = 4
SMALL = {
    "image_dim": 32,
    "image_depth": 1,
    "text_dim": 32,
    "text_depth": 1,
    "hidden_dim": 32,
    "embed_dim": 16,
}


def make_model(**options):
    torch.manual_seed(0)
    return build_model("tiny", vocab_size=50, **SMALL, **options).double()


class Asked:
    """Keeps what a model's output was asked, and answers with ones."""

    def __init__(self, batch: Batch):
        rows = torch.arange(len(batch))
        self.output = FusionOutput(rows, rows, rows, (rows, rows, rows, rows), matcher=None, predictor=self)

    def __call__(self, image, image_mask, masked_ids, attention_mask, positions, targets):
        self.masked_ids, self.positions, self.targets = masked_ids, positions, targets
        return torch.ones(targets.shape, dtype=torch.float64)


@pytest.mark.parametrize("mask_ratio", [0.15, 0.5, 1.0])
def test_the_count_is_the_number_of_hidden_tokens_and_none_is_special(mask_ratio):
    batch = make_batch([(20, 16, 16), (1, 16, 16), (0, 16, 16), (7, 0, 0), (30, 0, 0)], vocab_size=9)
    objective = MaskedLanguage(mask_id=MASK, special_ids=(0, 1, 2, 3, MASK), mask_ratio=mask_ratio)
    ids = batch.input_ids.clone()
    asked = Asked(batch)
    total = objective(asked.output, batch)
    hidden = asked.masked_ids != ids
    can_hide = (batch.attention_mask & (ids > MASK)).sum(1)
    expected = [max(1, round(mask_ratio * number)) if number else 0 for number in can_hide.tolist()]
    assert hidden.sum(1).tolist() == expected
    assert objective.count(batch) == sum(expected) == total
    assert (asked.masked_ids[hidden] == MASK).all()
    assert (ids[hidden] > MASK).all()
    assert torch.equal(asked.targets, ids.gather(1, asked.positions))
    assert torch.equal(batch.input_ids, ids)


def test_which_tokens_are_hidden_follows_from_torchs_generator():
    batch, objective = make_batch([(20, 16, 16)] * 4), MaskedLanguage(mask_id=MASK)
    seen = []
    for seed in (0, 0, 1):
        asked = Asked(batch)
        torch.manual_seed(seed)
        objective(asked.output, batch)
        seen.append(asked.masked_ids)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_sample_weights_scale_the_sum_and_leave_the_count():
    batch, objective = make_batch([(20, 16, 16)] * 2), MaskedLanguage(mask_id=MASK)
    weighted = dataclasses.replace(batch, weights=torch.tensor([2.0, 0.5]))
    assert objective(Asked(weighted).output, weighted) == 3 * 2.5
    assert objective.count(weighted) == objective.count(batch) == 6


def told(model, batch: Batch, position: int = 1) -> torch.Tensor:
    positions = torch.full((len(batch), 1), position)
    masked = batch.input_ids.index_fill(1, positions[0], MASK)
    return model(batch).token_losses(
        masked, batch.attention_mask, positions, batch.input_ids.gather(1, positions)
    )


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_token_is_told_from_image_and_text_and_never_from_itself(fusion):
    model, batch = make_model(fusion=fusion).eval(), make_batch([(5, 32, 32), (6, 32, 16)])
    before = told(model, batch)
    darker = dataclasses.replace(batch, pixel_values=batch.pixel_values // 2)
    assert ((told(model, darker) - before).abs() > 1e-9).all()
    reworded = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    reworded.input_ids[:, 3] = 7
    assert ((told(model, reworded) - before).abs() > 1e-9).all()

    positions, every_token = torch.ones(2, 50, dtype=torch.int64), torch.arange(50).expand(2, -1)
    masked = batch.input_ids.index_fill(1, positions[0], MASK)
    other = dataclasses.replace(batch, input_ids=batch.input_ids.index_fill(1, positions[0], 9))
    losses = [
        model(one).token_losses(masked, batch.attention_mask, positions, every_token)
        for one in (batch, other)
    ]
    assert torch.equal(*losses)  # the whole text is in the output, but not in what tells the token
    torch.testing.assert_close(losses[0].neg().exp().sum(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [[(0, 16, 16), (0, 16, 16)], [(0, 0, 0)]])
def test_without_a_text_nothing_is_learnt_and_nothing_breaks(sizes):
    model, objective, batch = make_model(), MaskedLanguage(mask_id=MASK), make_batch(sizes)
    no_columns = {name: getattr(batch, name)[:, :0] for name in ("input_ids", "attention_mask")}
    for one in (batch, dataclasses.replace(batch, **no_columns)):
        assert objective.count(one) == 0
        total = objective(model(one), one)
        total.backward()
        assert total == 0
        assert not any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def gradients(batches: list[Batch], accumulation: int) -> list[torch.Tensor]:
    """Of one step with every token hidden, so that no draw depends on how the samples are cut."""
    trainer = FusionTrainer(
        make_model(),
        objectives={"masked_language": MaskedLanguage(mask_id=MASK, mask_ratio=1.0)},
        device="cpu",
        accumulation_steps=accumulation,
    )
    seen: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(
            weight.grad.clone() for weight in trainer.parameters if weight.grad is not None
        )
    )
    trainer.max_grad_norm = 1e9
    trainer.train_step(batches)
    return seen


def test_accumulation_gives_the_gradient_of_one_batch_whatever_the_numbers_of_tokens():
    batches = [
        make_batch([(9, 32, 16), (3, 16, 16)]),
        make_batch([(2, 0, 0)], seed=1),
        make_batch([(14, 16, 32)], seed=2),
    ]
    for apart, together in zip(gradients(batches, 3), gradients([merge(batches)], 1), strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-9, atol=1e-12)


def test_text_only_samples_teach():
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **SMALL)
    batch = make_batch([(6, 0, 0)] * 8)
    batch.input_ids = torch.arange(5, 11).expand(8, -1) + 6 * (torch.arange(8) % 4)[:, None]
    objective = MaskedLanguage(mask_id=MASK, special_ids=(MASK,))
    trainer = FusionTrainer(
        model, objectives={"masked_language": objective}, device="cpu", lr=3e-3, warmup_ratio=0
    )
    losses = [trainer.train_step([batch])["masked_language_loss"] for _ in range(150)]
    assert losses[0] == pytest.approx(math.log(50), abs=0.5)
    assert sum(losses[-5:]) / 5 < 0.5


def test_a_token_that_only_the_image_shows_is_learnt():
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **SMALL)
    batch = make_batch([(3, 16, 16)] * 8)
    colour = torch.arange(8) % 4
    batch.pixel_values = (80 * colour).to(torch.uint8)[:, None, None, None].expand(-1, 3, 16, 16)
    batch.input_ids = torch.stack([torch.full((8,), 2), 10 + colour, torch.full((8,), 3)], dim=1)
    objective = MaskedLanguage(mask_id=MASK, special_ids=(2, 3, MASK))
    trainer = FusionTrainer(
        model, objectives={"masked_language": objective}, device="cpu", lr=3e-3, warmup_ratio=0
    )
    losses = [trainer.train_step([batch])["masked_language_loss"] for _ in range(50)]
    assert losses[-1] < 0.5 * math.log(4)


def test_the_tokenizer_names_mask_and_special_tokens(records):
    tokenizer = load_tokenizer(records=records)
    objective = MaskedLanguage.of(tokenizer)
    assert objective.mask_id == tokenizer.mask_token_id
    assert set(objective.special_ids) == {0, 1, 2, 3, 4}


def test_what_cannot_be_hidden_says_why():
    with pytest.raises(
        OptionError, match=r"mask_id must be the tokenizer's mask token; give objectives=.*MaskedLanguage.of"
    ):
        parse_objectives(make_model(), ["masked_language"])
    with pytest.raises(OptionError, match=r"mask_ratio must be above 0, found 0"):
        MaskedLanguage(mask_id=MASK, mask_ratio=0.0)
    with pytest.raises(OptionError, match=r"mask_ratio must be a number, found None"):
        MaskedLanguage(mask_id=MASK, mask_ratio=None)
    for mask_id in (-1, 1.5):
        with pytest.raises(OptionError, match="mask_id must be"):
            MaskedLanguage(mask_id=mask_id)
    with pytest.raises(OptionError, match="mask_id must be"):
        MaskedLanguage.of(object())
    batch = make_batch([(3, 16, 16)])
    output = dataclasses.replace(make_model()(batch), predictor=None)
    with pytest.raises(OptionError, match="the text encoder has no `embedding`"):
        MaskedLanguage(mask_id=MASK)(output, batch)
