"""Out of memory at any operation: the step is done all the same, with the same gradient, or says what does not fit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mmlab.errors import RunError
from mmlab.model.presets import build_model
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.runs.events import RunEvent
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.weighting import make_weighting
from tests.batches import make_batch
from tests.ranks import run_ranks

SIZES = [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32), (5, 16, 64), (7, 48, 48), (2, 32, 16)]
STRIDE = 31  # between the operations that fail; benchmarks/memory.py takes every one
TINY = {"image_dim": 32, "image_depth": 1, "text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16}
OBJECTIVES = {
    "contrastive": {"contrastive": Contrastive()},
    "matching": {"matching": Matching()},
    "masked language": {"masked_language": MaskedLanguage(mask_id=4, mask_ratio=0.4)},
    "both": {"contrastive": Contrastive(num_negatives=31), "matching": Matching()},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def make_trainer(
    live=None,
    *,
    precision="fp32",
    objectives=OBJECTIVES["both"],
    dtype=torch.float32,
    parallel: str | ParallelOptions = "ddp",
    strategy=None,
    **options,
):
    torch.manual_seed(0)
    model = build_model("tiny", vocab_size=50, **TINY).to(dtype)
    return FusionTrainer(
        model,
        device="cpu",
        precision=precision,
        objectives=objectives,
        live=live,
        strategy=strategy or make_strategy(parallel),
        **options,
    )


def window(num_batches: int = 2):
    return [make_batch(SIZES[number:], seed=number) for number in range(num_batches)]


def flat(tensors) -> np.ndarray:
    """In NumPy's memory, which the virtual device does not count."""
    return np.concatenate([tensor.detach().numpy().ravel().astype(np.float64) for tensor in tensors])


def weights(trainer: FusionTrainer) -> np.ndarray:
    return flat(trainer.parameters)


def gradient(trainer: FusionTrainer, batches) -> tuple[np.ndarray, dict]:
    """The whole gradient that the optimizer is given, and the step's values."""
    seen = []
    handle = trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(flat(weight.grad for weight in trainer.parameters if weight.grad is not None))
    )
    values = trainer.train_step(batches)
    handle.remove()
    assert len(seen) == 1
    return seen[0], values


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def warm_trainer(batches, **options) -> tuple[FusionTrainer, VirtualDevice, int]:
    """A trainer with its optimizer's state made, its device, and the bytes that lie between two steps."""
    device = VirtualDevice()
    trainer = make_trainer(device, **options)
    trainer.train_step(batches)
    return trainer, device, device.current_bytes


@pytest.mark.parametrize("objectives", OBJECTIVES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_split_step_has_the_gradient_of_the_unsplit_one(objectives, dtype):
    batches, tolerance = window(), TOLERANCE[dtype]
    # the first two objectives have little room in float64, the others in float32
    room = 0.55 if (dtype == torch.float64) == (objectives in [*OBJECTIVES][:2]) else 0.8
    trainer, device, before_bytes = warm_trainer(batches, objectives=OBJECTIVES[objectives], dtype=dtype)
    expected, whole = gradient(trainer, batches)
    limit_bytes = before_bytes + int(room * (whole["peak_bytes"] - before_bytes))

    trainer, device, _ = warm_trainer(batches, objectives=OBJECTIVES[objectives], dtype=dtype)
    device.limit_bytes = limit_bytes
    found, values = gradient(trainer, batches)
    assert values["num_parts"] > 1
    assert values["num_out_of_memory"] == device.num_failures > 0
    assert values["peak_bytes"] <= limit_bytes
    assert values["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert relative(found, expected) <= tolerance


@pytest.mark.parametrize(
    ("precision", "first_step", "begin"),
    [("fp32", True, 0), ("fp16", True, 8), ("fp32", False, 15), ("fp16", False, 23)],
)
def test_whichever_operation_fails_the_step_is_done_once(precision, first_step, begin):
    batches = [make_batch(SIZES[:4])]

    def updates(fail_at: int | None) -> tuple[VirtualDevice, FusionTrainer, list[np.ndarray]]:
        device = VirtualDevice()
        trainer = make_trainer(device, objectives=OBJECTIVES["contrastive"], precision=precision)
        trainer.precision.scaler._init_scale = 64.0  # so that fp16 does not overflow
        if not first_step:
            trainer.train_step(batches)
        groups = [group["params"] for group in trainer.optimizer.param_groups]
        before = [flat(group) for group in groups]
        device.num_operations, device.fail_at = 0, fail_at
        trainer.train_step(batches)
        return device, trainer, [flat(group) - start for group, start in zip(groups, before, strict=True)]

    updates(None)  # fills the caches, so that every run has the same operations
    device, _, expected = updates(None)
    assert device.num_operations > 300
    num_failures = 0
    for fail_at in [*range(begin, device.num_operations, STRIDE), device.num_operations - 1]:
        device, trainer, found = updates(fail_at)
        assert device.num_failures == trainer.num_out_of_memory <= 1, fail_at
        num_failures += device.num_failures
        assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {2.0 - first_step}
        # Adam divides by the gradient's size, so that rounding shows where a gradient is near zero
        assert max(map(relative, found, expected)) < 0.05, fail_at
    assert num_failures > 5


def test_a_sample_that_does_not_fit_is_named_with_the_remedy():
    batches = [make_batch([(4, 16, 16), (4, 16, 16), (40, 96, 96)])]
    _, _, before_bytes = warm_trainer(batches, objectives=OBJECTIVES["contrastive"])
    trainer, device, _ = warm_trainer(batches, objectives=OBJECTIVES["contrastive"])
    device.limit_bytes = before_bytes + 100_000
    before = weights(trainer)
    with pytest.raises(
        RunError, match=r"'sample 0' does not fit into memory by itself: 40 tokens.*checkpointing"
    ):
        trainer.train_step(batches)
    assert (weights(trainer) == before).all()
    device.limit_bytes = None
    trainer.train_step(batches)  # and nothing was left behind


class Classifier(nn.Module):
    """A model with a mean loss of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, pixel_values, labels):
        loss = nn.functional.cross_entropy(self.layers(pixel_values), labels)
        return type("Output", (), {"loss": loss})()


def test_a_models_own_mean_loss_is_computed_in_parts_exactly():
    batches = [make_batch([(4, 32, 32)] * 7)]

    def gradient_at(fail_at: int | None) -> tuple[np.ndarray, dict]:
        torch.manual_seed(0)
        device = VirtualDevice(fail_at=fail_at)
        model = Classifier()
        model(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))  # makes the lazy layer
        return gradient(FusionTrainer(model, device="cpu", live=device), batches)

    expected, whole = gradient_at(None)
    found, values = gradient_at(8)
    assert (whole["num_parts"], values["num_parts"]) == (1, 2)
    assert relative(found, expected) <= 1e-6


def test_a_part_without_anything_to_learn_does_not_spoil_the_others():
    batch = make_batch([(4, 32, 32)] * 6)
    batch.labels[3:] = -100  # left out of the loss: the second half's own mean is over nothing
    torch.manual_seed(0)
    model = Classifier()
    model(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    values = FusionTrainer(model, device="cpu", live=VirtualDevice(fail_at=8)).train_step([batch])
    assert values["num_parts"] == 2
    assert math.isfinite(values["loss"])
    assert not values["skipped"]


def test_a_loss_that_compares_samples_is_not_computed_in_parts():
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 50, "eos_token_id": 2},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    trainer = FusionTrainer(CLIPModel(config), device="cpu", live=VirtualDevice(fail_at=200))
    with pytest.raises(RunError, match=r"compares the samples of a batch.*plan smaller batches"):
        trainer.train_step([make_batch([(4, 32, 32)] * 4)])


def test_one_rank_runs_out_of_memory_and_both_go_on_together():
    from tests.training.two_ranks_one_out_of_memory import main  # which imports this module

    run_ranks(main, 2)


def test_out_of_memory_is_an_event_with_its_phase():
    events: list[RunEvent] = []
    trainer = make_trainer(VirtualDevice(fail_at=60), emit=events.append)
    trainer.train_step(window(1))
    (event,) = events
    assert event.kind == "out_of_memory"
    assert event.values["phase"] == "forward"
    assert event.values["num_parts"] == 2
    assert "was chosen to fail" in event.values["operation"]


# while the statistics are copied, and in the forward pass
@pytest.mark.parametrize(("fail_at", "num_parts"), [(0, 1), (300, 2)])
def test_running_statistics_see_each_part_once(fail_at, num_parts):
    torch.manual_seed(0)
    options = {"text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16, "head_dim": 16}
    model = build_model("resnet18", vocab_size=50, **options)
    device = VirtualDevice()
    trainer = FusionTrainer(model, device="cpu", live=device)
    batch = make_batch([(4, 32, 32)] * 4)
    device.fail_at = fail_at
    trainer.train_step([batch])
    assert trainer.num_out_of_memory == 1
    assert {int(value) for name, value in model.state_dict().items() if "num_batches_tracked" in name} == {
        num_parts
    }


def test_an_error_in_a_part_says_that_memory_ran_out_before():
    options = {"text_dim": 32, "text_depth": 1, "hidden_dim": 32, "embed_dim": 16, "head_dim": 16}
    model = build_model("resnet18", vocab_size=50, **options)

    def scarce(_model, inputs):
        if len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("simulated")

    model.register_forward_pre_hook(scarce)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        FusionTrainer(model, device="cpu").train_step([make_batch([(4, 32, 32)] * 4)])
    assert caught.value.__notes__ == ["while a batch that had run out of memory ran again in parts"]


def test_an_evaluation_that_does_not_fit_is_done_in_halves_with_the_same_result():
    events: list[RunEvent] = []
    trainer = make_trainer(emit=events.append)
    batches = [make_batch(SIZES, seed=1), make_batch(SIZES[2:], seed=2)]
    device = VirtualDevice().add(trainer.model)
    with device:
        expected = trainer.evaluate(batches)
    between_bytes = device.current_bytes
    limit_bytes = between_bytes + int(0.7 * (device.peak_bytes - between_bytes))
    with VirtualDevice(limit_bytes=limit_bytes).add(trainer.model) as small:
        found = trainer.evaluate(batches)
    assert small.num_failures == len(events) > 0
    assert {event.values["phase"] for event in events} == {"evaluation"}
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name], rel=1e-4) for name in found if name != "eval_s")


def test_a_held_out_sample_that_does_not_fit_is_named():
    trainer, batch = make_trainer(), make_batch(SIZES)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"of 1000 are used; weights and batch alone do not fit$"
    ):
        make_trainer(VirtualDevice(limit_bytes=1000)).train_step([batch])
    held = (trainer.model, *batch.tensors())
    held_bytes = VirtualDevice().add(*held).current_bytes
    with (
        VirtualDevice(limit_bytes=held_bytes + 1000).add(*held),
        pytest.raises(RunError, match=r"batch of 1 from 'sample 0' does not fit .*single sample"),
    ):
        trainer.evaluate([batch])


class Noisy(nn.Module):
    """Has a loss of its own and dropout; two samples do not fit."""

    def __init__(self):
        super().__init__()
        self.head, self.noise = nn.Linear(3, 64), []

    def forward(self, pixel_values):
        if len(pixel_values) > 1:
            raise torch.OutOfMemoryError("simulated")
        self.noise.append(nn.functional.dropout(torch.ones(64)))
        return {"loss": (self.head(pixel_values.mean((2, 3))) * self.noise[-1]).mean()}


def test_every_part_of_a_models_own_loss_has_draws_of_its_own():
    model = Noisy()
    FusionTrainer(model, device="cpu").train_step([make_batch([(4, 16, 16)] * 4)])
    assert len(model.noise) == len({tuple(noise.tolist()) for noise in model.noise}) == 4


def test_gradient_norms_of_objectives_that_do_not_fit_are_computed_again(monkeypatch):
    weighting = make_weighting("gradnorm", ["contrastive", "matching"], interval=1)
    trainer = make_trainer(weighting=weighting)
    part_norms, calls = trainer.strategy.part_norms, []

    def scarce(parts):
        calls.append(parts)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("simulated")
        return part_norms(parts)

    monkeypatch.setattr(trainer.strategy, "part_norms", scarce)
    assert trainer.train_step(window(1))["num_out_of_memory"] == 1
    assert len(calls) == 4


# before the gradients are unscaled, and after
@pytest.mark.parametrize("function", ["make_state", "tensor_norms"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_whose_update_did_not_fit_leaves_nothing_to_the_next(precision, function, monkeypatch):
    first, second = window()
    trainer, fresh = make_trainer(precision=precision), make_trainer(precision=precision)
    trainer.precision.scaler._init_scale = fresh.precision.scaler._init_scale = 64.0  # fp16 does not overflow

    def scarce(_):
        raise torch.OutOfMemoryError("simulated")

    with monkeypatch.context() as patched:
        patched.setattr(f"mmlab.training.precision.{function}", scarce)
        with pytest.raises(RunError, match="out of memory 3 times"):
            trainer.train_step([first])
    found, _ = gradient(trainer, [second])
    expected, _ = gradient(fresh, [second])
    assert relative(found, expected) <= 1e-6


class Plain(nn.Module):
    """Returns an object that is neither a dataclass nor a tuple; a large batch does not fit."""

    def __init__(self, most, scale_shape=()):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.most = nn.Linear(3, 8), nn.Embedding(50, 8), most
        self.logit_scale = nn.Parameter(torch.ones(scale_shape))

    def forward(self, batch):
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("simulated")
        image = self.image(batch.pixel_values.float().mean((2, 3)))
        text = self.text(batch.input_ids).mean(1)
        return SimpleNamespace(image_embedding=image, text_embedding=text, logit_scale=self.logit_scale)


@pytest.mark.parametrize("scale_shape", [(), (1,)])  # a temperature may be a vector of one
@pytest.mark.parametrize("most", [4, 2, 1])
def test_an_output_that_is_a_plain_object_is_split_with_the_same_gradient(most, scale_shape):
    models = [Plain(99, scale_shape), Plain(most, scale_shape)]
    whole, parts = (FusionTrainer(model, device="cpu").train_step(window(1)) for model in models)
    assert parts["num_parts"] > 1
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"]) != 0
