"""On real tensors the walk in Python gives the gradients of torch's engine, bit for bit, and lets go of as much."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmlab.errors import OptionError
from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.huggingface import LossModel
from mmlab.pricing.backward import python_backward
from mmlab.runs.meters import LiveBytes
from mmlab.training.losses.names import parse_objectives
from tests.batches import make_batch
from tests.pricing.priced_models import MODELS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Convolutions add up in another order when their threads are shared out differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _gradients(model: nn.Module, batch: Any, *, walk: bool, dtype: torch.dtype | None) -> tuple[dict, int]:
    """Gradients by name, and the peak of live bytes."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(0)
    with python_backward() if walk else nullcontext(), LiveBytes().add(model) as live:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = model(batch)
            goals = parse_objectives(model, ("contrastive", "matching"))
            loss = torch.stack([goal(output, batch) for goal in goals.values()]).sum()
        del output
        loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}, live.peak_bytes


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [(None, False), (None, True), (torch.bfloat16, True)],
    ids=["fp32", "again", "bf16"],
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torchs_engine(
    name: str, dtype: torch.dtype | None, checkpointing: bool
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model = model if name in ("tiny", "resnet18") else LossModel(model)
    if checkpointing:
        enable_checkpointing(model)
    batch = make_batch([(5, 64, 64), (9, 64, 48), (12, 48, 64)])
    expected, expected_peak = _gradients(model, batch, walk=False, dtype=dtype)
    found, found_peak = _gradients(model, batch, walk=True, dtype=dtype)
    for weight, gradient in expected.items():
        assert (gradient is None) == (found[weight] is None), weight
        assert gradient is None or torch.equal(gradient, found[weight]), weight
    assert found_peak == pytest.approx(expected_peak, rel=0.001)


class _Scale(torch.autograd.Function):
    """Takes things that are no tensors, saves one that is, and gives no gradient for one input."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor, other.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return None, 2 * ctx.factor * x * gradients[0], gradients[1]


def _shared(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).sum() + (x * y).sum()  # one gradient for two leaves, then a second one


def _broadcast(x: Tensor, y: Tensor) -> Tensor:
    return (x[:1] * y + x[0, 0]).square().mean()


def _own_function(x: Tensor, y: Tensor) -> Tensor:
    scaled, unused = _Scale.apply(3.0, x, y)
    return scaled.sum() + _Scale.apply(2.0, x, unused)[0].sum()


def _pieces(x: Tensor, y: Tensor) -> Tensor:
    first, second = torch.cat([x, y]).t().chunk(2)
    return (first.exp() * second).sum() + x.double().sum().float()


def _leaf(x: Tensor, y: Tensor) -> Tensor:
    return x[0, 0] * 1


@pytest.mark.parametrize("formula", [_shared, _broadcast, _own_function, _pieces, _leaf])
def test_shapes_of_graphs(formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    expected, found = (
        [torch.arange(8.0).view(2, 4).add(shift).requires_grad_() for shift in (0, 1)] for _ in range(2)
    )
    formula(*expected).backward()
    with python_backward():
        formula(*found).backward()
    for leaf, other in zip(expected, found, strict=True):
        assert (leaf.grad is None) == (other.grad is None)
        assert leaf.grad is None or torch.equal(leaf.grad, other.grad)
    if formula is _shared:
        assert found[0].grad.data_ptr() != found[1].grad.data_ptr()


def test_a_second_pass_is_refused() -> None:
    with python_backward(), pytest.raises(OptionError, match="pricing walks each graph once"):
        torch.ones(1, requires_grad=True).sum().backward(retain_graph=True)
