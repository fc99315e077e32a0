"""A compiled model trains as the model does, in few variants; memory order changes no loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mmlab.errors import OptionError
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.compiling import compiled
from mmlab.model.encoders import ViT
from mmlab.model.fusion import masked_mean
from mmlab.model.presets import build_model
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from tests.batches import make_batch

TINY = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}
SHAPES = [[(4, 32, 48), (9, 16, 16)], [(3, 48, 32)] * 3, [(7, 48, 48)] * 4, [(5, 64, 64)] * 5]


class MeanColour(nn.Module):
    """Small enough to compile in a test."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, pixel_values):
        return (self.layer(pixel_values.mean((2, 3))) - 1).square().mean()


def forget() -> None:
    """What was compiled."""
    torch._dynamo.reset()
    counters.clear()


def num_variants() -> int:
    """Graphs compiled since then."""
    return counters["stats"]["unique_graphs"]


def losses(make, backend: bool | str, shapes=SHAPES) -> tuple[list[float], FusionTrainer]:
    forget()
    torch.manual_seed(0)
    trainer = FusionTrainer(make(), lr=1e-2, device="cpu", compile=backend)
    return [trainer.train_step([make_batch(shape)])["loss"] for shape in shapes], trainer


def test_compiled_code_gives_the_same_losses_in_one_variant():
    found, _ = losses(MeanColour, True, SHAPES[:3])
    assert num_variants() == 1
    expected, _ = losses(MeanColour, False, SHAPES[:3])
    assert found == pytest.approx(expected, rel=1e-4)


def test_one_variant_of_the_fusion_model_serves_all_shapes():
    """Traced as for any backend, and then run as it was traced: compilation takes minutes."""

    def make():
        return build_model("tiny", vocab_size=50, **TINY)

    found, trainer = losses(make, "eager")
    assert num_variants() == 1
    expected, _ = losses(make, False)
    assert found == pytest.approx(expected, rel=1e-4)
    assert not any("_orig_mod" in name for name in trainer.state_dict()["model"])


class Block(nn.Module):
    """One block of an image encoder, and a loss."""

    def __init__(self):
        super().__init__()
        self.encoder = ViT(dim=32, depth=1, num_heads=2)

    def forward(self, batch):
        features, mask = self.encoder(batch.pixel_values / 255, batch.pixel_mask)
        return (masked_mean(features, mask) - 1).square().mean()


def test_compiled_and_checkpointed_in_16_bits_the_gradient_is_the_same():
    forget()
    torch.manual_seed(0)
    model, batch = Block(), make_batch(SHAPES[0])
    call = compiled(model, torch.device("cpu"), "aot_eager")

    def gradient(call):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            call(batch).backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    expected = gradient(model)
    enable_checkpointing(model)
    found = gradient(call)
    assert num_variants() == 1
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_what_cannot_be_compiled_says_why(monkeypatch):
    options = {"device": "cpu"}
    with pytest.raises(
        OptionError, match=r"unknown backend of torch.compile 'inducto'; did you mean 'inductor'"
    ):
        FusionTrainer(MeanColour(), compile="inducto", **options)
    with pytest.raises(OptionError, match="cannot see into compile=True"):
        FusionTrainer(MeanColour(), compile=True, live=LiveBytes(), **options)
    resnet = build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1)
    with pytest.raises(
        OptionError,
        match=r"'eager' of torch\.compile would update the running statistics of checkpointed blocks twice",
    ):
        FusionTrainer(resnet, compile="eager", checkpointing=True, **options)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OptionError, match=r"needs a C\+\+ compiler, .*or use compile=False"):
        FusionTrainer(MeanColour(), compile=True, **options)


def test_memory_order_changes_no_loss():
    found = {}
    for channels_last in (False, True):
        torch.manual_seed(0)
        model = build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1)
        trainer = FusionTrainer(model, device="cpu", channels_last=channels_last)
        found[channels_last] = [trainer.train_step([make_batch(shape)])["loss"] for shape in SHAPES[2:4]]
    assert found[True] == pytest.approx(found[False], rel=1e-3)
    assert model.image_encoder.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
