"""Any model: Hugging Face's and one's own train under every padded scheduler, with the model's processor or ours."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mmlab
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError, OptionError
from mmlab.loading.loader import PlannedLoader
from mmlab.model.huggingface import LossModel
from mmlab.model.huggingface_encoders import HuggingFaceImages
from mmlab.model.presets import build_model
from mmlab.schedule.cost import MaxPolynomial
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.types import IGNORED, Aspect, Square, processor_policy
from tests.batches import make_batch, merge

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIDE = 32
BYTES = MaxPolynomial([[0.0, 1.0, 0.01]], [(0, 0, 0), (1, 1, 0), (1, 0, 1)], unit="bytes")
SECONDS = MaxPolynomial([[0.03, 1e-5]], [(0, 0, 0), (1, 0, 1)], unit="seconds")
OPTIONS = {
    "budget": {"budget": 600},
    "memory": {"cost": BYTES, "budget": 300},
    "fastest": {"budget": 600, "time": SECONDS},
}
PADDED = [name for name in SCHEDULERS if name != "packed"]


def clip(tokenizer):
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": len(tokenizer), "eos_token_id": getattr(tokenizer, "sep_token_id", 3), **SMALL}
    vision = {"image_size": SIDE, "patch_size": 16, **SMALL}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def vilt(tokenizer):
    from transformers import ViltConfig, ViltForMaskedLM

    sizes = {"image_size": SIDE, "patch_size": 16, "max_position_embeddings": 64}
    return ViltForMaskedLM(ViltConfig(vocab_size=len(tokenizer), **sizes, **SMALL, **QUIET))


def blip(tokenizer):
    from transformers import BlipConfig, BlipForConditionalGeneration

    ids = {"bos_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id, "pad_token_id": 0}
    text = {"vocab_size": len(tokenizer), "encoder_hidden_size": 16, "projection_dim": 16, **ids, **SMALL}
    vision = {"image_size": SIDE, "patch_size": 16, **SMALL}
    return BlipForConditionalGeneration(
        BlipConfig(text_config={**text, **QUIET}, vision_config=vision, projection_dim=16)
    )


def captioner(tokenizer):
    from transformers import BertConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(image_size=SIDE, **SMALL, **QUIET), BertConfig(vocab_size=len(tokenizer), **SMALL, **QUIET)
    )
    config.decoder_start_token_id, config.pad_token_id = tokenizer.cls_token_id, tokenizer.pad_token_id
    return VisionEncoderDecoderModel(config)


def bert(tokenizer):
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SMALL, **QUIET))


def dual(tokenizer):
    """Its forward has no way to ask for images of another size."""
    from transformers import (
        BertConfig,
        CLIPVisionConfig,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
    )

    vision = CLIPVisionConfig(image_size=SIDE, patch_size=16, **SMALL)
    text = BertConfig(vocab_size=len(tokenizer), **SMALL, **QUIET)
    return VisionTextDualEncoderModel(
        VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=16)
    )


MODELS = {"clip": clip, "vilt": vilt, "blip": blip, "captioner": captioner, "bert": bert}


@pytest.fixture(scope="module")
def tokenizer(records):
    return load_tokenizer("builtin", records=records)


@pytest.fixture(scope="module")
def dataset(records, tokenizer):
    return MultimodalDataset(records[:24], tokenizer=tokenizer, image_policy=Aspect(48 * 48))


def build(name: str, tokenizer, **options) -> LossModel:
    torch.manual_seed(0)
    return LossModel(MODELS[name](tokenizer), processor=tokenizer, **options)


def plan(name: str, **options):
    return make_scheduler(name, **(OPTIONS.get(name) or {"batch_size": 6}), **options)


def parts_with_gradient(trainer: FusionTrainer, step) -> set[str]:
    found: set[str] = set()

    def keep(*_):
        for name, weight in trainer.model.named_parameters():
            if weight.grad is not None and weight.grad.abs().sum() > 0:
                found.add(
                    "image" if "vision" in name or "patch" in name or "module.encoder" in name else "text"
                )

    handle = trainer.optimizer.register_step_pre_hook(keep)
    step()
    handle.remove()
    return found


@pytest.mark.parametrize("scheduler", PADDED)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_under_every_padded_scheduler(name, scheduler, dataset, tokenizer):
    trainer = FusionTrainer(build(name, tokenizer), lr=5e-3, device="cpu")
    loader = PlannedLoader(dataset, plan(scheduler), backend="threads", num_workers=0)
    history = []
    parts = parts_with_gradient(trainer, lambda: history.extend(trainer.fit(loader, num_epochs=2)))
    losses = [values["loss"] for values in history if not math.isnan(values["loss"])]
    assert len(losses) >= len(history) - 2  # a lone pair has nothing to be told from, under CLIP's loss too
    assert parts == ({"text"} if name == "bert" else {"image", "text"})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_a_batch(name, dataset, tokenizer):
    trainer = FusionTrainer(build(name, tokenizer), lr=1e-2, device="cpu")
    (batch, *_) = PlannedLoader(dataset, plan("random"), backend="threads", num_workers=0)
    before = trainer.evaluate([batch])["loss"]
    trainer.fit([batch] * 20)
    after = trainer.evaluate([batch])["loss"]
    assert after < 0.9 * before
    assert trainer.evaluate([batch])["loss"] == after  # the same tokens are hidden


@pytest.mark.parametrize("name", ["vilt", "blip", "bert"])
def test_a_mean_over_label_tokens_accumulates_exactly(name, tokenizer):
    batches = [
        make_batch([(tokens, 32, 32) for tokens in row], vocab_size=len(tokenizer), seed=seed)
        for seed, row in enumerate(([4, 9, 3], [6], [2, 8]))
    ]
    found = []
    for window in (batches, [merge(batches)]):
        # every token that can be is hidden: the draw does not depend on the cut
        trainer = FusionTrainer(
            build(name, tokenizer, mask_ratio=1.0).double(), device="cpu", max_grad_norm=math.inf
        )

        def keep(*_, trainer=trainer):
            grads = [weight.grad.flatten() for weight in trainer.parameters if weight.grad is not None]
            found.append(torch.cat(grads))

        trainer.optimizer.register_step_pre_hook(keep)
        trainer.train_step(window)
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-9


def make_processor(kind: str, tokenizer):
    from transformers import BlipImageProcessor, BlipProcessor, CLIPImageProcessor, CLIPProcessor

    tokenizer.model_max_length = 12
    if kind == "clip":
        size = {"size": {"shortest_edge": 40}, "crop_size": {"height": SIDE, "width": SIDE}}
        return CLIPProcessor(CLIPImageProcessor(**size, image_mean=[0.3, 0.4, 0.5]), tokenizer)
    return BlipProcessor(BlipImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer)


@pytest.mark.parametrize("kind", ["clip", "blip"])
def test_a_models_own_processor_makes_the_same_pixels_and_trains(kind, records, tmp_path):
    from transformers import AutoProcessor

    made = make_processor(kind, load_tokenizer("builtin", records=records))
    made.save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="6 of 8 texts were cut to 12 tokens"):
        dataset = MultimodalDataset(records[:8], processor=processor)
    assert dataset.image_policy == Square(SIDE)
    assert dataset.sizes.num_tokens.max() == 12
    model = LossModel(MODELS[kind](processor.tokenizer), processor=processor)
    (batch,) = PlannedLoader(
        dataset, make_scheduler("random", batch_size=8), backend="threads", num_workers=0
    )
    images = [np.asarray(pixels.permute(1, 2, 0)) for pixels in batch.pixel_values]
    options = {"do_resize": False, "return_tensors": "pt"}
    theirs = processor.image_processor(images, **options)["pixel_values"]
    torch.testing.assert_close(model._pixels(batch), theirs, rtol=0, atol=1e-5)
    history = FusionTrainer(model, lr=1e-2, device="cpu").fit([batch] * 5)
    assert history[-1]["loss"] < history[0]["loss"]


def test_pixels_normalised_in_another_way_than_by_the_data_sets_processor_are_refused(records):
    from transformers import SiglipImageProcessor

    words = load_tokenizer("builtin", records=records)
    processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    dataset = MultimodalDataset(records[:8], processor=processor, tokenizer=words)
    module = MODELS["clip"](words)
    plain, told = module, LossModel(module, processor=processor)
    with PlannedLoader(dataset, make_scheduler("random", batch_size=8), num_workers=0) as loader:
        for train in (FusionTrainer(plain, device="cpu").fit, FusionTrainer(plain, device="cpu").evaluate):
            with pytest.raises(
                OptionError, match="in another way than by SiglipImageProcessor: give LossModel"
            ):
                train(loader)
        assert len(FusionTrainer(told, device="cpu").fit(loader)) == 1


@pytest.mark.parametrize("rows", [slice(0, 3), slice(0, 1)])
def test_siglip_reads_a_text_as_its_own_processor_pads_it_whatever_else_is_in_the_batch(rows, tokenizer):
    from transformers import SiglipConfig, SiglipModel

    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "projection_size": 16, **SMALL}
    vision = {"image_size": SIDE, "patch_size": 16, **SMALL}
    module = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    model = LossModel(module, processor=tokenizer)
    batch = make_batch([(4, SIDE, SIDE), (9, SIDE, SIDE), (6, SIDE, SIDE)]).part(rows)
    padded = torch.full((len(batch), 16), tokenizer.pad_token_id)
    padded[:, : batch.shape.num_tokens][batch.attention_mask] = batch.input_ids[batch.attention_mask]
    wanted = module(input_ids=padded, pixel_values=model._pixels(batch), return_loss=True)
    found = model(batch)
    torch.testing.assert_close(found.text_embeds, wanted.text_embeds)
    torch.testing.assert_close(found.loss, wanted.loss)


@pytest.mark.parametrize("mask_ratio", [2.0, -0.1, "x", float("nan")])
def test_a_share_of_hidden_tokens_out_of_range_is_refused(mask_ratio, records):
    with pytest.raises(OptionError, match="mask_ratio must be"):
        LossModel(MODELS["clip"](load_tokenizer("builtin", records=records)), mask_ratio=mask_ratio)


def test_the_processor_of_an_image_model_sets_size_and_pixels(records):
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=[0.3, 0.4, 0.5])
    dataset = MultimodalDataset(records[:8], processor=processor)
    assert dataset.image_policy == Square(SIDE)
    model = LossModel(MODELS["clip"](dataset.tokenizer), processor=processor)
    assert model.pixel_mean.flatten().tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert model.pixel_std.flatten().tolist() == pytest.approx([0.5] * 3)


@pytest.mark.filterwarnings("ignore:.* texts were cut to 12 tokens:UserWarning")
def test_the_lines_of_the_readme_train_a_model_of_transformers(records, monkeypatch):
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    lines = page.partition("<!-- these lines -->\n\n```python\n")[2].partition("```")[0]
    processor = make_processor("clip", load_tokenizer("builtin", records=records))
    names = {"model": MODELS["clip"](processor.tokenizer), "processor": processor}
    monkeypatch.setattr(mmlab, "read_records", lambda path: {"captions.json": records[:16]}[path])
    for name in ("fit_time", "fit_memory"):  # shorter
        short = {
            "fit_time": {"num_probes": 9, "num_held_out": 1, "repeats": 2, "seconds": 2},
            "fit_memory": {"num_held_out": 0},
        }[name]
        monkeypatch.setattr(mmlab, name, partial(getattr(mmlab, name), **short, device="cpu"))
    exec(lines.replace('"cuda"', '"cpu"').replace("bf16", "fp32"), names)
    assert sum(step["num_samples"] for step in names["steps"]) == 3 * 16


def test_a_processor_that_keeps_proportions_gives_aspect():
    from transformers import ViltImageProcessor

    assert processor_policy(ViltImageProcessor(size={"shortest_edge": 64})) == Aspect(64 * 64, 32)
    wide = {"height": 32, "width": 64}
    with pytest.raises(OptionError, match="expected a square or a shortest edge; give image_policy"):
        processor_policy(type("Wide", (), {"size": wide})())


def test_one_image_size_names_the_policy_to_use(dataset, tokenizer):
    trainer = FusionTrainer(LossModel(dual(tokenizer)), device="cpu")
    batch = make_batch([(4, 48, 64), (5, 32, 32)])
    expected = r"takes images of 32 x 32 pixels, the batch has 48 x 64 .*use the image policy square:32"
    with pytest.raises(OptionError, match=expected):
        trainer.train_step([batch])
    assert math.isfinite(trainer.train_step([make_batch([(4, 32, 32), (5, 32, 32)])])["loss"])


def test_one_image_size_is_named_where_the_error_says_nothing(tokenizer):
    def fail(*_: object) -> None:
        raise RuntimeError

    model = LossModel(dual(tokenizer))
    model.module.register_forward_pre_hook(fail)
    with pytest.raises(OptionError, match=r"32 x 32 pixels, the batch has 48 x 64 \(RuntimeError: \)"):
        model(make_batch([(4, 48, 64)]))


def test_a_text_too_long_names_the_option_to_use(tokenizer):
    with pytest.raises(
        DataError, match=r"a text has 65 tokens, ViltForMaskedLM takes 64; use .*max_tokens=64"
    ):
        build("vilt", tokenizer)(make_batch([(65, 32, 32)]))


def test_hidden_tokens_need_a_mask_token(tokenizer):
    with pytest.raises(
        OptionError, match=r"ViltForMaskedLM predicts hidden tokens.*processor=.*or labels='text'"
    ):
        LossModel(vilt(tokenizer))


def test_a_signature_that_asks_for_more_says_what_there_is():
    class Boxes(nn.Module):
        def forward(self, input_ids, boxes, scale=1.0): ...

    with pytest.raises(
        OptionError, match=r"Boxes.forward requires boxes; .* a batch has input_ids, .*labels; wrap"
    ):
        LossModel(Boxes())


def test_a_model_of_images_cut_into_patches_is_refused_before_its_first_step():
    from transformers import Siglip2Config, Siglip2Model

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text, vision = {"vocab_size": 50, **sizes}, {"num_patches": 16, **sizes}
    with pytest.raises(OptionError, match=r"Siglip2Model.forward requires spatial_shapes; "):
        LossModel(Siglip2Model(Siglip2Config(text_config=text, vision_config=vision)))


def adapted(module, *, wrapped: bool, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options)
    torch.manual_seed(1)
    return peft.get_peft_model(module, config) if wrapped else peft.inject_adapter_in_model(config, module)


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_a_wrapper_of_peft_trains_as_the_model_with_its_adapters_does(tokenizer):
    batch = make_batch([(5, SIDE, SIDE)] * 3, vocab_size=10)
    models = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        models.append(LossModel(adapted(clip(tokenizer), wrapped=wrapped)))
    assert models[0].accepted == models[1].accepted
    assert not LossModel(
        adapted(clip(tokenizer).eval(), wrapped=True)
    ).training  # so that the first step makes it train
    losses = [FusionTrainer(model, device="cpu").train_step([batch])["loss"] for model in models]
    assert losses[0] == losses[1]
    weights = [[weight for weight in model.parameters() if weight.requires_grad] for model in models]
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_a_wrapper_of_peft_that_would_leave_images_out_is_refused(tokenizer):
    for task in ("FEATURE_EXTRACTION", "CAUSAL_LM"):
        model = clip(tokenizer)
        model.prepare_inputs_for_generation = None  # which peft reads of a causal language model
        with pytest.raises(OptionError, match="leave task_type out of the LoraConfig"):
            LossModel(adapted(model, wrapped=True, task_type=task))


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_a_wrapped_image_encoder_takes_images_of_any_shape():
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(image_size=SIDE, **SMALL))
    encoder = HuggingFaceImages(adapted(model.eval(), wrapped=True))
    assert all(module.training for module in encoder.modules())
    features, _ = encoder(torch.rand(2, 3, 96, 32), torch.ones(2, 96, 32, dtype=torch.bool))
    assert features.shape[1] == 1 + 6 * 2  # a class token, and 6 x 2 patches


class OwnLoss(nn.Module):
    """A loss of one's own, a mean over samples."""

    def __init__(self, how: str):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 1), how

    def forward(self, pixel_values):
        loss = (self.layer(pixel_values.mean((2, 3))) - 1).square().mean()
        return {"loss": loss} if self.how == "dict" else loss


class OwnBatchLoss(OwnLoss):
    def forward(self, batch):
        return super().forward(batch.pixel_values / 255)


@pytest.mark.parametrize("make", [OwnLoss, lambda how: LossModel(OwnBatchLoss(how))], ids=["named", "batch"])
@pytest.mark.parametrize("how", ["tensor", "dict"])
def test_a_module_of_ones_own_trains_on_the_loss_that_it_returns(make, how):
    torch.manual_seed(0)
    trainer = FusionTrainer(make(how), lr=0.1, device="cpu")
    batches = [make_batch([(3, 32, 32)] * 3), make_batch([(3, 16, 16)])]
    history = trainer.fit([*batches] * 10)
    assert history[-2]["loss"] < 0.5 * history[0]["loss"]
    assert math.isfinite(trainer.evaluate(batches)["loss"])


def test_a_loss_for_every_sample_is_refused():
    class Each(OwnLoss):
        def forward(self, pixel_values):
            return pixel_values.flatten(1).mean(1) * self.layer.bias

    with pytest.raises(DataError, match=r"Each returned a loss of shape \(2,\); expected one mean"):
        FusionTrainer(Each("tensor"), device="cpu").train_step([make_batch([(3, 16, 16)] * 2)])


def test_an_image_model_does_not_get_the_mask_of_the_texts():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    module = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, **sizes))
    batch = make_batch([(4, 32, 32), (9, 32, 32)])
    assert math.isfinite(FusionTrainer(module, device="cpu").train_step([batch])["loss"])


def test_an_image_model_learns_hidden_patches():
    from transformers import ViTConfig, ViTForMaskedImageModeling

    module = ViTForMaskedImageModeling(
        ViTConfig(image_size=SIDE, patch_size=16, encoder_stride=16, **SMALL, **QUIET)
    )
    history = FusionTrainer(module, lr=1e-2, device="cpu").fit([make_batch([(4, 32, 32)] * 2)] * 20)
    assert history[-1]["loss"] < history[0]["loss"]


def test_only_what_the_module_takes_is_made():
    batch = make_batch([(3, 32, 32)] * 2)
    texts_only = dataclasses.replace(batch, pixel_values=None, pixel_mask=None)

    class Texts(OwnLoss):
        def forward(self, input_ids):
            return self.layer.bias.square().mean()

    assert LossModel(Texts("tensor"))(texts_only).loss.numel() == 1


def test_pretrained_encoders_of_both_kinds_load_from_a_folder(tmp_path):
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    images, texts = (
        ViTModel(ViTConfig(image_size=SIDE, **SMALL)),
        BertModel(BertConfig(vocab_size=50, **SMALL)),
    )
    images.save_pretrained(tmp_path / "images")
    texts.save_pretrained(tmp_path / "texts")
    model = build_model(
        "tiny",
        vocab_size=50,
        image_encoder=str(tmp_path / "images"),
        text_encoder=str(tmp_path / "texts"),
    )
    saved = {f"text_encoder.model.{name}": weight for name, weight in texts.state_dict().items()}
    saved |= {f"image_encoder.model.{name}": weight for name, weight in images.state_dict().items()}
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in saved.items())
    trainer = FusionTrainer(model, device="cpu")
    assert math.isfinite(trainer.train_step([make_batch([(4, 48, 32), (5, 32, 64)])])["loss"])


def test_a_loss_from_a_module_that_takes_batches_names_the_wrapper():
    with pytest.raises(OptionError, match=r"OwnBatchLoss returned a dict.*train LossModel\(OwnBatchLoss"):
        FusionTrainer(OwnBatchLoss("dict"), device="cpu").train_step([make_batch([(3, 32, 32)] * 2)])


@pytest.mark.parametrize("output", ["loss", "embeddings"])
def test_an_output_that_lacks_what_the_objectives_read_names_the_wrapper_in_training_and_pricing(output):
    class Own(OwnLoss):
        def forward(self, batch):
            loss = super().forward(batch.pixel_values / 255)["loss"]
            return SimpleNamespace(loss=loss) if output == "loss" else SimpleNamespace(image_embedding=loss)

    expected = r"Own returned a SimpleNamespace, and contrastive reads its .*train LossModel\(Own"
    with pytest.raises(OptionError, match=expected):
        FusionTrainer(Own("dict"), device="cpu").train_step([make_batch([(3, 32, 32)] * 2)])
    with pytest.raises(OptionError, match=expected):
        mmlab.price(Own("dict"), (2, 3, 32, 32), device="cpu")


class Labelled(nn.Module):
    """Classifies texts; samples without a label do not count."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 2)

    def forward(self, input_ids, labels):
        return {"loss": F.cross_entropy(self.embedding(input_ids).mean(1), labels, ignore_index=IGNORED)}


def test_held_out_batches_without_a_label_do_not_spoil_the_loss_of_the_others():
    trainer = FusionTrainer(Labelled(), device="cpu", lr=0.0)
    labelled, without = make_batch([(4, 16, 16)] * 3), make_batch([(5, 16, 16)] * 2)
    without.labels = torch.full((2,), IGNORED)
    assert trainer.evaluate([labelled, without])["loss"] == trainer.evaluate([labelled])["loss"]
    assert math.isnan(trainer.evaluate([without])["loss"])


def test_the_two_halves_of_a_clips_held_out_loss_have_its_temperature(tokenizer):
    model = clip(tokenizer)
    trainer, scale = FusionTrainer(model, device="cpu", lr=0.0), math.log(50)
    with torch.no_grad():
        model.logit_scale.fill_(scale)
    batch = make_batch([(4 + row, SIDE, SIDE) for row in range(32)], vocab_size=len(tokenizer))
    found = trainer.evaluate([batch])
    assert found["image_to_text_loss"] + found["text_to_image_loss"] == pytest.approx(
        2 * found["loss"], rel=1e-4
    )


def test_a_batch_that_is_not_the_first_argument_is_given_by_name():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 4)

        def forward(self, input_ids, batch):
            assert batch.input_ids is input_ids
            return self.embedding(input_ids).square().mean()

    step = FusionTrainer(Later(), device="cpu").train_step([make_batch([(4, 32, 32)])])
    assert math.isfinite(step["loss"])


def test_a_scale_that_is_a_plain_number_is_evaluated(dataset, tokenizer):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(len(tokenizer), 3)

        def forward(self, batch):
            text = F.normalize(self.embedding(batch.input_ids).mean(1), dim=-1)
            image = F.normalize(batch.pixel_values.float().mean((2, 3)), dim=-1)
            return SimpleNamespace(image_embedding=image, text_embedding=text, logit_scale=10.0)

    loader = PlannedLoader(dataset, make_scheduler("random", batch_size=8), num_workers=0)
    assert math.isfinite(FusionTrainer(Plain(), device="cpu").evaluate(loader)["loss"])
