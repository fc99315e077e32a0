"""Whether branches at once leave the gradient that one process leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmlab.parallel.bench.arms import seeded_model
from mmlab.parallel.bench.setting import OBJECTIVES, Setting, make_batch
from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.names import parse_objectives


def gradient_differences(setting: Setting) -> dict[str, Any]:
    """Largest difference of any gradient between the plain model and its branches in threads, on the CPU in fp32.

    Both use one intra-op thread a branch: more threads add in another order.
    """
    setting = replace(setting, device_type="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads_per_rank)
    try:
        plain = _gradients(seeded_model(setting), setting)
        branches = BranchParallel(seeded_model(setting), threads_per_branch=setting.threads_per_rank)
        found = _gradients(branches, setting)
    finally:
        torch.set_num_threads(before)
    differences = [float((found[name] - gradient).abs().max()) for name, gradient in plain.items()]
    return {"differences": {"branch threads": max(differences)}, "num_weights": len(plain)}


def _gradients(model: nn.Module, setting: Setting) -> dict[str, torch.Tensor]:
    model.train()
    batch = make_batch(setting)
    torch.manual_seed(setting.seed)
    goals = parse_objectives(model, OBJECTIVES)
    output = model(batch)
    terms = LossTerms({name: goal.count(batch) for name, goal in goals.items()})
    terms.add({name: goal(output, batch) for name, goal in goals.items()}).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
