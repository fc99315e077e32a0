"""Precision: one unscale, one clip, overflowed steps skipped, refusals with a reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mmlab.errors import OptionError
from mmlab.training.precision import PRECISIONS, Precision

ON_A_CPU = sorted(set(PRECISIONS) - {"tf32"})


def one_step(name: str, *, factor: float = 1.0, max_grad_norm: float = math.inf):
    """One optimizer step of a linear layer; the loss is `factor` x a mean of squares."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    precision = Precision(name, "cpu")
    with precision.autocast():
        loss = layer(x).float().square().mean() * factor
    precision.backward(loss)
    result = precision.clip_and_step(optimizer, {"all": [*layer.parameters()]}, max_grad_norm)
    assert all(weight.grad is None for weight in layer.parameters())
    return result, not torch.equal(layer.weight, before), precision


@pytest.mark.parametrize("name", ON_A_CPU)
def test_the_gradient_norm_is_that_of_the_unscaled_gradient(name):
    expected = one_step("fp32")[0].grad_norm
    result, moved, _ = one_step(name, max_grad_norm=1e-3)
    assert result.grad_norm == pytest.approx(expected, rel=2e-2)
    assert moved
    assert not result.skipped
    assert (result.loss_scale > 1) == (name == "fp16")


@pytest.mark.parametrize("name", ON_A_CPU)
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
    for name in ON_A_CPU:
        precision = Precision(name)
        result = precision.clip_and_step(torch.optim.SGD(layer.parameters()), {"all": [*layer.parameters()]})
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
    with pytest.raises(OptionError, match="tf32 is available on CUDA only, found device cpu; use fp32"):
        Precision("tf32", "cpu")
    with pytest.raises(OptionError, match=r"fp16 keeps its weights in fp32 .* call model.float\(\) first"):
        Precision("fp16").check(nn.Linear(2, 2).half().parameters())


def test_each_part_is_measured_and_clipped_by_itself():
    parts = {"image": [nn.Parameter(torch.zeros(4))], "text": [nn.Parameter(torch.zeros(2))]}
    parts["image"][0].grad, parts["text"][0].grad = torch.full((4,), 3.0), torch.tensor([0.3, 0.4])
    optimizer = torch.optim.SGD([*parts["image"], *parts["text"]], lr=1.0)
    result = Precision("fp32").clip_and_step(optimizer, parts, {"image": 1.5, "text": 1.0})
    assert result.part_norms == pytest.approx({"image": 6.0, "text": 0.5})
    assert result.grad_norm == pytest.approx(36.25**0.5)
    torch.testing.assert_close(parts["image"][0].data, torch.full((4,), -0.75))
    torch.testing.assert_close(parts["text"][0].data, -torch.tensor([0.3, 0.4]))


def test_a_norm_that_overflows_leaves_the_weights_alone():
    precision, weight = Precision("fp16"), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.backward(weight.sum())
    weight.grad.fill_(1e30)  # each entry is finite, their squares are not
    assert precision.clip_and_step(optimizer, {"all": [weight]}, 1.0).skipped
    assert not weight.any()


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(("name", "products"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_within_a_step_cudnn_computes_no_attention_and_then_as_before(name, products, allowed):
    cuda = torch.backends.cuda
    before, attention = cuda.matmul.fp32_precision, cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(allowed)
    try:
        with Precision(name, "cuda").kernels():
            assert (cuda.matmul.fp32_precision, cuda.cudnn_sdp_enabled()) == (products, False)
        assert (cuda.matmul.fp32_precision, cuda.cudnn_sdp_enabled()) == (before, allowed)
    finally:
        cuda.enable_cudnn_sdp(attention)
