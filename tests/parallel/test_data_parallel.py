"""Several ranks share a step, in real processes; and options that cannot work are refused."""

from __future__ import annotations

import numpy as np
import pytest

from mmlab.errors import OptionError
from mmlab.model.presets import build_model
from mmlab.parallel.fsdp import check_images
from mmlab.parallel.reduce import ParallelOptions
from mmlab.parallel.strategies import make_strategy
from mmlab.training.loop import FusionTrainer
from mmlab.types import SampleSizes
from tests.parallel import ranks_compiled, ranks_data_parallel, ranks_sharded
from tests.ranks import run_ranks
from tests.training.test_out_of_memory import make_trainer, weights, window


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gradient_summed_in_the_backward_pass_is_that_of_one_process(num_ranks):
    run_ranks(ranks_data_parallel.main, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_steps_with_weights_shared_out_are_those_of_one_process(num_ranks):
    run_ranks(ranks_sharded.main, num_ranks)


def test_compiled_code_has_the_gradient_of_one_process_too():
    run_ranks(ranks_compiled.main, 2)


def test_ranks_that_have_not_joined_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"the 2 ranks have not joined.*init_process_group"):
        make_strategy("ddp")
    with pytest.raises(OptionError, match="2 ranks were started without a strategy, and each would train"):
        FusionTrainer(build_model("tiny", vocab_size=50), device="cpu")


def test_fsdp_refuses_conversations_of_which_only_some_have_an_image():
    def sizes(heights: list[int]) -> SampleSizes:
        return SampleSizes(num_tokens=np.ones(2), height=heights, width=heights, group=np.arange(2))

    with_images, without, mixed = (sizes(heights) for heights in ([16, 32], [0, 0], [0, 16]))
    check_images(with_images, with_images)
    check_images(without, without)
    for parts, count in (((mixed, with_images), 1), ((without, with_images), 2)):
        with pytest.raises(OptionError, match=f"fsdp: {count} of 4 conversations have no image"):
            check_images(*parts)


def test_in_a_single_process_the_strategy_changes_nothing():
    trainers = [make_trainer(parallel=name) for name in ("ddp", "reduce", "fsdp")]
    for trainer in trainers:
        trainer.train_step(window())
    first, *others = map(weights, trainers)
    assert all((other == first).all() for other in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "dp"}, "unknown parallel strategy 'dp'"),
        ({"ahead": -1}, "ahead must be at least 0, found -1"),
        (
            {"strategy": "fsdp", "image_layers": 2},
            "cuts the image branch, which strategy='fsdp' leaves whole",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        ParallelOptions(**options)
