"""On two ranks: the image branch here, the text branch there, and one process's loss and gradient."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import distributed

from mmlab.errors import DataError, OptionError, RunError
from mmlab.model.packing import enable_packing
from mmlab.model.presets import build_model
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive, Matching
from mmlab.training.losses.masked_language import MaskedLanguage
from mmlab.training.strategy import Strategy
from mmlab.training.weighting import make_weighting
from tests.batches import make_batch
from tests.training.test_out_of_memory import TINY, Classifier

SIZES = [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 32, 32), (5, 16, 64), (7, 48, 48), (2, 32, 16)]
MISSING = [(4, 32, 48), (6, 0, 0), (0, 16, 64), (7, 48, 48), (3, 0, 0)]
GOALS = {
    "contrastive": Contrastive(num_negatives=31),
    "matching": Matching(),
    "masked_language": MaskedLanguage(mask_id=4, mask_ratio=0.4),
}
DEEP = {"image_depth": 3}


def build(**changes):
    torch.manual_seed(0)
    return build_model("tiny", vocab_size=50, **{**TINY, **changes})


def trainer_of(model, objectives=("contrastive", "matching"), **options):
    goals = {name: GOALS[name] for name in objectives}
    return FusionTrainer(model, device="cpu", objectives=goals, **options)


def window():
    return [
        make_batch(SIZES, seed=1),
        make_batch(MISSING, seed=2),
        make_batch([(3, 0, 0), (4, 0, 0)], seed=3),  # no pair: nothing to learn for a contrastive loss
        make_batch(SIZES[2:5], seed=4),
    ]


def one_process(objectives, *, changes=None, **options):
    """Gradients by name, and the values of the step."""
    trainer = trainer_of(
        build(**(changes or {})), objectives, max_grad_norm=math.inf, strategy=Strategy(), **options
    )
    return gradients_of(trainer.model, trainer.optimizer, lambda: trainer.train_step(window())), trainer


def gradients_of(model, optimizer, step):
    seen = {}

    def keep(*_):
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                seen[name] = weight.grad.clone()

    handle = optimizer.register_step_pre_hook(keep)
    values = step()
    handle.remove()
    return seen, values


def branch_trainer(objectives, *, changes=None, **options):
    goals = {name: GOALS[name] for name in objectives}
    return trainer_on_ranks(build(**(changes or {})), goals, **{"max_grad_norm": math.inf, **options})


def trainer_on_ranks(model, goals, *, ahead=1, image_layers=None, **options):
    parallel = ParallelOptions(strategy="branch", ahead=ahead, image_layers=image_layers)
    return FusionTrainer(model, device="cpu", objectives=goals, strategy=make_strategy(parallel), **options)


def same_gradient(rank: int) -> None:
    cases = [
        (["contrastive"], {"ahead": 0}, {}),
        (["contrastive", "matching"], {"ahead": 1}, {"dropout": 0.3}),
        (["contrastive", "matching"], {"ahead": 3}, {"fusion": "multiscale"}),
        (["contrastive", "matching"], {"precision": "bf16", "checkpointing": True}, {}),
        (["contrastive", "matching"], {"channels_last": True}, {}),
        (["contrastive", "matching"], {}, {"image": "resnet18"}),  # whose features are no contiguous tensor
        (list(GOALS), {}, {}),
        (["contrastive"], {"image_layers": 1}, DEEP),
        (["contrastive", "matching"], {"image_layers": 2, "precision": "bf16", "checkpointing": True}, DEEP),
    ]
    for objectives, options, changes in cases:
        alike = {name: value for name, value in options.items() if name not in ("ahead", "image_layers")}
        (expected, values), _ = one_process(objectives, changes=changes, **alike)
        ranks = branch_trainer(objectives, changes=changes, **options)
        found, told = gradients_of(ranks.model, ranks.optimizer, lambda: ranks.train_step(window()))  # noqa: B023
        assert found.keys() == {name for name in expected if ranks.strategy.owns(name)}
        if "image_layers" in options:
            assert ("image_encoder.blocks.2.out.weight" in found) == (rank == 1)
        largest = max(float((found[name] - expected[name]).abs().max()) for name in found)
        bitwise = (
            "masked_language" not in objectives
        )  # whose second use of the encoder is added in another order
        assert largest == 0 if bitwise else largest < 1e-6, (objectives, options, largest)
        assert told["loss"] == values["loss"]
        assert math.isclose(told["grad_norm"], values["grad_norm"], rel_tol=0 if bitwise else 1e-6)
        print(f"rank {rank}, {objectives}, {options}, {changes}: largest difference {largest:.1e}")


def weights_follow_one_process_with_clipping(rank: int) -> None:
    trainer = trainer_of(
        build(), ["contrastive", "matching"], max_grad_norm=0.05, lr=1e-3, strategy=Strategy()
    )
    ranks = branch_trainer(["contrastive", "matching"], max_grad_norm=0.05, lr=1e-3)
    for number in range(3):
        values = trainer.train_step([make_batch(SIZES, seed=number), make_batch(MISSING, seed=number)])
        told = ranks.train_step([make_batch(SIZES, seed=number), make_batch(MISSING, seed=number)])
        assert told["loss"] == values["loss"]
        assert told["grad_norm"] == values["grad_norm"] > 0.05
        assert 0 < told["rank_wait_s"] < told["step_s"]
    ranks.strategy.gather_weights()
    assert_equal(ranks.model.state_dict(), trainer.model.state_dict())


def a_frozen_branch_and_nothing_to_learn(rank: int) -> None:
    for part in ("image_", "text_"):
        ranks = branch_trainer(["contrastive"])
        for name, weight in ranks.model.named_parameters():
            weight.requires_grad_(not name.startswith(part))
        found, told = gradients_of(ranks.model, ranks.optimizer, lambda: ranks.train_step(window()))  # noqa: B023
        assert bool(found) == (rank == 1 or part == "text_")
        assert told["grad_norm"] > 0
    ranks = branch_trainer(["contrastive"], changes={"fusion": "multiscale"}, freeze=["image_*"])
    # the fusion's part on rank 0 learns nothing, and waits for nothing
    assert ranks.train_step(window())["grad_norm"] > 0
    told = branch_trainer(["contrastive"]).train_step([make_batch([(3, 0, 0), (4, 0, 0)])])
    assert told["skipped"]
    assert math.isnan(told["loss"])


def a_checkpoint_is_that_of_one_process(rank: int, *, image_layers: int | None, then: int | None) -> None:
    """weights and moments of both branches, and neither rank keeps the other's; the next run may cut elsewhere."""
    objectives = ["contrastive", "matching"]
    trainer = trainer_of(build(**DEEP), objectives, max_grad_norm=math.inf, strategy=Strategy())
    ranks = branch_trainer(objectives, changes=DEEP, image_layers=image_layers)
    for step in (ranks.train_step, trainer.train_step):
        step(window())
    state, expected = ranks.state_dict(), trainer.state_dict()
    assert state["progress"] == expected["progress"]
    assert_equal(state["model"], expected["model"])
    moments = state["optimizer"]["state"]
    assert moments.keys() == expected["optimizer"]["state"].keys()
    for place, values in expected["optimizer"]["state"].items():
        assert_equal(moments[place], values)
    owned = {name for name, weight in ranks.model.named_parameters() if weight in ranks.optimizer.state}
    assert owned
    assert all(map(ranks.strategy.owns, owned))
    found, values = ranks.evaluate([make_batch(SIZES)]), trainer.evaluate([make_batch(SIZES)])
    assert {key: found[key] for key in found if key != "eval_s"} == {
        key: values[key] for key in values if key != "eval_s"
    }
    again = branch_trainer(objectives, changes=DEEP, image_layers=then)
    again.load_state_dict(state)
    for step in (again.train_step, trainer.train_step):
        step(window())
    again.strategy.gather_weights()
    assert_equal(again.model.state_dict(), trainer.model.state_dict())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def weights_of_objectives_follow_gradients_of_both_branches(rank: int) -> None:
    """GradNorm on two ranks."""
    options = {"max_grad_norm": math.inf}
    names = ["contrastive", "matching"]
    trainer = trainer_of(
        build(),
        names,
        weighting=make_weighting("gradnorm", names, interval=1),
        strategy=Strategy(),
        **options,
    )
    ranks = branch_trainer(names, weighting=make_weighting("gradnorm", names, interval=1), **options)
    for number in range(3):
        expected = trainer.train_step([make_batch(SIZES, seed=number)])
        found = ranks.train_step([make_batch(SIZES, seed=number)])
    for name in ("contrastive_weight", "matching_weight"):
        assert found[name] == expected[name]


class Broken:
    """An objective, or another function, that fails."""

    def count(self, batch):
        return len(batch)

    def __call__(self, *_, **__):
        raise KeyError("broken")


def one_rank_gives_up_and_the_other_says_so(rank: int) -> None:
    ranks = trainer_on_ranks(build(), {"broken": Broken()})
    error, message = (KeyError, "broken") if rank == 1 else (RunError, "rank 1 failed to do step 0")
    with pytest.raises(error, match=message):
        ranks.train_step(window())
    ranks = trainer_on_ranks(build(max_tokens=16), {"contrastive": Contrastive()}, ahead=0)
    error, message = (DataError, "17 tokens") if rank == 1 else (RunError, "rank 1 failed to do step 0")
    with pytest.raises(error, match=message):
        ranks.train_step([make_batch(SIZES), make_batch([(17, 32, 32), (3, 16, 16)])])
    ranks = branch_trainer(["contrastive"])
    if rank == 0:
        ranks.model.image_head.weight.data.fill_(math.nan)
    with pytest.raises(RunError, match=r"step 0: loss .*nan.* not finite"):
        ranks.train_step([make_batch(SIZES)])
    if rank == 0:
        ranks.model.image_head.register_forward_pre_hook(Broken())
    error, message = (KeyError, "broken") if rank == 0 else (RunError, "rank 0 failed to do step 0")
    with pytest.raises(error, match=message):
        ranks.train_step(window())
    with pytest.raises(RunError, match="a rank failed earlier, and what was sent is lost"):
        ranks.train_step(window())


def ranks_must_see_the_same_samples(rank: int) -> None:
    ranks = branch_trainer(["contrastive"])
    with pytest.raises(RunError, match="step 0: the ranks have different batches"):
        ranks.train_step(window()[rank:])
    ranks.train_step(window())


def what_is_not_finite_leaves_running_statistics_alone(rank: int) -> None:
    model = build()
    model.image_head = torch.nn.Sequential(
        model.image_head, torch.nn.BatchNorm1d(model.image_head.out_features)
    )
    ranks = trainer_on_ranks(model, {"contrastive": GOALS["contrastive"]}, on_nonfinite="skip")
    broken = dataclasses.replace(make_batch(SIZES), weights=torch.full((len(SIZES),), math.nan))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert ranks.train_step([broken])["skipped"]
    assert_equal(model.state_dict(), before)
    assert not ranks.train_step([make_batch(SIZES)])["skipped"]


def a_message_that_cannot_be_made_leaves_nobody_waiting(rank: int) -> None:
    """for what its header announced."""
    for broken in (0, 1):
        ranks = branch_trainer(["contrastive", "matching"])
        error, message = RunError, f"rank {broken} failed to do step 0"
        with pytest.MonkeyPatch.context() as patch:
            if rank == broken:
                error, message = KeyError, "broken"
                patch.setattr("mmlab.parallel.wire.sorted", Broken(), raising=False)  # of strides
            with pytest.raises(error, match=message):
                ranks.train_step(window())


def what_cannot_work_is_refused() -> None:
    with pytest.raises(OptionError, match="fp16 scales the loss"):
        branch_trainer(["contrastive"], precision="fp16")
    with pytest.raises(OptionError, match="so contrastive already has all negatives"):
        trainer_on_ranks(build(), ["contrastive_all_ranks"])
    with pytest.raises(OptionError, match="LossModel has no two branches"):
        trainer_on_ranks(Classifier(), ["contrastive"])
    (own := build()).forward = lambda batch: None  # or a class that overrides it
    with pytest.raises(OptionError, match="FusionModel has its own forward, which no rank calls"):
        trainer_on_ranks(own, ["contrastive"])
    with pytest.raises(OptionError, match="one alone cannot run a micro-batch again in parts"):
        branch_trainer(["contrastive"], on_out_of_memory="split")
    with pytest.raises(OptionError, match="no rank calls the whole model; use compile=False"):
        branch_trainer(["contrastive"], compile=True)
    with pytest.raises(OptionError, match="ahead must be at least 0, found -1"):
        branch_trainer(["contrastive"], ahead=-1)
    for image_layers, changes, message in (
        (3, DEEP, "cut after block 3: it has 3 blocks, so 1 to 2 of them"),
        (1, {**DEEP, "fusion": "multiscale"}, "multiscale fusion takes features of all depths in one place"),
        (1, {"image": "resnet18"}, "ResNet cannot be cut between two blocks"),
    ):
        with pytest.raises(OptionError, match=message):
            branch_trainer(["contrastive"], changes=changes, image_layers=image_layers)
    with pytest.raises(OptionError, match="cut after block 1: its samples are packed into one stream"):
        trainer_on_ranks(enable_packing(build(**DEEP)), ["contrastive"], image_layers=1)
    with pytest.raises(OptionError, match="image_layers must be at least 1, found 0"):
        branch_trainer(["contrastive"], image_layers=0)
    with pytest.raises(
        OptionError, match=r"image_layers=1 cuts the image branch, which strategy='ddp' leaves"
    ):
        ParallelOptions(image_layers=1)


def main() -> None:
    rank = distributed.get_rank()
    same_gradient(rank)
    weights_follow_one_process_with_clipping(rank)
    a_frozen_branch_and_nothing_to_learn(rank)
    for image_layers, then in ((None, None), (1, 2), (2, None)):
        a_checkpoint_is_that_of_one_process(rank, image_layers=image_layers, then=then)
    weights_of_objectives_follow_gradients_of_both_branches(rank)
    ranks_must_see_the_same_samples(rank)
    what_is_not_finite_leaves_running_statistics_alone(rank)
    one_rank_gives_up_and_the_other_says_so(rank)
    a_message_that_cannot_be_made_leaves_nobody_waiting(rank)
    what_cannot_work_is_refused()
