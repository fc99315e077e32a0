"""On several ranks: gradients summed in the backward pass are those of one process with all samples."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import distributed

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.errors import OptionError, RunError
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import build_model
from mmlab.parallel.strategies import make_strategy
from mmlab.pricing.breakdown import price
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.runs.meters import LiveBytes
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.strategy import Strategy
from mmlab.types import Aspect, Batch
from tests.batches import make_batch, merge
from tests.training.test_out_of_memory import TINY, gradient, make_trainer, relative, weights
from tests.training.test_trainer import PairDistance  # a loss of each sample by itself

SIZES = [
    [(4, 32, 48), (9, 16, 16), (3, 48, 32), (6, 0, 0), (5, 16, 64)],  # one text without an image
    [(7, 48, 48), (0, 32, 16), (2, 32, 16)],  # one image without a text
    [(3, 16, 32), (4, 32, 32)],
    [(5, 32, 32)],
    [(6, 0, 0), (3, 0, 0)],  # nothing to learn from for losses of pairs
    [(6, 16, 16), (3, 16, 16), (2, 16, 32), (4, 32, 32)],
]
SAMPLE = Path(__file__).parents[2] / "data/sample"
WINDOWS = [[0, 3, 2], [1], [4], [2, 5]]  # of four ranks; two ranks have the first two
MARKED = {0, 3}  # micro-batches whose samples `Matched` looks at


class Matched:
    """The fusion's opinion of marked samples: weights that some micro-batches, or ranks, do not use at all."""

    def count(self, batch: Batch) -> int:
        return len(batch) if batch.weights is not None else 0

    def __call__(self, output, batch: Batch):
        if batch.weights is None:
            return output.image_embedding.sum() * 0
        rows = torch.arange(len(batch))
        return torch.nn.functional.softplus(output.match(rows, rows)).sum()


def micro_batch(number: int, marked: set[int] = MARKED) -> Batch:
    batch = make_batch(SIZES[number], seed=number)
    groups = torch.arange(len(batch)) + 100 * number
    weights = torch.ones(len(batch)) if number in marked else None
    return dataclasses.replace(batch, groups=groups, weights=weights)


def window(rank: int, marked: set[int] = MARKED) -> list[Batch]:
    return [micro_batch(number, marked) for number in WINDOWS[rank]]


def alone(**options):
    """A trainer that knows no other rank."""
    return make_trainer(strategy=Strategy(), **options)


def by_weight(trainer, batches) -> tuple[dict[str, torch.Tensor | None], dict]:
    """The gradient that the optimizer is given, weight by weight."""
    seen: dict[str, torch.Tensor | None] = {}

    def take(*_):
        for name, weight in trainer.model.named_parameters():
            seen[name] = None if weight.grad is None else weight.grad.clone()

    handle = trainer.optimizer.register_step_pre_hook(take)
    values = trainer.train_step(batches)
    handle.remove()
    return seen, values


def largest(number: float) -> float:
    value = torch.tensor(number, dtype=torch.float64)
    distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
    return float(value)


def same_gradient(rank: int, world_size: int) -> None:
    """Unequal batches and windows, missing modalities, weights that an earlier micro-batch uses, or one rank alone."""
    goals = {"distance": PairDistance(), "matched": Matched()}
    every = [batch for other in range(world_size) for batch in window(other)]
    for dtype, precision, tolerance in (
        (torch.float64, "fp32", 1e-12),
        (torch.float32, "fp32", 1e-6),
        (torch.float32, "bf16", 2e-2),
    ):
        trainer = make_trainer(
            objectives=goals, dtype=dtype, precision=precision, max_grad_norm={"image": 1e-3}
        )
        single = alone(objectives=goals, dtype=dtype, precision=precision, max_grad_norm={"image": 1e-3})
        for step in range(2):  # buckets are ordered anew after the first
            found, values = by_weight(trainer, window(rank))
            expected, whole = by_weight(single, every)
            assert trainer.strategy.reduction_started  # it was overlapped
            for name, one in expected.items():
                assert (one is None) == (found[name] is None), name
            assert any(one is None for one in expected.values())  # of the head for hidden tokens
            apart = torch.cat(
                [(found[name] - one).flatten() for name, one in expected.items() if one is not None]
            )
            norm = torch.cat([one.flatten() for one in expected.values() if one is not None]).norm()
            difference = largest(float(apart.norm() / norm))
            assert difference <= tolerance, (dtype, precision, step, difference)
            assert math.isclose(values["grad_norm"], whole["grad_norm"], rel_tol=max(tolerance, 1e-6))
            assert math.isclose(
                values["image_grad_norm"], whole["image_grad_norm"], rel_tol=max(tolerance, 1e-6)
            )
            if rank == 0:
                print(
                    f"gradient {world_size} ranks {dtype} {precision}: {difference:.1e}, {apart.abs().max():.1e}"
                )
        # Adam divides by the gradient's size, so that rounding shows where a gradient is near zero
        assert largest(relative(weights(trainer), weights(single))) < max(1e-3, tolerance)
    what_no_rank_used_any_more(rank, trainer)


def what_no_rank_used_any_more(rank: int, trainer) -> None:
    """has no gradient, though its bucket held one in the step before."""
    found, _ = by_weight(trainer, window(rank, marked=set()))
    assert found["match_head.weight"] is None
    assert found["image_head.weight"] is not None


def every_rank_has_the_same_weights(trainer) -> None:
    mine = torch.from_numpy(weights(trainer))
    first = mine.clone()
    distributed.broadcast(first, src=0)
    assert torch.equal(mine, first)


def all_negatives(rank: int, world_size: int) -> None:
    """Embeddings are gathered in every micro-batch, also where a rank has none of that number."""
    goals = {"contrastive": Contrastive(all_ranks=True), "distance": PairDistance()}
    single = {**goals, "contrastive": Contrastive()}
    numbers = [
        [window(other)[place] for other in range(world_size) if place < len(WINDOWS[other])]
        for place in range(3)
    ]
    every = [
        merge([dataclasses.replace(batch, weights=None) for batch in parts]) for parts in numbers if parts
    ]
    mine = [dataclasses.replace(batch, weights=None) for batch in window(rank)]
    found, _ = gradient(make_trainer(objectives=goals, dtype=torch.float64), mine)
    expected, _ = gradient(alone(objectives=single, dtype=torch.float64), every)
    difference = largest(relative(found, expected))
    assert difference <= 1e-12, difference
    if rank == 0:
        print(f"all negatives {world_size} ranks: {difference:.1e}")


def one_model_on_all_ranks(rank: int) -> None:
    """Whatever the ranks were built with: under each strategy they train rank 0's weights, and differing models are
    refused."""
    for options in ("reduce", "ddp"):
        torch.manual_seed(rank)
        model = build_model("tiny", vocab_size=50, **TINY)
        trainer = FusionTrainer(model, device="cpu", strategy=make_strategy(options))
        every_rank_has_the_same_weights(trainer)
        trainer.train_step(window(rank))
        every_rank_has_the_same_weights(trainer)
    with pytest.raises(OptionError, match=r"the ranks' models differ: rank 1 and rank 0"):
        FusionTrainer(
            build_model("tiny", vocab_size=50 + rank, **TINY), device="cpu", strategy=make_strategy("reduce")
        )
    with pytest.raises(OptionError, match="2 ranks were started without a strategy"):
        FusionTrainer(build_model("tiny", vocab_size=50, **TINY), device="cpu")


def evaluation_is_shared(rank: int) -> None:
    """Each rank measures a part of the held-out batches, and all have the figures of the whole."""
    batches = [micro_batch(number) for number in (0, 1, 2, 5, 3)]
    for number, batch in enumerate(batches):
        batch.record_ids = [f"{number}-{name}" for name in batch.record_ids]
    goals = {"contrastive": Contrastive()}
    trainer, single = make_trainer(objectives=goals), alone(objectives=goals)
    num_calls = 0

    def count(*_) -> None:
        nonlocal num_calls
        num_calls += 1

    trainer.model.register_forward_hook(count)
    found, expected = trainer.evaluate(batches), single.evaluate(batches)
    assert num_calls == (3, 2)[rank]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert key == "eval_s" or math.isclose(found[key], value, rel_tol=1e-6), key


def samples_are_shared(rank: int) -> None:
    """A loader takes this rank's share of a plan for the ranks; a plan for one process is refused."""
    records = read_records(SAMPLE, progress=False)[:24]
    dataset = MultimodalDataset(records, image_policy=Aspect(32 * 32))
    model = build_model("tiny", vocab_size=len(dataset.tokenizer), **TINY)
    trainer = FusionTrainer(model, device="cpu", strategy=make_strategy("ddp"))
    with pytest.raises(
        OptionError, match=r"each of 2 would train all samples: make_scheduler\(..., world_size=2\)"
    ):
        trainer.fit(PlannedLoader(dataset, make_scheduler("random", batch_size=4), num_workers=0))
    loader = PlannedLoader(dataset, make_scheduler("random", batch_size=4, world_size=2), num_workers=0)
    ids = [record_id for batch in loader for record_id in batch.record_ids]
    found = trainer.strategy.gather_objects(lambda: ids, "compare")
    assert sorted([*found[0], *found[1]]) == sorted(records.ids)
    for evaluate in (trainer.evaluate, lambda own: trainer.fit(loader, eval_loader=own)):
        with pytest.raises(OptionError, match="plan those of eval_loader with world_size=1"):
            evaluate(loader)
    assert len(trainer.fit(loader)) == len(loader)


def running_statistics_of_rank_0_are_evaluated_and_saved(rank: int) -> None:
    """Those that a checkpoint has, so that its figures are those of the run; under fsdp any rank may write them."""
    for name in ("ddp", "fsdp"):
        model = build_model("resnet18", vocab_size=50, text_depth=1)
        trainer = FusionTrainer(model, device="cpu", strategy=make_strategy(name))
        trainer.train_step([micro_batch(rank)])
        norms = [norm.running_mean for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
        whole = torch.cat(norms)
        assert largest(float(whole.sum())) > -largest(-float(whole.sum())), (
            "each rank has those of its images"
        )
        if name == "ddp":
            trainer.evaluate([micro_batch(0), micro_batch(1)])
        else:
            trainer.state_dict()
        whole = torch.cat(norms)
        assert largest(float(whole.sum())) == -largest(-float(whole.sum()))


def a_sample_that_is_not_finite_is_named_on_all_ranks(rank: int) -> None:
    trainer = make_trainer()
    batch = micro_batch(rank)
    batch.record_ids = [f"{rank}-{name}" for name in batch.record_ids]

    def spoil(_model, inputs, output) -> None:
        for row, name in enumerate(inputs[0].record_ids):
            if name == "1-sample 0":
                output.image_embedding.data[row] = math.nan

    trainer.model.register_forward_hook(spoil)
    with pytest.raises(RunError, match="not finite for samples 1-sample 0;"):
        trainer.train_step([batch])


def goes_on_whichever_operation_fails(rank: int) -> None:
    """In a pass that the other ranks wait in: the window is done again, and no rank hangs."""
    goals = {"distance": PairDistance(), "matched": Matched()}
    mine = window(rank)

    def updated(fail_at: int | None):
        device = VirtualDevice()
        trainer = make_trainer(device, objectives=goals)
        trainer.train_step(mine)
        device.num_operations, device.fail_at = 0, fail_at if rank == 1 else None
        values = trainer.train_step(mine)
        assert values["num_out_of_memory"] == device.num_failures
        every_rank_has_the_same_weights(trainer)
        trainer.train_step(mine)  # and the reduction is ready for the next step
        assert trainer.strategy.reduction_started
        return device, trainer

    updated(None)
    device, trainer = updated(None)
    expected, start = weights(trainer), weights(make_trainer(objectives=goals))
    count = torch.tensor(device.num_operations // 2)
    distributed.broadcast(count, src=1)
    num_failures = 0
    for fail_at in range(int(count) % 71, int(count), 71):
        device, trainer = updated(fail_at)
        num_failures += device.num_failures
        assert relative(weights(trainer) - start, expected - start) < 0.05, fail_at
    assert largest(num_failures) > 5


class Broken:
    """An objective that fails on rank 1."""

    def __init__(self, rank: int):
        self.rank = rank

    def count(self, batch: Batch) -> int:
        return len(batch)

    def __call__(self, output, batch: Batch):
        if self.rank == 1:
            raise KeyError("broken")
        return output.image_embedding.sum()


def all_raise_when_one_gives_up(rank: int) -> None:
    trainer = make_trainer(objectives={"broken": Broken(rank)})
    before = weights(trainer)
    error, message = (KeyError, "broken") if rank == 1 else (RunError, "rank 1 failed to do step 0")
    for _ in range(2):
        with pytest.raises(error, match=message):
            trainer.train_step(window(rank))
    assert (weights(trainer) == before).all()


def memory_is_what_was_priced() -> None:
    """buckets are there all the time, for every weight, and gradients beside them where micro-batches add up."""
    batch = make_batch([(5, 64, 64), (9, 64, 48), (12, 48, 64)])
    for num_micro_batches in (1, 2):
        live, window = LiveBytes(), [batch] * num_micro_batches
        trainer = make_trainer(live, objectives=["contrastive"])
        live.add(*batch.tensors())
        for _ in range(3):
            peak_bytes = trainer.train_step(window)["peak_bytes"]
        priced = price(
            trainer.model,
            batch.shape,
            device="cpu",
            accumulating=num_micro_batches > 1,
            gradient_buckets=True,
        )
        assert math.isclose(priced.peak_bytes, peak_bytes, rel_tol=0.002), (priced.peak_bytes, peak_bytes)


def main() -> None:
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    same_gradient(rank, world_size)
    all_negatives(rank, world_size)
    if world_size == 2:
        memory_is_what_was_priced()
        samples_are_shared(rank)
        running_statistics_of_rank_0_are_evaluated_and_saved(rank)
        a_sample_that_is_not_finite_is_named_on_all_ranks(rank)
        goes_on_whichever_operation_fails(rank)
        all_raise_when_one_gives_up(rank)
