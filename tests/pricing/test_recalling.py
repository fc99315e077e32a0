"""What is recalled is what torch's own fake mode gives, in every byte and every operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmlab.pricing.recalling import RecallingFakeMode
from mmlab.pricing.trace import StepTracer
from mmlab.types import BatchShape
from tests.pricing.priced_models import clip, resnet, tiny

SHAPES = (BatchShape(3, 9, 64, 64), BatchShape(2, 7, 64, 64), BatchShape(3, 9, 64, 64))


@pytest.mark.parametrize(("make", "device"), [(tiny, "cuda"), (clip, "cpu"), (resnet, "cuda")])
def test_traces_are_those_of_torch(
    make: Callable[[], nn.Module], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = StepTracer(make(), precision="bf16", checkpointing=make is not resnet, device=device)
    recalled = [tracer(shape) for shape in SHAPES]
    monkeypatch.setattr(
        "mmlab.pricing.fake.RecallingFakeMode", partial(FakeTensorMode, allow_fallback_kernels=False)
    )
    tracer = StepTracer(make(), precision="bf16", checkpointing=make is not resnet, device=device)
    for trace, expected in zip(recalled, map(tracer, SHAPES), strict=True):
        assert trace.operations == expected.operations
        np.testing.assert_array_equal(trace.live_bytes, expected.live_bytes)
        np.testing.assert_array_equal(trace.gradient_bytes, expected.gradient_bytes)
        assert trace.step_peak_bytes == expected.step_peak_bytes


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x + 1.5,
        lambda x: x.add_(1),
        lambda x: [x.mul_(x), x.mul_(torch.ones_like(x))],
        lambda x: x.t()[1:],
        lambda x: x.reshape(-1),
        lambda x: x.t().reshape(-1),
        lambda x: x.split(2, 1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.cat([x.t(), x.t()]),
        lambda x: x.max(dim=1),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to(torch.complex64).conj().imag,
        lambda x: torch.ones(2),
        lambda x: torch.tensor(2.0) * x,
        lambda x: x.unsqueeze_(0),
        lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
    ],
)
def test_an_operation_gives_the_same_when_it_is_recalled(operation: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode():
        expected = _forms(operation, torch.ones(4, 4))
    with RecallingFakeMode():
        assert [_forms(operation, torch.ones(4, 4)) for _ in range(3)] == 3 * [expected]


def _forms(operation: Callable[[Tensor], Any], x: Tensor) -> list[object]:
    out = operation(x)
    return [
        (
            each.shape,
            each.stride(),
            each.storage_offset(),
            each.dtype,
            each.device,
            each.is_conj(),
            each.is_neg(),
            each.untyped_storage().nbytes(),
            each.untyped_storage()._cdata == x.untyped_storage()._cdata,
            each is x,
        )
        for each in ([out] if isinstance(out, Tensor) else out)
    ]
