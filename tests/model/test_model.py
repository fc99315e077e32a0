"""The fusion model: padding never matters, a missing modality is finite, any encoder fits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from mmlab.errors import DataError, OptionError
from mmlab.model.encoders import ViT
from mmlab.model.fusion import MultimodalFusion
from mmlab.model.fusion_model import rows_of
from mmlab.model.huggingface import LossModel
from mmlab.model.presets import PRESETS, build_model
from mmlab.types import Batch
from tests.batches import make_batch, pad_more


def embed(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    rows = torch.arange(len(batch))
    with torch.no_grad():
        output = model.eval()(batch)
        return output.image_embedding, output.text_embedding, output.match(rows, rows.flip(0))


SIZES = [(5, 64, 48), (9, 32, 80), (2, 40, 24)]  # the last is no multiple of the patch


@pytest.mark.parametrize("image", ["vit", "conv-vit"])
def test_padding_never_changes_a_vit_models_outputs(image):
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, image=image).double()
    batch = make_batch(SIZES)
    expected = embed(model, batch)
    for padded in (
        pad_more(batch, tokens=6, height=48, width=16),
        pad_more(batch, tokens=3, height=16, width=32, noise=True),
    ):
        for before, after in zip(expected, embed(model, padded), strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_a_sample_alone_has_the_embedding_that_it_has_in_a_batch():
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50).double()
    together = embed(model, make_batch([*SIZES]))
    alone = embed(model, make_batch(SIZES[:1]))
    torch.testing.assert_close(alone[0], together[0][:1], rtol=0, atol=1e-12)
    torch.testing.assert_close(alone[1], together[1][:1], rtol=0, atol=1e-12)


def test_padding_content_never_changes_a_resnet_models_outputs():
    torch.manual_seed(0)
    model = build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1).double()
    batch = make_batch([(5, 64, 48), (9, 32, 80)])
    padded = pad_more(batch, tokens=2, height=32, width=32)
    noisy = pad_more(batch, tokens=2, height=32, width=32, noise=True)
    for quiet, loud in zip(embed(model, padded), embed(model, noisy), strict=True):
        torch.testing.assert_close(loud, quiet, rtol=0, atol=1e-12)


@pytest.mark.parametrize("image", ["vit", "conv-vit"])
def test_a_missing_modality_gives_finite_outputs_and_gradients(image):
    model = build_model("tiny", vocab_size=50, image=image)
    batch = make_batch([(5, 32, 32), (0, 32, 48), (4, 0, 0), (0, 0, 0)])
    output = model(batch)
    rows = torch.arange(4)
    loss = output.image_embedding.sum() + output.text_embedding.sum() + output.match(rows, rows.flip(0)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_rows_that_are_matched_several_times_always_get_the_same_gradient():
    """Threads that add to one row must not race: the sum of floats depends on their order."""
    draw, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    features, rows = torch.randn(32, 64, 128, generator=draw), torch.arange(96) % 32
    out = torch.randn(96, 64, 128, generator=draw)
    assert torch.equal(rows_of(features, rows), features[rows])
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(20):
            leaf = features.clone().requires_grad_()
            rows_of(leaf, rows).backward(out)
            gradients.append(leaf.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_a_batch_without_a_single_pixel_or_token_goes_through():
    batch = make_batch([(3, 32, 32)] * 2)
    empty = dataclasses.replace(
        batch,
        pixel_values=batch.pixel_values[..., :0, :0],
        pixel_mask=batch.pixel_mask[..., :0, :0],
        input_ids=batch.input_ids[:, :0],
        attention_mask=batch.attention_mask[:, :0],
    )
    for values in embed(build_model("tiny", vocab_size=50), empty):
        assert values.isfinite().all()


def test_embeddings_have_length_one_and_the_batchs_size():
    image, text, logits = embed(build_model("tiny", vocab_size=50, embed_dim=24), make_batch(SIZES))
    assert image.shape == text.shape == (3, 24)
    assert logits.shape == (3,)
    torch.testing.assert_close(image.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(text.norm(dim=1), torch.ones(3))


def test_position_matters_in_image_and_text():
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50)
    batch = make_batch([(6, 64, 64)])
    moved = dataclasses.replace(
        batch, pixel_values=batch.pixel_values.flip(-1), input_ids=batch.input_ids.flip(-1)
    )
    for before, after in zip(embed(model, batch)[:2], embed(model, moved)[:2], strict=True):
        assert (before - after).abs().max() > 1e-4


def test_the_articles_constructor_fuses_features_under_a_mask():
    torch.manual_seed(0)
    fusion = MultimodalFusion(img_dim=768, text_dim=768)
    images, texts = torch.randn(2, 9, 768), torch.randn(2, 7, 768)
    mask = torch.tensor([[True] * 4 + [False] * 3, [False] * 7])
    fused = fusion(images, texts, mask)
    assert fused.shape == (2, 9, 512)
    assert fused.isfinite().all()
    other = torch.where(mask[..., None], texts, torch.randn(2, 7, 768))
    torch.testing.assert_close(fusion(images, other, mask), fused)
    torch.testing.assert_close(fusion(images[:1], texts[:1, :4]), fused[:1], rtol=1e-5, atol=1e-5)


def test_hugging_face_encoders_take_any_image_size():
    from transformers import (
        BertConfig,
        BertModel,
        CLIPVisionConfig,
        CLIPVisionModel,
        ConvNextConfig,
        ConvNextModel,
        ResNetConfig,
        ResNetModel,
    )

    text = BertModel(
        BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    )
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=16,
        )
    )
    convolutional = ResNetModel(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )
    deep = ConvNextModel(
        ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    )  # cells of 32 pixels
    for image in (vision, convolutional, deep):
        model = build_model("tiny", vocab_size=50, image_encoder=image, text_encoder=text)
        for height, width in ((112, 112), (64, 80), (80, 64)):
            features, mask = model.image_encoder(
                torch.zeros(1, 3, height, width), torch.ones(1, height, width) > 0
            )
            assert (mask.shape, bool(mask.all())) == (features.shape[:2], True)
        batch = make_batch([(5, 64, 48), (0, 0, 0)])
        noisy = pad_more(batch, tokens=0, height=0, width=0, noise=True)
        for quiet, loud in zip(embed(model, batch), embed(model, noisy), strict=True):
            assert quiet.isfinite().all()
            torch.testing.assert_close(loud, quiet)


def test_pretrained_encoders_load_by_path(tmp_path):
    from transformers import BertConfig, BertModel

    BertModel(
        BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    ).save_pretrained(tmp_path)
    model = build_model("tiny", vocab_size=50, text_encoder=str(tmp_path))
    assert model.text_encoder.dim == 32
    given = build_model("tiny", vocab_size=50, text_encoder=BertModel.from_pretrained(tmp_path))
    for built in (model, given):
        assert all(module.training for module in built.modules())


def test_pixels_are_normalised_as_by_the_image_processor_that_is_saved_with_an_encoder(tmp_path):
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(image_size=32, **sizes)).save_pretrained(tmp_path)
    without = build_model("tiny", vocab_size=50, image_encoder=str(tmp_path))
    torch.testing.assert_close(without.pixel_mean, build_model("tiny", vocab_size=50).pixel_mean)

    processor = ViTImageProcessor(
        image_mean=[0.5] * 3, image_std=[0.25] * 3, size={"height": 32, "width": 32}
    )
    processor.save_pretrained(tmp_path)
    pixels = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    wanted = processor(pixels[0], return_tensors="pt")["pixel_values"]
    for encoder in (str(tmp_path), ViTModel.from_pretrained(tmp_path)):
        model, seen = build_model("tiny", vocab_size=50, image_encoder=encoder), []
        taken = model.image_encoder.model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(kwargs["pixel_values"]), with_kwargs=True
        )
        model.encode_image(pixels, torch.ones(1, 32, 32, dtype=torch.bool))
        taken.remove()
        torch.testing.assert_close(seen[0], wanted)


def test_what_cannot_be_built_says_why():
    with pytest.raises(OptionError, match="unknown model preset 'tny'; did you mean 'tiny'"):
        build_model("tny", vocab_size=50)
    with pytest.raises(OptionError, match=r"dropout must be below 1, found 2"):
        build_model("tiny", vocab_size=50, dropout=2)
    with pytest.raises(OptionError, match="head_dim must divide text_dim, found 64 for width 32"):
        build_model("resnet18", vocab_size=50, text_dim=32)
    with pytest.raises(OptionError, match="'/no/such/folder' is no encoder that transformers can load"):
        build_model("tiny", vocab_size=50, image_encoder="/no/such/folder")
    with pytest.raises(OptionError, match="unknown torchvision ResNet 'resnet19'"):
        build_model("tiny", vocab_size=50, image="resnet19")
    with pytest.raises(OptionError, match="num_heads must divide hidden_dim, found 3 heads for width 512"):
        MultimodalFusion(num_heads=3)
    with pytest.raises(OptionError, match="takes x; expected input_ids or pixel_values"):
        LossModel(_TakesX())


def test_a_text_longer_than_the_position_table_is_refused():
    with pytest.raises(DataError, match="a text has 9 tokens, the text encoder takes 8"):
        build_model("tiny", vocab_size=50, max_tokens=8)(make_batch(SIZES))


def test_every_preset_builds_and_counts_its_weights():
    with torch.device("meta"):
        sizes = {
            name: sum(weight.numel() for weight in build_model(name, vocab_size=30_522).parameters())
            for name in PRESETS
        }
    assert sizes["tiny"] < sizes["small"] < sizes["base"]
    assert 150e6 < sizes["base"] < 220e6


class _TakesX(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("num_heads", [0, -8])
def test_no_heads_are_refused(num_heads):
    with pytest.raises(OptionError, match=f"num_heads must divide hidden_dim, found {num_heads} heads"):
        MultimodalFusion(hidden_dim=512, num_heads=num_heads)
    with pytest.raises(OptionError, match="ViT width must be a multiple of 4 x num_heads"):
        ViT(dim=32, depth=1, num_heads=num_heads)


@pytest.mark.parametrize("vocab_size", [0, -5, "x", 100.5])
def test_a_vocabulary_of_an_impossible_size_is_refused(vocab_size):
    with pytest.raises(OptionError, match="vocab_size must be"):
        build_model("tiny", vocab_size=vocab_size)
