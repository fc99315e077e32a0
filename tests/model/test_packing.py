"""Packed execution: the same outputs and gradients as padded, and samples that cannot see each other."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.model.packing import enable_packing
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from tests.batches import make_batch

SIZES = [(4, 32, 48), (19, 16, 16), (3, 48, 32), (6, 0, 0), (0, 16, 64), (7, 48, 48)]
SMALL = {
    "image_dim": 64,
    "image_depth": 2,
    "text_dim": 64,
    "text_depth": 2,
    "head_dim": 16,
    "hidden_dim": 64,
    "embed_dim": 32,
}


def models(preset: str = "small", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    padded = build_model(preset, vocab_size=50, **{**SMALL, **changes}).to(dtype)
    return padded, enable_packing(copy.deepcopy(padded))


def outputs(model, batch):
    output = model(batch)
    rows = torch.arange(len(batch))
    return output.image_embedding, output.text_embedding, output.match(rows, rows.flip(0))


def keep_gradient(trainer, seen, *_):
    gradients = [weight.grad for weight in trainer.parameters if weight.grad is not None]
    seen.append(torch.cat([gradient.flatten().double() for gradient in gradients]))


@pytest.mark.parametrize("preset", ["small", "tiny"])
@pytest.mark.parametrize("fusion", ["cross", "multiscale"])
def test_packed_and_padded_give_the_same_outputs(preset, fusion):
    padded, packed = models(preset, fusion=fusion)
    batch = make_batch(SIZES)
    whole = torch.tensor([row for row, size in enumerate(SIZES) if size[0] and size[1]])
    for found, expected in zip(outputs(packed, batch), outputs(padded, batch), strict=True):
        torch.testing.assert_close(found[whole], expected[whole], rtol=1e-10, atol=1e-12)
        assert found.isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_and_padded_give_the_same_loss_and_gradient(dtype, tolerance, checkpointing):
    objectives = {"contrastive": Contrastive(), "matching": Matching()}
    results = []
    for model in models(dtype=dtype):
        trainer = FusionTrainer(model, device="cpu", objectives=objectives, checkpointing=checkpointing)
        seen: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(partial(keep_gradient, trainer, seen))
        values = trainer.train_step([make_batch(SIZES)])
        results.append((values["loss"], seen[0]))
    (loss, gradient), (packed_loss, packed_gradient) = results
    assert packed_loss == pytest.approx(loss, rel=tolerance)
    assert float((packed_gradient - gradient).norm() / gradient.norm()) <= tolerance


def test_samples_of_a_stream_do_not_see_each_other():
    _, packed = models()
    batch = make_batch(SIZES)
    before = packed(batch)
    pixels, ids = batch.pixel_values.clone(), batch.input_ids.clone()
    pixels[2], ids[1] = 255 - pixels[2], (ids[1] + 7) % 50
    after = packed(dataclasses.replace(batch, pixel_values=pixels, input_ids=ids))
    moved = (after.image_embedding - before.image_embedding).norm(dim=1)
    assert moved[2] > 0
    assert (moved[[0, 1, 4, 5]] == 0).all()
    moved = (after.text_embedding - before.text_embedding).norm(dim=1)
    assert moved[1] > 0
    assert (moved[[0, 2, 3, 5]] == 0).all()


def test_a_resnet_cannot_be_packed():
    model = build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1, head_dim=16)
    with pytest.raises(OptionError, match="cannot be packed: image_encoder ResNet"):
        enable_packing(model)
