"""Every fusion: padding has no effect, a missing modality is finite and known as missing, both modalities are read."""

from __future__ import annotations

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.model.encoders import ResNet, ViT
from mmlab.model.fusions import FUSIONS, Gates, LateFusion
from mmlab.model.presets import build_model
from mmlab.types import Batch
from tests.batches import make_batch, pad_more

SIZES = [(5, 64, 48), (9, 32, 80), (2, 40, 24)]
SMALL = {"image_dim": 32, "text_dim": 32, "hidden_dim": 32, "embed_dim": 16, "head_dim": 8}


def make_model(fusion: str, **options):
    torch.manual_seed(0)
    return build_model("tiny", vocab_size=50, fusion=fusion, **{**SMALL, **options}).double()


def outputs(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every image with every text, and losses of each text's first token."""
    images, texts = torch.meshgrid(torch.arange(len(batch)), torch.arange(len(batch)), indexing="ij")
    first = torch.zeros(len(batch), 1, dtype=torch.int64)
    output = model(batch)
    told = output.token_losses(
        batch.input_ids.index_fill(1, first[0], 4), batch.attention_mask, first, batch.input_ids[:, :1]
    )
    return output.match(images.flatten(), texts.flatten()).view(len(batch), -1), told


@pytest.mark.parametrize("fusion", FUSIONS)
def test_padding_never_changes_an_output(fusion):
    model, batch = make_model(fusion).eval(), make_batch(SIZES)
    expected = outputs(model, batch)
    for padded in (
        pad_more(batch, tokens=6, height=48, width=16),
        pad_more(batch, tokens=3, height=16, width=32, noise=True),
    ):
        for before, after in zip(expected, outputs(model, padded), strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_match_depends_on_image_and_text_and_on_the_pair(fusion):
    match, _ = outputs(make_model(fusion).eval(), make_batch(SIZES))
    assert match.std(0).min() > 1e-5
    assert match.std(1).min() > 1e-5
    interaction = match[0, 0] - match[0, 1] - match[1, 0] + match[1, 1]  # zero for a sum of two scores
    assert interaction.abs() > 1e-6


@pytest.mark.parametrize(
    ("fusion", "image"), [*((name, "conv-vit") for name in FUSIONS), ("multiscale", "resnet18")]
)
def test_a_missing_modality_is_finite_and_what_stands_in_its_place_says_nothing(fusion, image):
    model = make_model(fusion, image=image)
    sizes = [(5, 32, 32), (0, 32, 48), (4, 0, 0), (0, 0, 0)]
    match, told = outputs(model, make_batch(sizes))
    (match.sum() + told.sum()).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    assert match.isfinite().all()
    assert told.isfinite().all()
    model.eval()
    quiet, _ = outputs(model, make_batch(sizes))
    loud, _ = outputs(model, pad_more(make_batch(sizes), tokens=0, height=0, width=0, noise=True))
    torch.testing.assert_close(loud, quiet, rtol=0, atol=1e-12)
    assert (quiet[2:, 0] - quiet[2:, 2]).abs().min() > 1e-7  # the text is read where the image is missing


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_weight_of_a_fusion_learns(fusion):
    model = make_model(fusion)
    match, told = outputs(model, make_batch([*SIZES, (3, 0, 0), (0, 16, 16)]))
    (match.square().sum() + told.sum()).backward()
    idle = [
        name
        for name, weight in model.fusion.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert idle == []


def test_levels_end_with_the_encoders_own_features():
    torch.manual_seed(0)
    batch = make_batch(SIZES)
    pixels = batch.pixel_values.float() / 255
    for encoder in (ViT(dim=32, depth=5, num_heads=2), ResNet("resnet18")):
        encoder.eval()
        levels, mask = encoder.levels(pixels, batch.pixel_mask, num_levels=3)
        features, same_mask = encoder(pixels, batch.pixel_mask)
        assert torch.equal(levels[-1], features)
        assert torch.equal(mask, same_mask)
        assert [level.shape[2] for level in levels] == encoder.level_dims(3)
        assert {level.shape[:2] for level in levels} == {mask.shape}
    text = make_model("cross").float().eval().text_encoder
    levels = text.levels(batch.input_ids, batch.attention_mask, num_levels=2)
    torch.testing.assert_close(levels[-1], text(batch.input_ids, batch.attention_mask))
    assert len(levels) == len(text.level_dims(2)) == 2
    assert not torch.equal(levels[0], levels[1])


def test_a_coarser_level_is_the_mean_of_its_real_positions():
    from mmlab.model.encoders import _coarser

    grid = torch.arange(12.0).view(1, 1, 3, 4)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool).view(1, 1, 3, 4)
    means = _coarser(grid * mask, mask, 2)
    assert means.flatten().tolist() == [(0 + 1 + 4 + 5) / 4, 2.0, 0.0, 0.0]


def test_gates_begin_even_and_choose_by_position():
    torch.manual_seed(0)
    gates = Gates([4, 4], 3)
    levels = [torch.randn(1, 2, 4), torch.randn(1, 2, 4)]
    one, other = (
        project(norm(level))
        for project, norm, level in zip(gates.projections, gates.norms, levels, strict=True)
    )
    torch.testing.assert_close(gates(levels), (one + other) / 2)
    with torch.no_grad():
        gates.gates[0].bias.fill_(50.0)
    torch.testing.assert_close(gates(levels), one)


def test_multiscale_reads_the_lower_levels():
    torch.manual_seed(0)
    model = make_model("multiscale", image_depth=3).eval()
    batch = make_batch(SIZES)
    before, _ = outputs(model, batch)
    with torch.no_grad():
        model.fusion.mix_images.projections[0].weight.zero_()
    after, _ = outputs(model, batch)
    assert (before - after).abs().max() > 1e-6


def test_late_fusion_multiplies_what_each_modality_became():
    torch.manual_seed(0)
    fusion = LateFusion(8, 8, hidden_dim=16)
    image, text = torch.randn(2, 16), torch.randn(2, 16)
    torch.testing.assert_close(fusion.combine(2 * image, text).shape, text.shape)
    torch.testing.assert_close(
        fusion.combine(image, text), fusion.image_layers(image) * fusion.text_layers(text)
    )


def test_what_cannot_be_fused_says_why():
    from transformers import ResNetConfig, ResNetModel

    with pytest.raises(OptionError, match="unknown fusion 'gate'; did you mean 'gated'"):
        make_model("gate")
    with pytest.raises(OptionError, match="multiscale fusion needs num_levels of at least 2, found 1"):
        make_model("multiscale", fusion_levels=1)
    convolutional = ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )
    with pytest.raises(OptionError, match=r"ResNetModel has no layers of one width.*choose another fusion"):
        build_model("tiny", vocab_size=50, image_encoder=convolutional, fusion="multiscale")
