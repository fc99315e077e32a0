"""Parts of a model, and the optimizer's groups: every trainable weight once, with its own learning rate."""

from __future__ import annotations

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.model.parameters import freeze, parameter_groups, part_of, parts_of
from mmlab.model.presets import build_model
from mmlab.training.loop import FusionTrainer
from tests.batches import make_batch


def model():
    torch.manual_seed(0)
    return build_model("tiny", vocab_size=50)


def test_parts_hold_every_trainable_weight_once():
    net = model()
    parts = parts_of(net)
    assert set(parts) == {"image", "text", "fusion", "heads"}
    assert sorted(id(weight) for part in parts.values() for weight in part) == sorted(
        map(id, net.parameters())
    )
    assert {id(weight) for weight in parts["image"]} == set(map(id, net.image_encoder.parameters()))


def test_groups_hold_every_trainable_weight_once():
    net = model()
    groups = parameter_groups(net, weight_decay=0.1)
    grouped = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(grouped) == sorted(map(id, net.parameters()))
    for group in groups:
        assert all((weight.dim() > 1) == (group["weight_decay"] > 0) for weight in group["params"])


def test_frozen_weights_stay_and_have_no_optimizer_state():
    trainer = FusionTrainer(model(), device="cpu", freeze=["text_encoder.*"])
    before = [weight.clone() for weight in trainer.model.text_encoder.parameters()]
    trainer.train_step([make_batch([(4, 16, 16), (5, 16, 32)])])
    assert all(map(torch.equal, before, trainer.model.text_encoder.parameters()))
    assert not any(weight in trainer.optimizer.state for weight in trainer.model.text_encoder.parameters())


def test_wrong_names_say_what_there_is():
    with pytest.raises(OptionError, match=r"'encoder.\*' matches no parameter; some are .*image_encoder"):
        freeze(model(), ["encoder.*"])
    with pytest.raises(
        OptionError, match=r"unknown part of the model 'vision'.*Known: fusion, heads, image, text"
    ):
        FusionTrainer(model(), max_grad_norm={"vision": 1.0})


def test_the_encoder_of_a_vision_encoder_decoder_is_the_image_part():
    assert part_of("module.encoder.layers.0.mlp.fc1.weight") == "image"
    assert part_of("module.decoder.bert.encoder.layer.0.output.dense.weight") == "text"
    assert part_of("module.decoder.bert.encoder.layer.0.crossattention.self.key.weight") == "fusion"
    assert part_of("module.visual_projection.weight") == part_of("module.text_projection.weight") == "heads"
