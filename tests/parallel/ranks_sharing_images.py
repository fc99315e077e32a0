"""On three ranks or more: all but the last share the images of every micro-batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import distributed

from mmlab.errors import OptionError, RunError
from mmlab.model.packing import enable_packing
from tests.batches import make_batch
from tests.parallel.test_branches import GOALS, MISSING, SIZES, build, trainer_of
from tests.parallel.two_ranks_of_branches import Broken, branch_trainer, gradients_of, trainer_on_ranks

CLOSE = {"fp32": 1e-6, "bf16": 1e-2}  # of the gradient's L2 norm: rows are added rank by rank
TEXTS_FIRST = [(4, 0, 0), (5, 0, 0), (6, 0, 0), (7, 48, 48), (3, 32, 32), (4, 16, 16)]  # rank 0 has no image


def window():
    return [
        make_batch(SIZES, seed=1),
        make_batch(MISSING, seed=2),
        make_batch(SIZES[:2], seed=3),  # with four ranks one has no image of these
        make_batch(TEXTS_FIRST, seed=4),
    ]


def distance(found, expected) -> float:
    """Relative, in L2, over the weights that this rank has."""
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    return math.sqrt(apart / sum(float(expected[name].double().square().sum()) for name in found))


def same_gradient(rank: int) -> None:
    cases = [
        (["contrastive"], {}, {}),
        (["contrastive", "matching"], {}, {"fusion": "multiscale"}),
        (["contrastive", "matching"], {"checkpointing": True, "channels_last": True}, {}),
        (list(GOALS), {}, {}),
        (["contrastive", "matching"], {"image_layers": 1}, {"image_depth": 2}),
        (["contrastive"], {"precision": "bf16", "ahead": 0}, {}),
        (["contrastive", "matching"], {"packed": True}, {}),
    ]
    for objectives, options, changes in cases:
        options, close = dict(options), CLOSE[options.get("precision", "fp32")]
        prepare = enable_packing if options.pop("packed", False) else lambda model: model
        alike = {name: value for name, value in options.items() if name not in ("image_layers", "ahead")}
        plain = trainer_of(prepare(build(**changes)), objectives, max_grad_norm=math.inf, **alike)
        plain.ranks.rank, plain.ranks.world_size = 0, 1
        expected, values = gradients_of(plain.model, plain.optimizer, lambda: plain.train_step(window()))  # noqa: B023
        goals = {name: GOALS[name] for name in objectives}
        ranks = trainer_on_ranks(prepare(build(**changes)), goals, max_grad_norm=math.inf, **options)
        found, told = gradients_of(ranks.model, ranks.optimizer, lambda: ranks.train_step(window()))  # noqa: B023
        assert found.keys() == {name for name in expected if ranks.branches.owns(name)}
        assert distance(found, expected) < close, (objectives, options, distance(found, expected))
        for key in ("loss", "grad_norm", "image_grad_norm", "text_grad_norm"):
            assert math.isclose(told[key], values[key], rel_tol=close)
        print(f"rank {rank}, {objectives}, {options}, {changes}: {distance(found, expected):.1e}")


def they_stay_alike_and_follow_one_process(rank: int) -> None:
    """with clipping and drawn masks, and a run of three ranks goes on in one process."""
    options = {"max_grad_norm": 0.05, "lr": 1e-3}
    plain = trainer_of(build(), **options)
    plain.ranks.rank, plain.ranks.world_size = 0, 1
    ranks = branch_trainer(["contrastive", "matching"], **options)
    for number in range(3):
        batches = [make_batch(SIZES, seed=number), make_batch(MISSING, seed=number)]
        values, told = plain.train_step(batches), ranks.train_step(batches)
        assert math.isclose(told["loss"], values["loss"], rel_tol=1e-6)
    own = {
        name: weight for name, weight in ranks.model.named_parameters() if name.startswith("image_encoder.")
    }
    everywhere = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, own)
    for other in everywhere[1:-1]:
        assert all(torch.equal(other[name], weight) for name, weight in everywhere[0].items())
    plain.load_state_dict(copy.deepcopy(ranks.state_dict()))
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, ranks.model.state_dict()[name])
    assert all(ranks.branches.owns(name) for name, weight in named(ranks) if weight in ranks.optimizer.state)
    batch = make_batch(SIZES, seed=9)
    assert ranks.evaluate([batch])["loss"] == plain.evaluate([batch])["loss"]
    for _ in range(2):
        found, expected = (trainer.train_step([batch])["loss"] for trainer in (ranks, plain))
        assert math.isclose(found, expected, rel_tol=1e-5)


def named(trainer):
    return trainer.model.named_parameters()


def image_ranks_draw_other_masks(rank: int) -> None:
    """the same samples twice in a batch, half of them on each rank: dropout tells them apart."""
    ranks = branch_trainer(["contrastive"], changes={"dropout": 0.3})
    draws: list[float] = []
    if ranks.branches.is_image_rank:
        ranks.model.image_head.register_forward_pre_hook(lambda *_: draws.append(float(torch.rand(()))))
    ranks.train_step([make_batch(SIZES)])
    told = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, draws)
    assert len({number for numbers in told for number in numbers}) == distributed.get_world_size() - 1


def one_rank_gives_up_and_all_others_say_so(rank: int) -> None:
    last = distributed.get_world_size() - 1
    for broken in (0, 1, last):
        ranks = (
            trainer_on_ranks(build(), {"broken": Broken()})
            if broken == last
            else branch_trainer(["contrastive"])
        )
        if rank == broken != last:
            ranks.model.image_head.register_forward_pre_hook(Broken())
        error, message = (
            (KeyError, "broken") if rank == broken else (RunError, f"rank {broken} could not do step 0")
        )
        with pytest.raises(error, match=message):
            ranks.train_step(window())


def a_message_that_cannot_be_made_leaves_nobody_waiting(rank: int) -> None:
    """for what its header announced."""
    last = distributed.get_world_size() - 1
    for broken in (0, last):
        ranks = branch_trainer(["contrastive", "matching"])
        error, message = RunError, f"rank {broken} could not do step 0"
        with pytest.MonkeyPatch.context() as patch:
            if rank == broken:
                error, message = KeyError, "broken"
                patch.setattr("mmlab.parallel.branches.wire._bytes_of", Broken())
            with pytest.raises(error, match=message):
                ranks.train_step(window())


def batch_normalisation_is_refused() -> None:
    with pytest.raises(OptionError, match=r"batch normalisation \(image_encoder\..*needs whole batches"):
        branch_trainer(["contrastive"], changes={"image": "resnet18"})


def main() -> None:
    rank = distributed.get_rank()
    same_gradient(rank)
    they_stay_alike_and_follow_one_process(rank)
    image_ranks_draw_other_masks(rank)
    one_rank_gives_up_and_all_others_say_so(rank)
    a_message_that_cannot_be_made_leaves_nobody_waiting(rank)
    batch_normalisation_is_refused()
