"""The trainer: a window is one large batch, a resumed run is the same run, an interrupt leaves a whole state."""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mmlab.errors import DataError, OptionError, RunError
from mmlab.model.huggingface import LossModel
from mmlab.model.presets import build_model
from mmlab.runs.events import RunLog, read_events
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.options import TrainOptions
from mmlab.training.weighting import Weighting, make_weighting
from tests.batches import make_batch, merge

SIZES = [
    (4, 32, 48),
    (9, 16, 16),
    (3, 48, 32),
    (6, 32, 32),
    (5, 16, 64),
    (7, 48, 48),
    (2, 32, 16),
    (8, 16, 32),
]
CUTS = [slice(0, 3), slice(3, 4), slice(4, 8)]  # unequal micro-batches
TINY = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}


class PairDistance:
    """An objective of your own: what each sample adds depends on that sample alone."""

    def count(self, batch):
        return len(batch)

    def __call__(self, output, batch):
        return (output.image_embedding - output.text_embedding).square().sum() * output.logit_scale


def tiny_model(seed: int = 0, **changes) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("tiny", vocab_size=50, **{**TINY, **changes})


def micro_batches(seed: int = 0):
    batches = [make_batch(SIZES[cut], seed=seed + number) for number, cut in enumerate(CUTS)]
    for number, batch in enumerate(batches):
        batch.groups += 100 * number
        batch.record_ids = [f"{number}-{record_id}" for record_id in batch.record_ids]
    return batches


def gradients_of(trainer: FusionTrainer, windows) -> list[torch.Tensor]:
    """The whole gradient, flattened, that each window's optimizer step uses."""
    seen: list[torch.Tensor] = []

    def keep(optimizer, *_):
        seen.append(
            torch.cat([weight.grad.flatten() for weight in trainer.parameters if weight.grad is not None])
        )

    handle = trainer.optimizer.register_step_pre_hook(keep)
    for window in windows:
        trainer.train_step(window)
    handle.remove()
    return seen


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_window_of_unequal_micro_batches_has_the_gradient_of_one_large_batch(dtype, tolerance):
    options = {"objectives": {"distance": PairDistance()}, "max_grad_norm": math.inf, "device": "cpu"}
    split = FusionTrainer(tiny_model().to(dtype), **options)
    whole = FusionTrainer(tiny_model().to(dtype), **options)
    batches = micro_batches()
    (found,) = gradients_of(split, [batches])
    (expected,) = gradients_of(whole, [[merge(batches)]])
    assert relative(found, expected) < tolerance


def test_the_last_partial_window_counts_as_much_as_a_whole_one():
    options = {"objectives": {"distance": PairDistance()}, "total_steps": 4, "device": "cpu"}
    split = FusionTrainer(tiny_model().double(), accumulation_steps=2, **options)
    whole = FusionTrainer(tiny_model().double(), **options)
    batches = micro_batches()
    found = split.fit(batches)
    expected = whole.fit([merge(batches[:2]), batches[2]])
    assert [values["num_batches"] for values in found] == [2, 1]
    assert [values["loss"] for values in found] == pytest.approx(
        [values["loss"] for values in expected], rel=1e-12
    )
    for split_weight, whole_weight in zip(split.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(split_weight, whole_weight, rtol=1e-9, atol=1e-9)


def test_the_articles_loop_steps_on_something_else():
    """Zeroing and stepping on the same index: the first step sees one micro-batch, divided by three."""
    objective, model, batches = PairDistance(), tiny_model().double(), micro_batches()
    for index, batch in enumerate(batches):
        if index % 3 == 0:
            model.zero_grad()
        (objective(model(batch), batch) / len(batch) / 3).backward()
        if index % 3 == 0:
            break  # here the article's loop steps, and zeroes before the next window
    article = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    options = {"objectives": {"distance": objective}, "max_grad_norm": math.inf, "device": "cpu"}
    trainer = FusionTrainer(tiny_model().double(), **options)
    (ours,) = gradients_of(trainer, [batches])
    assert relative(article, ours) > 0.3


def test_a_mean_of_means_would_not_do():
    objective, model, batches = PairDistance(), tiny_model().double(), micro_batches()
    for batch in batches:
        (objective(model(batch), batch) / len(batch) / len(batches)).backward()
    usual = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    options = {"objectives": {"distance": objective}, "max_grad_norm": math.inf, "device": "cpu"}
    trainer = FusionTrainer(tiny_model().double(), **options)
    (ours,) = gradients_of(trainer, [batches])
    assert relative(usual, ours) > 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_on_a_few_pairs(precision):
    batch = make_batch(SIZES)
    trainer = FusionTrainer(
        tiny_model(), objectives=["contrastive", "matching"], precision=precision, lr=3e-3, device="cpu"
    )
    history = trainer.fit([batch] * 40)
    assert history[-1]["contrastive_loss"] < 0.5 * history[0]["contrastive_loss"]
    assert history[-1]["loss"] == pytest.approx(
        history[-1]["contrastive_loss"] + history[-1]["matching_loss"], rel=1e-6
    )
    found = trainer.evaluate([batch])
    assert found["image_to_text_r1"] > 0.5
    assert found["text_to_image_r1"] > 0.5
    assert found["chance_r1"] == 1 / 8


def resumable(**changes) -> tuple[FusionTrainer, DataLoader]:
    """Everything random at once: dropout, drawn negatives, shuffling by torch's own generator, a scaler."""
    trainer = FusionTrainer(
        tiny_model(dropout=0.2, **changes),
        objectives=["contrastive", "matching"],
        precision="fp16",
        accumulation_steps=2,
        seed=3,
        lr=1e-3,
        device="cpu",
    )
    samples = [make_batch([size], seed=number) for number, size in enumerate(SIZES + SIZES)]
    for number, sample in enumerate(samples):
        sample.groups += number
    return trainer, DataLoader(samples, batch_size=3, shuffle=True, collate_fn=merge)


@pytest.mark.parametrize("stop_at", [2, 3, 4])  # in mid-epoch, at an epoch's end, in the next one
def test_a_resumed_run_is_bitwise_the_same_run(tmp_path, stop_at):
    trainer, loader = resumable()
    expected = trainer.fit(loader, num_epochs=2)
    assert len(expected) == 6

    first, loader = resumable()
    first._emit = lambda event: first.stop() if event.kind == "step" and event.step == stop_at else None
    before = first.fit(loader, num_epochs=2)
    torch.save(first.state_dict(), tmp_path / "state.pt")

    torch.manual_seed(99)
    second, loader = resumable(embed_dim=16)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    after = second.fit(loader, num_epochs=2 - second.epoch)
    for column in ("loss", "lr", "grad_norm", "loss_scale", "epoch"):
        assert [repr(row[column]) for row in before + after] == [repr(row[column]) for row in expected]
    for resumed, whole in zip(second.parameters, trainer.parameters, strict=True):
        assert torch.equal(resumed, whole)


def test_fit_leaves_torchs_generators_as_they_were():
    trainer = FusionTrainer(tiny_model(dropout=0.2), device="cpu")
    before = torch.get_rng_state()
    trainer.fit([make_batch(SIZES)])
    assert torch.equal(torch.get_rng_state(), before)


class InterruptOnce(PairDistance):
    """Sends an interrupt from the keyboard in the middle of the first step."""

    def __init__(self):
        self.sent = False

    def __call__(self, output, batch):
        if not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGINT)
        return super().__call__(output, batch)


def test_an_interrupt_ends_after_the_step_and_leaves_a_whole_state():
    batches = micro_batches()
    undisturbed = FusionTrainer(
        tiny_model(), objectives={"distance": PairDistance()}, total_steps=3, device="cpu"
    )
    expected = undisturbed.fit(batches)
    events = []
    trainer = FusionTrainer(
        tiny_model(),
        objectives={"distance": InterruptOnce()},
        total_steps=3,
        device="cpu",
        emit=events.append,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches)
    assert [event.kind for event in events] == ["step"]
    assert (trainer.step, trainer.epoch, trainer.epoch_batches) == (1, 0, 1)
    rest = trainer.fit(batches)
    assert [events[0].values["loss"], *(row["loss"] for row in rest)] == [row["loss"] for row in expected]


def test_events_carry_the_keys_of_the_table_and_measured_times(tmp_path):
    def slow_loader():
        for batch in micro_batches():
            time.sleep(0.05)
            yield batch

    class Slow:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return slow_loader()

        def __len__(self):
            return 3

    with RunLog(tmp_path) as log:
        trainer = FusionTrainer(tiny_model(), accumulation_steps=2, emit=log.emit, device="cpu")
        trainer.fit(Slow(), num_epochs=2, eval_loader=micro_batches())
    events, _ = read_events(log.path)
    assert [event.kind for event in events] == ["step", "step", "epoch", "eval"] * 2
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3, 4]
    assert Slow.epochs == [0, 1]
    first = events[0].values
    assert first["data_wait_s"] >= 0.1
    assert first["step_s"] > first["data_wait_s"]
    assert (first["num_samples"], first["num_batches"]) == (4, 2)
    assert (first["num_tokens"], first["height"], first["width"]) == (9, 48, 48)
    wanted = "epoch loss lr grad_norm loss_scale skipped samples_per_s text_waste image_waste combined_waste"
    wanted += " padded_tokens padded_patches"
    assert {*wanted.split(), "peak_bytes", "memory_source"} <= first.keys()


def test_the_loss_scale_and_skipped_steps_are_in_the_events(tmp_path):
    """The first scale overflows in fp16, so that steps are skipped and the scale halved until gradients fit."""
    with RunLog(tmp_path) as log:
        trainer = FusionTrainer(tiny_model(), precision="fp16", emit=log.emit, device="cpu")
        trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        before = [weight.detach().clone() for weight in trainer.parameters]
        trainer.fit([make_batch(SIZES)] * 2)
        assert all(map(torch.equal, before, trainer.parameters))
        trainer.precision.scaler.update(2.0**10)
        trainer.fit([make_batch(SIZES)])
    events, _ = read_events(log.path)
    found = [
        (event.values["loss_scale"], event.values["skipped"]) for event in events if event.kind == "step"
    ]
    assert found == [(2.0**40, True), (2.0**39, True), (2.0**10, False)]


def test_waste_is_counted_in_the_batches_own_masks():
    trainer = FusionTrainer(tiny_model(), device="cpu")
    values = trainer.train_step(
        [make_batch([(4, 32, 48), (8, 16, 16)]), make_batch([(2, 16, 16), (2, 16, 16)])]
    )
    assert values["text_waste"] == pytest.approx(4 / 20)
    assert values["image_waste"] == pytest.approx(5 / 14)
    assert values["combined_waste"] == pytest.approx(9 / 34)
    assert (values["padded_tokens"], values["padded_patches"]) == (20, 14)


def test_a_window_without_negatives_is_a_skipped_step():
    trainer = FusionTrainer(tiny_model(), device="cpu")
    before = [weight.detach().clone() for weight in trainer.parameters]
    values = trainer.train_step([make_batch([(3, 16, 16)]), make_batch([(3, 32, 16)])])
    assert values["skipped"]
    assert math.isnan(values["loss"])
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.parameters, strict=True))


def test_a_lone_sample_in_a_window_does_not_dilute_the_others():
    batch = make_batch(SIZES[:4])
    alone = make_batch([(3, 16, 16)])
    options = {"max_grad_norm": math.inf, "device": "cpu"}
    (expected,) = gradients_of(FusionTrainer(tiny_model(), **options), [[batch]])
    (found,) = gradients_of(FusionTrainer(tiny_model(), **options), [[alone, batch]])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite_names_the_samples_and_keeps_the_weights(precision):
    trainer = FusionTrainer(tiny_model(), precision=precision, device="cpu")
    with torch.no_grad():
        trainer.model.log_logit_scale.fill_(math.nan)
    before = [weight.detach().clone() for weight in trainer.parameters]
    with pytest.raises(RunError, match=r"loss .*nan.*not finite for samples sample 0, sample 1"):
        trainer.train_step([make_batch(SIZES)])
    assert all(
        torch.equal(old, new) or old.isnan().all()
        for old, new in zip(before, trainer.parameters, strict=True)
    )


def test_a_sample_that_is_not_finite_is_named_and_can_be_skipped():
    class Poisoned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_model()

        def forward(self, batch):
            output = self.inner(batch)
            poison = torch.tensor([math.nan if name == "sample 2" else 0.0 for name in batch.record_ids])
            output.image_embedding = output.image_embedding + poison[:, None]
            return output

    with pytest.raises(RunError, match=r"not finite for samples sample 2; fix or remove them"):
        FusionTrainer(Poisoned(), device="cpu").train_step([make_batch(SIZES)])
    events = []
    trainer = FusionTrainer(Poisoned(), device="cpu", on_nonfinite="skip", emit=events.append)
    before = [weight.detach().clone() for weight in trainer.parameters]
    values = trainer.train_step([make_batch(SIZES)])
    assert values["skipped"]
    assert all(map(torch.equal, before, trainer.parameters))
    assert [event.kind for event in events] == ["warning"]
    assert "sample 2" in events[0].values["message"]
    assert not trainer.train_step([make_batch(SIZES[:2])])["skipped"]


def test_a_missing_modality_trains():
    batch = make_batch([*SIZES[:4], (0, 32, 32), (5, 0, 0)])
    trainer = FusionTrainer(tiny_model(), objectives=["contrastive", "matching"], device="cpu")
    values = trainer.fit([batch] * 2)[-1]
    assert math.isfinite(values["loss"])
    assert not values["skipped"]
    assert trainer.evaluate([batch])["chance_r1"] == 1 / 4
    with pytest.raises(DataError, match="retrieval needs pairs"):
        trainer.evaluate([make_batch([(5, 0, 0)])])


def test_the_schedule_warms_up_and_ends_at_zero():
    trainer = FusionTrainer(tiny_model(), lr=1.0, warmup_ratio=0.1, total_steps=100)
    rates = [trainer.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert FusionTrainer(tiny_model(), lr=1.0).learning_rate(7) == 1.0


def test_biases_norms_and_temperature_do_not_decay():
    trainer = FusionTrainer(tiny_model(), weight_decay=0.5)
    decayed, others = trainer.optimizer.param_groups
    assert decayed["weight_decay"] == 0.5
    assert others["weight_decay"] == 0.0
    assert all(weight.dim() >= 2 for weight in decayed["params"])
    assert any(weight is trainer.model.log_logit_scale for weight in others["params"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, found -1.0"),
        ({"lr": math.nan}, "lr must be at least 0, found nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"warmup_ratio": 5.0}, "warmup_ratio must be at most 1.0, found 5.0"),
        ({"total_steps": 0}, "total_steps must be at least 1, found 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be above 0 .*found -1.0"),
        ({"max_grad_norm": {"text": 0.0}}, "max_grad_norm must be above 0"),
        ({"freeze": ["*"]}, "FusionModel has nothing to train"),
        ({"objectives": ()}, "no objective; known are contrastive"),
        ({"objectives": None, "options": TrainOptions(objectives=None)}, "no objective; known are"),
        (
            {"objectives": {"contrastive": Contrastive}},
            "objective 'contrastive' must be an object .*found <class",
        ),
        ({"max_grad_norm": None}, "max_grad_norm must be above 0 .*found None"),
        ({"max_grad_norm": {"text": "1"}}, "max_grad_norm must be above 0"),
    ],
)
def test_numbers_that_cannot_train_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        FusionTrainer(tiny_model(), device="cpu", **options)


@pytest.mark.parametrize(
    ("weighting", "message"),
    [
        ({"contrastive": 5.0, "matching": 1.0}, r"unknown weighting \{'contrastive': 5.0"),
        (Weighting(["contrastive"], max_share=1.0), "is of contrastive, not of contrastive, matching"),
        (Weighting(["contrastive", "matching", "other"]), "is of contrastive, matching, other, not of"),
    ],
)
def test_a_weighting_that_is_not_of_these_objectives_is_refused(weighting, message):
    with pytest.raises(OptionError, match=message):
        FusionTrainer(tiny_model(), device="cpu", objectives=["contrastive", "matching"], weighting=weighting)


def test_what_is_no_batch_and_an_evaluation_without_one_are_refused():
    trainer = FusionTrainer(tiny_model(), device="cpu")
    for batches in ([], micro_batches()[0], [{"pixel_values": torch.zeros(1)}]):
        with pytest.raises(OptionError, match="a step takes a list of Batch, as loaders give, found"):
            trainer.train_step(batches)
    once = iter(micro_batches())
    with pytest.raises(DataError, match="no batch to evaluate on; give a loader that can be iterated anew"):
        trainer.fit(micro_batches(), num_epochs=2, eval_loader=once)
    assert trainer.epoch == 2


def test_a_sample_whose_weight_is_not_finite_is_named():
    batch = make_batch(SIZES)
    batch.weights = torch.ones(len(SIZES))
    batch.weights[3] = math.nan
    with pytest.raises(RunError, match="not finite for samples sample 3; fix or remove"):
        FusionTrainer(tiny_model(), device="cpu").train_step([batch])


def test_a_text_is_one_objective_or_pattern_and_not_its_letters():
    trainer = FusionTrainer(tiny_model(), device="cpu", objectives="matching", freeze="image_encoder.*")
    assert list(trainer.objectives) == ["matching"]
    assert {
        name.split(".")[0] for name, weight in trainer.model.named_parameters() if not weight.requires_grad
    } == {"image_encoder"}
    assert TrainOptions(objectives="contrastive").objectives == ("contrastive",)


def test_options_out_of_range_are_refused():
    with pytest.raises(OptionError, match=r"device 'gpu' cannot be used here.*cpu always can"):
        FusionTrainer(tiny_model(), device="gpu")
    with pytest.raises(OptionError, match=r"num_epochs must be a whole number, found 1.5"):
        FusionTrainer(tiny_model(), device="cpu").fit([], num_epochs=1.5)
    with pytest.raises(OptionError, match=r"a generator has no length.*give total_steps"):
        FusionTrainer(tiny_model(), device="cpu").fit(batch for batch in micro_batches())
    with pytest.raises(OptionError, match="unknown objective 'contrastiv'; did you mean 'contrastive'"):
        FusionTrainer(tiny_model(), objectives=["contrastiv"])
    with pytest.raises(OptionError, match="accumulation_steps must be at least 1, found 0"):
        FusionTrainer(tiny_model(), accumulation_steps=0)


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **sizes, **dropout))


def captioner() -> nn.Module:
    from transformers import (
        BertConfig,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**sizes, **dropout, image_size=32), BertConfig(vocab_size=50, **sizes, **dropout)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return VisionEncoderDecoderModel(config)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return CLIPModel(
        CLIPConfig(
            text_config={"vocab_size": 50, "eos_token_id": 49, **sizes},
            vision_config={"image_size": 32, "patch_size": 16, **sizes},
            projection_dim=16,
        )
    )


@pytest.mark.parametrize("make", [classifier, captioner, clip])
def test_a_hugging_face_model_trains_on_its_own_loss(make):
    batch = make_batch([(tokens, 32, 32) for tokens in (4, 9, 3, 6)])
    trainer = FusionTrainer(make(), lr=1e-2, device="cpu")
    history = trainer.fit([batch] * 15)
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    found = trainer.evaluate([batch])
    assert found["loss"] == pytest.approx(history[-1]["loss"], rel=0.5)
    assert ("image_to_text_r1" in found) == (make is clip)


@pytest.mark.parametrize("make", [classifier, captioner])
def test_a_hugging_face_models_mean_accumulates_exactly(make):
    batches = [make_batch([(tokens, 32, 32) for tokens in row]) for row in ([4, 9, 3], [6], [2, 8])]
    batches[0].labels[1] = -100  # a sample that the loss leaves out
    options = {"max_grad_norm": math.inf, "device": "cpu"}
    split = FusionTrainer(LossModel(make()).double(), **options)
    whole = FusionTrainer(LossModel(make()).double(), **options)
    (found,) = gradients_of(split, [batches])
    (expected,) = gradients_of(whole, [[merge(batches)]])
    assert relative(found, expected) < 1e-12


def test_a_hugging_face_model_without_a_loss_says_what_it_had():
    batch = dataclasses.replace(make_batch([(4, 32, 32)] * 2), labels=None)
    with pytest.raises(
        DataError, match=r"BertForSequenceClassification returned no loss but .*logits.*; it takes .*labels"
    ):
        FusionTrainer(classifier(), device="cpu").train_step([batch])


def test_num_negatives_reaches_the_loss():
    batch = make_batch(SIZES)
    few, many = (
        FusionTrainer(
            tiny_model(), objectives={"contrastive": Contrastive(num_negatives=number)}, device="cpu"
        )
        for number in (3, 300)
    )
    assert few.train_step([batch])["contrastive_loss"] < many.train_step([batch])["contrastive_loss"]


@pytest.mark.parametrize("weighting", ["uncertainty", "trend", "gradnorm"])
def test_weights_of_objectives_scale_the_gradient_are_logged_and_resumed(weighting):
    def trainer_with(seed: int = 0) -> FusionTrainer:
        chosen = make_weighting(weighting, ["contrastive", "matching"], interval=2, smoothing=0.5)
        return FusionTrainer(
            tiny_model(seed),
            objectives=["contrastive", "matching"],
            weighting=chosen,
            device="cpu",
            total_steps=20,
        )

    batches = [make_batch(SIZES, seed=seed) for seed in range(6)]
    trainer = trainer_with()
    history = [trainer.train_step([batch]) for batch in batches]
    weights = [(values["contrastive_weight"], values["matching_weight"]) for values in history]
    assert weights[0] == (1.0, 1.0) != weights[-1]
    assert all(sum(pair) == pytest.approx(2.0) for pair in weights)
    last = history[-1]
    parts = [last[f"{name}_weight"] * last[f"{name}_loss"] for name in ("contrastive", "matching")]
    assert last["loss"] == pytest.approx(sum(parts))

    resumed = trainer_with()
    for batch in batches[:3]:
        resumed.train_step([batch])
    state = copy.deepcopy(resumed.state_dict())
    resumed = trainer_with(seed=1)
    resumed.load_state_dict(state)
    assert [resumed.train_step([batch])["loss"] for batch in batches[3:]] == [
        values["loss"] for values in history[3:]
    ]


def test_a_weight_scales_its_objectives_gradient():
    def gradient_by_name(weights: dict[str, float]) -> dict[str, torch.Tensor]:
        trainer = FusionTrainer(
            tiny_model().double(),
            objectives=list(weights),
            weighting=make_weighting("fixed", weights, min_share=0.0, max_share=1.0),
            device="cpu",
            max_grad_norm=math.inf,
        )
        found: dict[str, torch.Tensor] = {}

        def keep(*_):
            found.update(
                {
                    name: weight.grad
                    for name, weight in trainer.model.named_parameters()
                    if weight.grad is not None
                }
            )

        trainer.optimizer.register_step_pre_hook(keep)
        trainer.train_step([make_batch(SIZES)])
        return found

    both = gradient_by_name({"contrastive": 0.5, "matching": 2.0})
    contrastive, matching = gradient_by_name({"contrastive": 0.5}), gradient_by_name({"matching": 2.0})
    for name, gradient in both.items():
        expected = contrastive.get(name, 0.0) + matching.get(name, 0.0)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


class Broken(nn.Module):
    """A model in which one sample's image has no finite embedding."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        output = self.inner(batch)
        rows = torch.tensor([name == "sample 2" for name in batch.record_ids])
        output.image_embedding = output.image_embedding.masked_fill(rows[:, None], math.nan)
        return output


def test_hard_negatives_of_a_sample_that_is_not_finite_can_be_drawn():
    events = []
    trainer = FusionTrainer(
        Broken(tiny_model()),
        device="cpu",
        objectives=("contrastive", "matching"),
        on_nonfinite="skip",
        emit=events.append,
    )
    assert trainer.train_step([make_batch(SIZES)])["skipped"]
    assert "samples sample 2" in events[0].values["message"]


def test_batch_normalisation_neither_hides_the_sample_at_fault_nor_learns_from_it():
    def spoil(module, inputs, output):
        rows = inputs[0].flatten(1).abs().amax(1) == 0  # the one black image
        return output.masked_fill(rows[:, None, None, None], math.inf)

    torch.manual_seed(0)
    sizes = {"text_dim": 64, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}
    model, events = build_model("resnet18", vocab_size=50, **sizes), []
    model.image_encoder.stem[0].register_forward_hook(spoil)
    trainer = FusionTrainer(model, device="cpu", on_nonfinite="skip", emit=events.append)
    batch = make_batch(
        [(4, 32, 32), (3, 32, 32), (5, 32, 32)]
    )  # one cell at the end: no statistics of one sample
    batch.pixel_mask[1] = False
    batch.groups = None
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert trainer.train_step([dataclasses.replace(batch)])["skipped"]
    assert "samples sample 1" in events[0].values["message"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_an_infinite_loss_with_a_finite_gradient_does_not_reach_the_weights():
    class Infinite(PairDistance):
        def __call__(self, output, batch):
            return super().__call__(output, batch) + math.inf

    trainer = FusionTrainer(
        tiny_model(), device="cpu", objectives={"distance": Infinite()}, on_nonfinite="skip"
    )
    before = [weight.detach().clone() for weight in trainer.parameters]
    assert trainer.train_step([make_batch(SIZES)])["skipped"]
    assert all(map(torch.equal, before, trainer.parameters))


def test_an_objective_without_samples_at_an_update_keeps_its_weight():
    objectives = {"contrastive": Contrastive(), "masked_language": MaskedLanguage(mask_id=4)}
    weighting = make_weighting("gradnorm", list(objectives), interval=2, smoothing=1.0)
    trainer = FusionTrainer(tiny_model(), device="cpu", objectives=objectives, weighting=weighting)
    trainer.train_step([make_batch(SIZES)])
    trainer.train_step([make_batch([(5, 0, 0), (6, 0, 0)])])  # texts alone: nothing to contrast
    assert weighting.weights() == pytest.approx({"contrastive": 1.0, "masked_language": 1.0})


def test_options_given_at_a_resume_are_not_those_of_the_checkpoint():
    first = FusionTrainer(tiny_model(), device="cpu", weight_decay=0.01)
    first.train_step([make_batch(SIZES)])
    second = FusionTrainer(tiny_model(), device="cpu", weight_decay=0.5)
    second.load_state_dict(first.state_dict())
    assert {group["weight_decay"] for group in second.optimizer.param_groups} == {0.0, 0.5}


def test_a_rank_that_does_not_write_counts_the_interval_too(tmp_path):
    trainer = FusionTrainer(tiny_model(), device="cpu", total_steps=4)
    trainer.strategy.rank = 1
    checkpoints = Checkpoints(tmp_path, every_minutes=1e-9)
    started = checkpoints._saved_s
    trainer.fit([make_batch(SIZES)], checkpoints=checkpoints)
    assert checkpoints.paths == []
    assert checkpoints._saved_s > started


def test_the_norms_that_gradnorm_asks_for_leave_running_statistics_alone():
    found = []
    for weighting in ("fixed", make_weighting("gradnorm", ["contrastive", "matching"], interval=1)):
        torch.manual_seed(0)
        model = build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1, hidden_dim=64, embed_dim=16)
        trainer = FusionTrainer(
            model, device="cpu", objectives=["contrastive", "matching"], weighting=weighting, lr=0.0
        )
        trainer.train_step([make_batch([(4, 32, 32), (5, 32, 32), (3, 32, 32)])])
        found.append([buffer.clone() for buffer in trainer.statistics])
    assert all(map(torch.equal, *found))


def test_what_is_no_objective_is_refused_by_its_name():
    with pytest.raises(
        OptionError, match=r"objective 'mine' must be an object with count\(batch\).*found <function"
    ):
        FusionTrainer(tiny_model(), device="cpu", objectives={"mine": lambda output, batch: 0})
    with pytest.raises(OptionError, match=r"strategy must be .*found 'ddp'"):
        FusionTrainer(tiny_model(), device="cpu", strategy="ddp")


@pytest.mark.parametrize(
    ("count", "loss", "message"),
    [
        (
            3,
            lambda output: output.image_embedding.sum(1),
            "'mine' must return its sum, a scalar .*found tensor",
        ),
        (
            3,
            lambda output: output.image_embedding.sum().detach(),
            "'mine' must return its sum, .*found tensor",
        ),
        (3, lambda output: 1.5, "'mine' must return its sum, .*found 1.5"),
        (
            None,
            lambda output: output.image_embedding.sum(),
            r"count\(batch\) of objective 'mine' .*found None",
        ),
    ],
)
def test_an_objective_that_gives_no_sum_or_no_count_is_named(count, loss, message):
    class Own:
        def count(self, batch):
            return count

        def __call__(self, output, batch):
            return loss(output)

    objectives = {"contrastive": Contrastive(), "mine": Own()}
    with pytest.raises(OptionError, match=message):
        FusionTrainer(tiny_model(), device="cpu", objectives=objectives).train_step([make_batch(SIZES)])


def test_an_objective_may_find_nothing_in_a_batch():
    class Nothing:
        def count(self, batch):
            return len(batch)

        def __call__(self, output, batch):
            return output.image_embedding.new_zeros(())

    objectives = {"contrastive": Contrastive(), "nothing": Nothing()}
    values = FusionTrainer(tiny_model(), device="cpu", objectives=objectives).train_step([make_batch(SIZES)])
    assert values["user_nothing_loss"] == 0 < values["loss"]
