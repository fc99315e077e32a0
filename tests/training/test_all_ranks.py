"""Negatives from all ranks: the gradient of one process with the joined batch; a rank's failure ends on all."""

from __future__ import annotations

import pytest
import torch

from mmlab.errors import OptionError
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.contrastive import Contrastive
from mmlab.training.losses.names import parse_objectives
from tests.batches import make_batch
from tests.ranks import run_ranks
from tests.training import two_ranks_all_negatives
from tests.training.test_out_of_memory import Classifier, gradient, make_trainer


def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    run_ranks(two_ranks_all_negatives.main, 2)


def test_in_one_process_the_option_is_the_plain_loss():
    batches = [make_batch([(4, 32, 48), (9, 16, 16), (3, 48, 32)])]
    expected, _ = gradient(make_trainer(objectives=["contrastive"]), batches)
    trainer = make_trainer(objectives=["contrastive_all_ranks"])
    assert trainer.objectives == {"contrastive": Contrastive(all_ranks=True)}
    found, values = gradient(trainer, batches)
    assert (found == expected).all()
    assert "contrastive_loss" in values


@pytest.mark.parametrize("objectives", [["contrastive_all_ranks"], {"mine": Contrastive(all_ranks=True)}])
def test_a_model_with_its_own_loss_is_refused(objectives):
    with pytest.raises(OptionError, match=r"Classifier computes its own loss.*leave all_ranks out"):
        FusionTrainer(Classifier(), device="cpu", objectives=objectives)


def test_both_kinds_of_contrastive_are_refused():
    with pytest.raises(OptionError, match="are one objective"):
        parse_objectives(torch.nn.Identity(), ["contrastive", "contrastive_all_ranks"])
