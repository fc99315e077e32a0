"""Checkpointing changes the memory of a step and nothing else."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from mmlab.errors import OptionError
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.huggingface import LossModel
from mmlab.model.presets import build_model
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.names import parse_objectives
from tests.batches import make_batch

_BATCH = make_batch([(5, 160, 160), (9, 64, 48), (40, 48, 160), (12, 64, 64), (12, 160, 160), (9, 64, 64)])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Convolutions add up in another order when their threads are shared out differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _vit() -> nn.Module:
    return build_model("tiny", vocab_size=50, dropout=0.1)


def _resnet() -> nn.Module:
    return build_model("resnet18", vocab_size=50, text_dim=64, text_depth=1, hidden_dim=64, dropout=0.1)


def _bert() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=50, num_labels=2))


def _after_a_pass(model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients and running statistics after a forward and backward pass with dropout, and the peak of live bytes."""
    model = copy.deepcopy(
        model if "batch" in signature(model.forward).parameters else LossModel(model)
    ).train()
    torch.manual_seed(0)
    with LiveBytes().add(model) as live:
        output = model(_BATCH)
        goals = parse_objectives(model, ("contrastive", "matching"))
        torch.stack([goal(output, _BATCH) for goal in goals.values()]).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {**gradients, **dict(model.named_buffers())}, live.peak_bytes


@pytest.mark.parametrize("build", [_vit, _resnet, _bert])
def test_gradients_and_statistics_are_the_same_in_less_memory(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    expected, expected_bytes = _after_a_pass(model)
    found, found_bytes = _after_a_pass(enable_checkpointing(model))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert found_bytes < expected_bytes


def test_a_model_as_from_pretrained_gives_it_is_trained_in_training_mode(tmp_path: Path) -> None:
    _bert().save_pretrained(tmp_path)
    peaks = []
    for checkpointing in (False, True):
        model = BertForSequenceClassification.from_pretrained(tmp_path)
        live = LiveBytes()
        trainer = FusionTrainer(model, device="cpu", live=live, checkpointing=checkpointing)
        with live:
            values = trainer.train_step([_BATCH])
        assert all(module.training for module in trainer.model.modules())
        peaks.append(values["peak_bytes"])
    assert peaks[1] < 0.9 * peaks[0]


def test_evaluation_and_the_state_dict_are_untouched() -> None:
    model = _vit().eval()
    expected, names = model(_BATCH).image_embedding, list(model.state_dict())
    enable_checkpointing(enable_checkpointing(model))
    assert torch.equal(model(_BATCH).image_embedding, expected)
    assert list(model.state_dict()) == names


def test_a_copy_has_checkpoints_of_its_own() -> None:
    model = enable_checkpointing(_vit())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert twin(_BATCH).image_embedding.abs().sum() > 0
    assert twin.image_encoder.blocks[0].forward.block is twin.image_encoder.blocks[0]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(OptionError, match="Linear has no block that can be checkpointed"):
        enable_checkpointing(nn.Linear(2, 2))


def test_our_encoders_are_checkpointed_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("tiny", vocab_size=100)
    enable_checkpointing(model)
    said = logging.getLogger("transformers")
    said.addHandler(caplog.handler)
    try:
        model.train()(make_batch([(5, 32, 32), (8, 32, 32)]))
    finally:
        said.removeHandler(caplog.handler)
    assert caplog.messages == []
