"""Plans of branches: simulated steps against steps worked out by hand, and what is measured."""

from __future__ import annotations

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.parallel.branches.measure import BranchCost, BranchCosts, measure_branches
from mmlab.parallel.branches.plan import plan_branches
from mmlab.types import BatchShape
from tests.batches import make_batch
from tests.parallel.test_branches import SIZES, build
from tests.training.test_out_of_memory import Classifier, flat

NO_WAIT = {"bandwidth_gib_s": 1e12, "latency_s": 0.0}


def cost(forward_s, backward_s, *, layers=(1.0,)):
    return BranchCost(
        forward_s=forward_s,
        backward_s=backward_s,
        layers=layers,
        layer_bytes=2**29,
        output_bytes=2**30,
        weight_bytes=2**31,
    )


def costs(image, text):
    return BranchCosts(
        image=image,
        text=text,
        fusion_forward_s=1.0,
        fusion_backward_s=1.0,
        measured_on="cpu",
        shape=BatchShape(8, 16, 64, 64),
    )


HEAVY_IMAGE = costs(cost(3.0, 3.0), cost(1.0, 1.0))
CUDA = ["cuda:0", "cuda:1"]


def option(plan, kind, beginning=""):
    return next(found for found in plan.options if found.kind == kind and found.what.startswith(beginning))


def test_one_micro_batch_is_the_heavier_branch_and_the_fusion():
    plan = plan_branches(None, CUDA, costs=HEAVY_IMAGE, **NO_WAIT)
    assert option(plan, "one device").step_s == 10.0
    found = option(plan, "one process", "cuda:0: image; cuda:1: text + fusion")
    assert (found.step_s, found.speed_up) == (pytest.approx(8.0), pytest.approx(1.25))
    assert found.idle_shares == {"cuda:0": pytest.approx(0.25), "cuda:1": pytest.approx(0.5)}
    assert plan.placement.image == "cuda:0"
    assert plan.placement.text == "cuda:1"
    BranchParallel(build(), plan_branches(None, ["cpu", "cpu"], costs=HEAVY_IMAGE).placement)


def test_an_image_rank_that_is_ahead_never_waits_for_the_fusion():
    plan = plan_branches(None, CUDA, costs=HEAVY_IMAGE, num_micro_batches=2, **NO_WAIT)
    found = option(plan, "two ranks")
    assert found.step_s == pytest.approx(12.0)  # image 0, image 1, back 0, back 1 without a gap
    assert found.idle_shares == {"cuda:0": pytest.approx(0.0), "cuda:1": pytest.approx(1 / 3)}
    behind = plan_branches(None, CUDA, costs=HEAVY_IMAGE, num_micro_batches=2, ahead=0, **NO_WAIT)
    assert option(behind, "two ranks").step_s == pytest.approx(16.0)
    assert option(plan, "one process", "cuda:0: image; cuda:1: text + fusion").step_s == pytest.approx(16.0)
    assert plan.best.kind == "two ranks"


def test_transfers_count_where_devices_differ():
    plan = plan_branches(None, CUDA, costs=HEAVY_IMAGE, bandwidth_gib_s=2.0, latency_s=0.25)
    found = option(plan, "one process", "cuda:0: image; cuda:1: text + fusion")
    assert found.step_s == pytest.approx(8.0 + 2 * 0.75)
    assert found.transfer_bytes == 2 * 2**30
    threads = plan_branches(None, ["cpu", "cpu"], costs=HEAVY_IMAGE, bandwidth_gib_s=2.0, latency_s=0.25)
    assert option(threads, "one process").transfer_bytes == 0  # one memory
    assert option(threads, "two ranks").transfer_bytes == 2 * 2**30


def test_devices_are_dealt_out_in_proportion_and_gradients_of_replicas_are_summed():
    devices = [f"cuda:{number}" for number in range(4)]
    plan = plan_branches(build(), devices, costs=HEAVY_IMAGE, num_micro_batches=4, **NO_WAIT)
    replicas = [found for found in plan.options if found.kind == "replicas"]
    assert len(replicas) == 3
    assert all(found.placement is None for found in replicas)
    assert [
        found.runs_with for found in replicas if found.what.startswith("cuda:0+cuda:1+cuda:2: image")
    ] == ['parallel="branch"']
    assert sum(found.runs_with is None for found in replicas) == 2  # several devices for the texts
    normalised = plan_branches(build(image="resnet18"), devices[:3], costs=HEAVY_IMAGE, **NO_WAIT)
    assert option(normalised, "replicas", "cuda:0+cuda:1: image").runs_with is None
    whole = plan_branches(None, devices[:3], costs=HEAVY_IMAGE, bandwidth_gib_s=1.0, latency_s=0.0)
    free = plan_branches(None, devices[:3], costs=HEAVY_IMAGE, bandwidth_gib_s=1e12, latency_s=0.0)
    two = "cuda:0+cuda:1: image"
    assert option(free, "replicas", two).step_s == pytest.approx(1.5 + 2.0 + 1.5)
    summed_s = 2 * (1 / 2) * 2.0  # a ring over two: half of 2 GiB twice
    assert option(whole, "replicas", two).step_s == pytest.approx(5.0 + 2 * 1.0 + summed_s)


def test_layers_move_to_where_they_balance_the_devices():
    heavy = costs(cost(8.0, 8.0, layers=(0.25,) * 4), cost(1.0, 1.0))
    plan = plan_branches(None, CUDA, costs=heavy, num_micro_batches=8, ahead=3, **NO_WAIT)
    found = option(plan, "layers moved")
    assert "first 3 of 4 image layers" in found.what  # 12 against 4 + 4: nearer than 8 against 12
    assert option(plan, "one device").step_s / 2 <= found.step_s < option(plan, "two ranks").step_s
    assert found.runs_with is None  # of no model
    deep = plan_branches(build(image_depth=4), CUDA, costs=heavy, num_micro_batches=8, ahead=3, **NO_WAIT)
    assert option(deep, "layers moved").runs_with == 'parallel="branch", image_layers=3'
    assert option(deep, "layers moved").image_layers == 3
    whole = plan_branches(build(image="resnet18"), CUDA, costs=heavy, num_micro_batches=8, **NO_WAIT)
    assert option(whole, "layers moved").runs_with is None
    light = costs(cost(1.0, 1.0), cost(8.0, 8.0, layers=(0.5, 0.5)))
    assert "cuda:0: image + text" in option(plan_branches(None, CUDA, costs=light), "layers moved").what


def test_the_table_says_what_runs_and_what_is_only_planned():
    text = str(plan_branches(None, [*CUDA, "cuda:2"], costs=HEAVY_IMAGE, num_micro_batches=2))
    assert "The image branch takes 3.0 times the text branch" in text
    assert "BranchParallel" in text
    assert 'parallel="branch"' in text
    assert "only planned" in text
    assert "8 GiB/s" in text


def test_measuring_leaves_the_model_as_it_was():
    model = build(image="resnet18", dropout=0.1).eval()
    for weight in model.match_head.parameters():
        weight.grad = torch.ones_like(weight)
    before, state = flat([*model.parameters(), *model.buffers()]), torch.get_rng_state()
    found = measure_branches(model, make_batch(SIZES), repeats=1)
    assert (flat([*model.parameters(), *model.buffers()]) == before).all()
    assert (torch.get_rng_state() == state).all()
    assert not any(module.training for module in model.modules())
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == [
        "match_head.weight",
        "match_head.bias",
    ]
    assert len(found.image.layers) == 4
    assert sum(found.image.layers) == pytest.approx(1.0)
    for branch in (found.image, found.text):
        assert branch.forward_s > 0
        assert branch.backward_s > 0
        assert branch.output_bytes > 0
    assert found.image.weight_bytes > found.text.weight_bytes


def test_a_shape_is_filled_and_embeddings_alone_are_sent_for_a_contrastive_loss():
    shape = BatchShape(4, 8, 32, 32)
    with_features = measure_branches(build(), shape, repeats=1)
    alone = measure_branches(build(), shape, repeats=1, objectives=["contrastive"])
    assert alone.image.output_bytes == 4 * 16 * 4
    assert with_features.image.output_bytes == 4 * 16 * 4 + 4 * 4 * 32 * 4
    assert alone.shape == shape


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(OptionError, match="at least two devices"):
        plan_branches(build(), ["cpu"], batch=BatchShape(2, 4, 16, 16))
    with pytest.raises(OptionError, match="a batch or its shape"):
        plan_branches(build(), ["cpu", "cpu"])
    with pytest.raises(OptionError, match="num_micro_batches must be at least 1"):
        plan_branches(build(), ["cpu", "cpu"], costs=HEAVY_IMAGE, num_micro_batches=0)
    with pytest.raises(OptionError, match="Classifier has no branches to measure"):
        measure_branches(Classifier(), BatchShape(2, 4, 16, 16))
    with pytest.raises(OptionError, match="repeats must be at least 1"):
        measure_branches(build(), BatchShape(2, 4, 16, 16), repeats=0)
    with pytest.raises(OptionError, match="holds nothing to learn from"):
        measure_branches(build(), make_batch([(3, 0, 0)]))
