"""Branches at once: the loss and the gradient of the plain model, bit by bit, and both branches really under way."""

from __future__ import annotations

import copy
import math
import threading

import numpy as np
import pytest
import torch

from mmlab.errors import DataError, OptionError
from mmlab.model.huggingface_encoders import HuggingFaceImages
from mmlab.model.presets import build_model
from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.parallel.branches.placement import BranchPlacement
from mmlab.parallel.branches.timeline import Span, Timeline, busy_s, overlap
from mmlab.parallel.strategies import ParallelOptions
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.training.fusion_trainer import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from tests.batches import make_batch
from tests.training.test_out_of_memory import TINY, Classifier, flat, gradient, relative

SIZES = [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32), (5, 16, 64), (7, 48, 48), (2, 32, 16)]
MISSING = [(4, 32, 48), (6, 0, 0), (0, 16, 64), (7, 48, 48), (3, 0, 0)]
GOALS = {
    "contrastive": Contrastive(num_negatives=31),
    "matching": Matching(),
    "masked_language": MaskedLanguage(mask_id=4, mask_ratio=0.4),
}
PATIENCE_S = 120


def build(**changes):
    torch.manual_seed(0)
    return build_model("tiny", vocab_size=50, **{**TINY, **changes})


def trainer_of(model, objectives=("contrastive", "matching"), **options):
    goals = {name: GOALS[name] for name in objectives}
    return FusionTrainer(model, device="cpu", objectives=goals, **options)


def both(batches, *, changes=None, branches=None, prepare=lambda model: model, **options):
    """Gradient and values of the plain model, and of its branches at once."""
    plain = trainer_of(prepare(build(**(changes or {}))), **options)
    split = trainer_of(BranchParallel(prepare(build(**(changes or {}))), **(branches or {})), **options)
    return gradient(plain, batches), gradient(split, batches)


def assert_same(found, expected):
    assert (found[0] == expected[0]).all()
    assert found[1]["loss"] == expected[1]["loss"]
    assert found[1]["grad_norm"] == expected[1]["grad_norm"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fusion", ["cross", "multiscale"])
@pytest.mark.parametrize("objectives", [["contrastive"], ["matching"], list(GOALS)])
def test_loss_and_gradient_are_bitwise_those_of_the_plain_model(precision, fusion, objectives):
    batches = [make_batch(SIZES, seed=1)]
    if "masked_language" not in objectives:
        batches.append(make_batch(MISSING, seed=2))
    changes = {"fusion": fusion, "modality_dropout": 0.4}
    assert_same(*both(batches, changes=changes, objectives=objectives, precision=precision))


def test_masked_language_over_several_micro_batches_differs_by_rounding_alone():
    batches = [make_batch(SIZES[start:], seed=start) for start in range(3)]
    (expected, _), (found, _) = both(batches, objectives=list(GOALS))
    assert relative(found, expected) < 1e-6


def test_a_branch_that_draws_alone_draws_what_the_plain_model_draws():
    batches = [make_batch(SIZES, seed=1), make_batch(MISSING, seed=2)]
    changes = {"dropout": 0.3, "modality_dropout": 0.4}
    expected, found = both(batches, changes=changes, checkpointing=True)
    assert_same(found, expected)
    undisturbed, _ = both(batches)
    assert relative(undisturbed[0], expected[0]) > 0.01  # the masks were not empty


def hugging_face_images(dropout):
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    return HuggingFaceImages(
        ViTModel(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=32,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            ),
            add_pooling_layer=False,
        )
    )


def dropping_in_both(*, checkpointing=False, seed=0):
    model = build(dropout=0.3, image_dim=32)
    model.image_encoder = hugging_face_images(0.3)
    branches = BranchParallel(model)
    return branches, trainer_of(branches, checkpointing=checkpointing, seed=seed)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_in_both_branches_repeats_itself(checkpointing):
    batches = [make_batch([(4, 32, 32), (9, 32, 32), (3, 32, 32)], seed=number) for number in range(2)]
    branches, first = dropping_in_both(checkpointing=checkpointing)
    assert bool(branches.takes_turns_because) == checkpointing
    expected, values = gradient(first, batches)
    for _ in range(3):
        found, again = gradient(dropping_in_both(checkpointing=checkpointing)[1], batches)
        assert (found == expected).all()
        assert again["loss"] == values["loss"]
    other, _ = gradient(dropping_in_both(checkpointing=checkpointing, seed=1)[1], batches)
    assert relative(other, expected) > 0.01


class FailsAtFirst:
    """Runs out of memory when it is first asked, so that the window cuts its batch into parts."""

    def __init__(self):
        self.num_calls, self.goal = 0, Contrastive()

    def count(self, batch):
        return self.goal.count(batch)

    def __call__(self, output, batch):
        self.num_calls += 1
        if self.num_calls == 1:
            raise torch.OutOfMemoryError("out of memory, as a test asked")
        return self.goal(output, batch)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_window_in_parts_is_bitwise_that_of_the_plain_model(dropout):
    batches = [make_batch(SIZES, seed=1), make_batch(SIZES[2:], seed=2)]
    found = []
    for wrap in (lambda model: model, BranchParallel):
        goals = {"failing": FailsAtFirst(), "matching": Matching()}
        trainer = FusionTrainer(wrap(build(dropout=dropout)), device="cpu", objectives=goals)
        found.append(gradient(trainer, batches))
        assert found[-1][1]["num_parts"] == 2
    assert_same(*found)


def test_live_bytes_and_out_of_memory_are_counted_in_both_branches():
    batches = [make_batch(SIZES, seed=1)]
    peaks = []
    for wrap in (lambda model: model, BranchParallel):
        device = VirtualDevice()
        trainer = trainer_of(wrap(build()), live=device)
        _, values = gradient(trainer, batches)
        peaks.append((device.num_operations, values["peak_bytes"]))
    assert peaks[0] == peaks[1]


def test_both_branches_are_under_way_at_the_same_time_forward_and_backward():
    meeting = threading.Barrier(2)
    met = []

    def meet(*_):
        met.append((threading.get_ident(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        meeting.wait(PATIENCE_S)  # only passes when the other branch is there too

    model = BranchParallel(build())
    for head in (model.image_head, model.text_head):
        head.register_forward_pre_hook(meet)
        head.register_full_backward_hook(meet)
    trainer = trainer_of(model, precision="bf16")
    trainer.train_step([make_batch(SIZES)])
    assert [(grad, autocast) for _, grad, autocast in met[:2]] == [(True, True)] * 2
    assert len({thread for thread, *_ in met[:2]}) == len({thread for thread, *_ in met[2:]}) == 2
    with torch.no_grad():
        assert not model(make_batch(SIZES)).image_embedding.requires_grad
    assert [grad for _, grad, _ in met[4:]] == [False, False]


def test_a_branch_that_is_frozen_or_not_asked_for_gets_no_gradient():
    batches = [make_batch(SIZES)]
    for freeze in (["image_*"], ["text_*"], ["image_*", "text_*"]):
        assert_same(*both(batches, freeze=freeze))
    texts = [make_batch([(4, 0, 0), (7, 0, 0), (5, 0, 0)])]
    assert_same(*both(texts, objectives=["masked_language"]))


def test_graphs_can_be_kept_for_a_second_pass():
    model = BranchParallel(build())
    output = model(make_batch(SIZES))
    loss = output.image_embedding.sum() + output.text_embedding.sum()
    loss.backward(retain_graph=True)
    once = flat(weight.grad for weight in model.image_head.parameters())
    loss.backward()
    assert (flat(weight.grad for weight in model.image_head.parameters()) == 2 * once).all()


def test_checkpoints_interchange_and_evaluation_is_the_same():
    plain, split = trainer_of(build()), trainer_of(BranchParallel(build()))
    assert list(plain.model.state_dict()) == list(split.model.state_dict())
    plain.train_step([make_batch(SIZES)])
    split.load_state_dict(copy.deepcopy(plain.state_dict()))
    for trainer in (plain, split):
        trainer.train_step([make_batch(MISSING)])
    assert (flat(plain.parameters) == flat(split.parameters)).all()
    plain.load_state_dict(split.state_dict())
    held_out = [make_batch(SIZES, seed=5)]
    expected, found = ({**trainer.evaluate(held_out), "eval_s": 0} for trainer in (plain, split))
    assert found == expected


def test_an_error_in_one_branch_is_raised_and_the_next_step_is_sound():
    model = BranchParallel(build(max_tokens=16))
    trainer = trainer_of(model)
    with pytest.raises(DataError, match="17 tokens, the text encoder takes 16"):
        trainer.train_step([make_batch([(17, 32, 32), (3, 16, 16)])])
    assert math.isfinite(trainer.train_step([make_batch(SIZES)])["loss"])


def test_turns_and_threads_give_the_same():
    batches = [make_batch(SIZES)]
    expected, _ = both(batches)
    assert_same(both(batches, branches={"concurrent": False})[1], expected)
    assert_same(both(batches, branches={"threads_per_branch": 1})[1], expected)


def test_the_timeline_has_every_branch_both_ways():
    timeline = Timeline()
    trainer = trainer_of(BranchParallel(build(), timeline=timeline))
    trainer.train_step([make_batch(SIZES), make_batch(MISSING)])
    assert sorted(span[:3] for span in timeline.spans) == [
        (number, branch, phase)
        for number in (0, 1)
        for branch in ("image", "text")
        for phase in ("backward", "forward")
    ]
    assert all(span.end_s > span.start_s for span in timeline.spans)
    assert 0 <= overlap(timeline.spans) <= 1
    timeline.clear()
    turns = trainer_of(BranchParallel(build(), timeline=timeline, concurrent=False))
    turns.train_step([make_batch(SIZES)])
    assert overlap(timeline.spans) == 0


def test_overlap_is_the_share_of_the_shorter_branch():
    spans = [
        Span(0, "image", "forward", 0.0, 4.0),
        Span(0, "text", "forward", 3.0, 5.0),
        Span(0, "text", "wait", 0.0, 3.0),
        Span(0, "fusion", "forward", 5.0, 6.0),
        Span(1, "image", "forward", 5.0, 6.0),
    ]
    assert overlap(spans) == 0.5
    assert overlap(spans, "image", ("text", "fusion")) == pytest.approx(2 / 3)
    assert busy_s(spans, "image") == 5.0
    assert math.isnan(overlap(spans[:1]))


def test_what_cannot_work_is_refused():
    with pytest.raises(OptionError, match=r"Classifier has no image and text branch.*needs a FusionModel"):
        BranchParallel(Classifier())
    with pytest.raises(OptionError, match="cannot be compiled: its branches run in threads"):
        trainer_of(BranchParallel(build()), compile="eager")
    with pytest.raises(OptionError, match="placed with the fusion on cpu, found device meta"):
        BranchParallel(build()).to("meta")
    with pytest.raises(OptionError, match="device 'cuda:99' cannot be used here"):
        FusionTrainer(
            build(), device="cpu", parallel=ParallelOptions(strategy="branch", image_device="cuda:99")
        )
    with pytest.raises(OptionError, match="threads_per_branch must be at least 1, found 0"):
        BranchParallel(build(), threads_per_branch=0)
    with pytest.raises(OptionError, match="'gpu7' names no device"):
        BranchPlacement(image="gpu7")
    with pytest.raises(OptionError, match=r"one device, two .* or three"):
        BranchPlacement.of(["cpu"] * 4)


def test_a_placement_names_each_device_once():
    placement = BranchPlacement.of(["cuda:1", "cuda"])
    assert (placement.image, placement.text, placement.fusion) == ("cuda:1", "cuda:0", "cuda:0")
    assert [str(device) for device in placement.devices] == ["cuda:0", "cuda:1"]


def test_type_and_memory_order_can_be_changed():
    model = BranchParallel(build()).to(torch.float64).to(memory_format=torch.channels_last)
    assert model(make_batch(SIZES)).image_embedding.dtype == torch.float64
    assert np.isfinite(flat(model.parameters())).all()
