"""Run by torchrun on two ranks: the image branch here, the text branch there, and one process's loss and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from batches import make_batch
from test_branches import GOALS, MISSING, SIZES, build, trainer_of
from test_out_of_memory import Classifier, relative
from torch import distributed

from mmlab.branches import BranchRanks, PipelinedBranches, Timeline, overlap
from mmlab.errors import DataError, OptionError, RunError
from mmlab.losses import Contrastive


def window():
    return [
        make_batch(SIZES, seed=1),
        make_batch(MISSING, seed=2),
        make_batch([(3, 0, 0), (4, 0, 0)], seed=3),  # no pair: nothing to learn for a contrastive loss
        make_batch(SIZES[2:5], seed=4),
    ]


def one_process(objectives, *, changes=None, **options):
    """Gradients by name, and the values of the step."""
    trainer = trainer_of(build(**(changes or {})), objectives, max_grad_norm=math.inf, **options)
    trainer.ranks.rank, trainer.ranks.world_size = 0, 1
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


def two_ranks(objectives, *, changes=None, **options):
    goals = {name: GOALS[name] for name in objectives}
    return BranchRanks(
        build(**(changes or {})), objectives=goals, lr=1e-4, **{"max_grad_norm": math.inf, **options}
    )


def same_gradient(rank: int) -> None:
    cases = [
        (["contrastive"], {"ahead": 0}, {}),
        (["contrastive", "matching"], {"ahead": 1}, {"modality_dropout": 0.4, "dropout": 0.3}),
        (["contrastive", "matching"], {"ahead": 3}, {"fusion": "multiscale"}),
        (["contrastive", "matching"], {"precision": "bf16"}, {}),
        (list(GOALS), {}, {}),
    ]
    for objectives, options, changes in cases:
        precision = options.get("precision", "fp32")
        (expected, values), _ = one_process(objectives, changes=changes, precision=precision)
        ranks = two_ranks(objectives, changes=changes, **options)
        found, told = gradients_of(ranks.model, ranks.optimizer, lambda: ranks.step(window()))  # noqa: B023
        assert found.keys() == {name for name in expected if ranks.owns(name)}
        largest = max(float((found[name] - expected[name]).abs().max()) for name in found)
        bitwise = (
            "masked_language" not in objectives
        )  # whose second use of the encoder is added in another order
        assert largest == 0 if bitwise else largest < 1e-6, (objectives, options, largest)
        assert told["loss"] == values["loss"]
        assert math.isclose(told["grad_norm"], values["grad_norm"], rel_tol=1e-6)
        print(f"rank {rank}, {objectives}, {options}, {changes}: largest difference {largest:.1e}")


def weights_follow_one_process_with_clipping(rank: int) -> None:
    trainer = trainer_of(build(), ["contrastive", "matching"], max_grad_norm=0.05, lr=1e-3)
    trainer.ranks.rank, trainer.ranks.world_size = 0, 1
    ranks = two_ranks(["contrastive", "matching"], max_grad_norm=0.05)
    for group in ranks.optimizer.param_groups:
        group["lr"] = 1e-3
    timeline = ranks.timeline = Timeline()
    for number in range(3):
        values = trainer.train_step([make_batch(SIZES, seed=number), make_batch(MISSING, seed=number)])
        told = ranks.step([make_batch(SIZES, seed=number), make_batch(MISSING, seed=number)])
        assert math.isclose(told["loss"], values["loss"], rel_tol=1e-5)
    ranks.share_weights()
    flat = [
        torch.cat([weight.detach().flatten() for weight in model.parameters()]).numpy()
        for model in (ranks.model, trainer.model)
    ]
    assert relative(*flat) < 1e-6
    spans = [None, None]
    distributed.all_gather_object(spans, timeline.spans)
    both = [span for spans_of_rank in spans for span in spans_of_rank]
    assert {span.branch for span in both} == {"image", "text", "fusion"}
    assert {span.number for span in both} == set(range(6))
    assert 0 <= overlap(both, "image", ("text", "fusion")) <= 1


def a_frozen_branch_and_nothing_to_learn(rank: int) -> None:
    for part in ("image_", "text_"):
        ranks = two_ranks(["contrastive"])
        for name, weight in ranks.model.named_parameters():
            weight.requires_grad_(not name.startswith(part))
        found, told = gradients_of(ranks.model, ranks.optimizer, lambda: ranks.step(window()))  # noqa: B023
        assert bool(found) == (rank == 1 or part == "text_")
        assert told["grad_norm"] > 0
    told = two_ranks(["contrastive"]).step([make_batch([(3, 0, 0), (4, 0, 0)])])
    assert told["skipped"]
    assert math.isnan(told["loss"])


class Broken:
    """An objective that fails."""

    def count(self, batch):
        return len(batch)

    def __call__(self, output, batch):
        raise KeyError("broken")


def one_rank_gives_up_and_the_other_says_so(rank: int) -> None:
    ranks = BranchRanks(build(), objectives={"broken": Broken()})
    error, message = (KeyError, "broken") if rank == 1 else (RunError, "rank 1 could not do step 0")
    with pytest.raises(error, match=message):
        ranks.step(window())
    ranks = BranchRanks(build(max_tokens=16), objectives={"contrastive": Contrastive()}, ahead=0)
    error, message = (DataError, "17 tokens") if rank == 1 else (RunError, "rank 1 could not do step 0")
    with pytest.raises(error, match=message):
        ranks.step([make_batch(SIZES), make_batch([(17, 32, 32), (3, 16, 16)])])
    ranks = two_ranks(["contrastive"])
    if rank == 0:
        ranks.model.image_head.weight.data.fill_(math.nan)
    with pytest.raises(RunError, match=r"step 0: loss .*nan.* not finite"):
        ranks.step([make_batch(SIZES)])
    if rank == 0:
        ranks.model.image_head.register_forward_pre_hook(Broken().__call__)
    error, message = (KeyError, "broken") if rank == 0 else (RunError, "rank 0 could not do step 0")
    with pytest.raises(error, match=message):
        ranks.step(window())


def torchs_pipeline_has_the_gradient_of_a_window(rank: int) -> None:
    whole = make_batch([(9, 32, 32), (4, 16, 32), (7, 32, 16), (3, 32, 32)] * 2, seed=7)
    parts = [whole.part(slice(start, start + 4)) for start in (0, 4)]
    trainer = trainer_of(build(), ["contrastive"], max_grad_norm=math.inf)
    trainer.ranks.rank, trainer.ranks.world_size = 0, 1
    expected, values = gradients_of(trainer.model, trainer.optimizer, lambda: trainer.train_step(parts))
    for schedule in ("gpipe", "1f1b"):
        model = build()
        pipeline = PipelinedBranches(
            model, num_micro_batches=2, schedule=schedule, objectives={"contrastive": GOALS["contrastive"]}
        )
        loss = pipeline.step(whole)
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert found
        assert found.keys() <= expected.keys()
        largest = max(float((found[name] - expected[name]).abs().max()) for name in found)
        assert largest < 1e-6, (schedule, largest)
        assert loss is None if rank == 0 else math.isclose(loss, values["loss"], rel_tol=1e-5)
    with pytest.raises(OptionError, match="3 samples cannot be cut into 2 equal micro-batches"):
        pipeline.step(whole.part(slice(0, 3)))


def what_cannot_work_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown pipeline schedule 'zigzag'"):
        PipelinedBranches(build(), num_micro_batches=2, schedule="zigzag")
    with pytest.raises(OptionError, match="fp16 scales the loss"):
        two_ranks(["contrastive"], precision="fp16")
    with pytest.raises(OptionError, match="negatives come from all of them"):
        BranchRanks(build(), objectives=["contrastive_all_ranks"])
    with pytest.raises(OptionError, match="Classifier has no branches"):
        BranchRanks(Classifier())
    with pytest.raises(OptionError, match="ahead must be at least 0, found -1"):
        two_ranks(["contrastive"], ahead=-1)


def main() -> None:
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    same_gradient(rank)
    weights_follow_one_process_with_clipping(rank)
    a_frozen_branch_and_nothing_to_learn(rank)
    one_rank_gives_up_and_the_other_says_so(rank)
    torchs_pipeline_has_the_gradient_of_a_window(rank)
    what_cannot_work_is_refused()
    print("ok")


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    main()
    distributed.destroy_process_group()
