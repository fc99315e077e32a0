"""The simulated peak is the real one; its parts add up; nothing accumulates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.pricing.breakdown import PARTS, price
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.trace import WORKSPACE_BYTES, StepTracer
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.types import BatchShape
from tests.batches import make_batch
from tests.pricing.priced_models import MODELS, bert, tiny

BOTH = ("contrastive", "matching")
ALL = {"contrastive": Contrastive(), "matching": Matching(), "masked_language": MaskedLanguage(mask_id=4)}


def _real_peak_bytes(
    model: nn.Module,
    *,
    precision: str = "fp32",
    checkpointing: bool = False,
    objectives: Any = BOTH[:1],
    num_micro_batches: int = 1,
) -> int:
    """Of the trainer's second step on a real batch."""
    model = copy.deepcopy(model)
    if checkpointing:
        enable_checkpointing(model)
    batch = make_batch([(5, 64, 64), (9, 64, 48), (12, 48, 64)])
    live = LiveBytes()
    trainer = FusionTrainer(model, precision=precision, objectives=objectives, device="cpu", live=live)
    trainer.train_step([batch] * num_micro_batches)
    live.add(trainer.optimizer, batch.pixel_values, batch.pixel_mask, batch.input_ids, batch.attention_mask)
    live.add(batch.labels, batch.groups)
    live.reset_peak()
    trainer.train_step([batch] * num_micro_batches)
    return live.peak_bytes


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "objectives"), [("tiny", ALL), *((name, BOTH[:1]) for name in MODELS)])
def test_the_simulated_peak_is_the_real_one(
    name: str, objectives: Any, precision: str, checkpointing: bool
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    options = {"precision": precision, "checkpointing": checkpointing, "objectives": objectives}
    real_bytes = _real_peak_bytes(model, **options)
    priced = price(model, (3, 12, 64, 64), device="cpu", **options)
    assert priced.peak_bytes == pytest.approx(real_bytes, rel=0.001)
    assert priced.assumptions == ()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_earlier_micro_batches_left_are_counted(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    alone, accumulated = (
        price(model, (3, 12, 64, 64), device="cpu", accumulating=accumulating)
        for accumulating in (False, True)
    )
    assert accumulated.peak_bytes == pytest.approx(_real_peak_bytes(model, num_micro_batches=2), rel=0.001)
    assert accumulated.peak_bytes > alone.peak_bytes
    assert accumulated.gradients >= alone.gradients


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", torch.optim.Adagrad])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parts_add_up(optimizer: object, precision: str) -> None:
    model = bert()
    priced = price(model, (8, 24, 96, 64), precision, optimizer)
    parts = [getattr(priced, part) for part in PARTS]
    assert sum(parts) == priced.peak_bytes
    assert priced.workspace == WORKSPACE_BYTES["cuda"]
    num_weights = sum(weight.numel() for weight in model.parameters())
    assert priced.parameters == pytest.approx(4 * num_weights, rel=0.1)
    assert priced.optimizer_state == pytest.approx(
        {"adamw": 8, "sgd": 4}.get(optimizer, 4) * num_weights, rel=0.1
    )
    assert priced.batch % 512 == 0
    assert min(parts) >= 0
    assert f"{priced.peak_bytes / 2**20:,.1f} MiB" in str(priced)
    assert priced.peak_operation in str(priced)


def test_what_is_never_trained_has_neither_gradient_nor_state() -> None:
    model = tiny()
    whole = price(model, (4, 16, 64, 64), objectives=BOTH)
    contrastive = price(model, (4, 16, 64, 64))  # without the fusion
    model.image_encoder.requires_grad_(False)
    frozen = price(model, (4, 16, 64, 64))
    assert frozen.parameters == contrastive.parameters == whole.parameters
    assert frozen.optimizer_state < contrastive.optimizer_state < whole.optimizer_state
    assert frozen.saved_activations < contrastive.saved_activations


def test_traces_repeat_and_keep_their_order() -> None:
    tracer = StepTracer(tiny(dropout=0.1), precision="bf16", checkpointing=True)
    first, other, again = (
        tracer(BatchShape(*shape)) for shape in [(4, 10, 64, 64), (7, 21, 96, 64), (4, 10, 64, 64)]
    )
    assert first.operations == other.operations
    assert (first.live_bytes == again.live_bytes).all()
    assert (first.gradient_bytes == again.gradient_bytes).all()
    assert first.static_bytes == other.static_bytes == again.static_bytes
    assert other.peak_bytes > first.peak_bytes
    assert other.step_peak_bytes == first.step_peak_bytes > first.static_bytes


@pytest.mark.parametrize("shape", [(4, 20, 80), (4, 20, 80.5, 80), (4, 20, -80, 80), "abcd", None])
def test_what_is_no_shape_is_refused(shape: object) -> None:
    with pytest.raises(OptionError, match=r"a shape is \(B, T, H, W\), whole numbers of at least 1; found"):
        price(tiny(), shape)  # type: ignore[arg-type]


def test_what_saves_memory() -> None:
    model, shape = tiny(), (64, 64, 128, 128)
    peaks = {
        (precision, checkpointing): price(model, shape, precision, checkpointing=checkpointing).peak_bytes
        for precision in ("fp32", "bf16")
        for checkpointing in (False, True)
    }
    assert peaks["bf16", False] < peaks["fp32", False]
    assert peaks["fp32", True] < peaks["fp32", False]
    assert peaks["bf16", True] < peaks["bf16", False]


def test_a_fingerprint_is_of_the_memory_and_not_of_the_weights() -> None:
    known = fingerprint(tiny())
    assert fingerprint(tiny()) == fingerprint(tiny().eval()) == known
    tied, frozen, checkpointed = tiny(), tiny(), enable_checkpointing(tiny())
    tied.image_head.weight = tied.text_head.weight
    frozen.image_head.weight.requires_grad_(False)
    half = tiny().bfloat16()
    prints = {fingerprint(model) for model in (tied, frozen, checkpointed, half, tiny(dropout=0.1))}
    assert len(prints | {known}) == 6
