"""Precision: one unscale, one clip, overflowed steps skipped, refusals with a reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.precision import PRECISIONS, Precision


def one_step(name: str, *, factor: float = 1.0, max_grad_norm: float = math.inf):
    """One optimizer step of a linear layer; the loss is `factor` x a mean of squares."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    precision = Precision.parse(name, "cpu")
    with precision.autocast():
        loss = layer(x).float().square().mean() * factor
    precision.backward(loss)
    result = precision.step(optimizer, layer.parameters(), max_grad_norm)
    assert all(weight.grad is None for weight in layer.parameters())
    return result, not torch.equal(layer.weight, before), precision


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_gradient_norm_is_that_of_the_unscaled_gradient(name):
    expected = one_step("fp32")[0].grad_norm
    result, moved, _ = one_step(name, max_grad_norm=1e-3)
    assert result.grad_norm == pytest.approx(expected, rel=2e-2)
    assert moved
    assert not result.skipped
    assert (result.loss_scale > 1) == (name == "fp16")


@pytest.mark.parametrize("name", PRECISIONS)
def test_an_overflowed_gradient_leaves_the_weights_alone(name):
    result, moved, precision = one_step(name, factor=1e38 if name == "fp16" else math.inf)
    assert result.skipped
    assert not moved
    assert not math.isfinite(result.grad_norm)
    assert precision.scales == (name == "fp16")
    if precision.scales:
        assert precision.scaler.get_scale() == result.loss_scale / 2


def test_a_step_without_any_gradient_is_skipped():
    layer = nn.Linear(2, 2)
    for name in PRECISIONS:
        precision = Precision(name)
        result = precision.step(torch.optim.SGD(layer.parameters()), layer.parameters())
        assert result.skipped


def test_the_scale_survives_in_the_state():
    _, _, precision = one_step("fp16", factor=1e38)
    other = Precision("fp16")
    other.load_state_dict(precision.state_dict())
    assert other.scaler.get_scale() == precision.scaler.get_scale() == 2.0**15


def test_what_is_refused_says_why():
    with pytest.raises(OptionError, match="unknown precision 'fp61'; did you mean 'fp16'"):
        Precision("fp61")
    with pytest.raises(OptionError, match="bf16 is supported on cpu and cuda, found device mps; use fp32"):
        Precision("bf16", "mps")
    with pytest.raises(OptionError, match=r"fp16 keeps its weights in fp32 .* call model.float\(\) first"):
        Precision("fp16").check(nn.Linear(2, 2).half().parameters())
