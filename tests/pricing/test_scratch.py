"""Scratch memory of CUDA kernels: the rules against what torch's allocator was asked for on an H200."""

import pytest
import torch

from mmlab.pricing.trace import StepTracer
from mmlab.pricing.work import scratch_bytes
from mmlab.types import BatchShape
from tests.pricing.priced_models import Vilt

ATEN = torch.ops.aten


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "measured_bytes"),
    [
        ((99, 12, 504, 64), 158_260_608),
        ((123, 12, 213, 64), 98_083_152),
        ((99, 4, 504, 32), 52_753_536),
        ((123, 4, 90, 32), 16_314_720),
        ((99, 6, 73, 64), 19_656_648),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_keeps_the_gradient_of_its_queries_in_fp32(
    shape: tuple[int, ...], measured_bytes: int, dtype: torch.dtype
) -> None:
    kernel = ATEN._scaled_dot_product_efficient_attention_backward.default
    predicted_bytes = scratch_bytes(kernel, [on_meta(*shape, dtype=dtype)] * 4, None)
    rows_more = 63 / shape[2]  # whole blocks of 64 rows are predicted as 63 rows more than there are
    assert measured_bytes <= predicted_bytes <= (1 + rows_more) * measured_bytes


def test_a_softmax_multiplies_before_it_sums() -> None:
    product = on_meta(99, 4, 578, 578)
    assert scratch_bytes(ATEN._softmax_backward_data.default, [product] * 2, product) == 529_189_056


def test_only_inputs_that_are_not_contiguous_are_copied() -> None:
    kernel, weight = ATEN.native_layer_norm.default, on_meta(768)
    for tokens, copied_bytes in ((on_meta(99, 504, 768), 0), (on_meta(99, 768, 504).mT, 153_280_512)):
        assert scratch_bytes(kernel, [tokens, [768], weight, weight, 1e-5], None) == copied_bytes


def test_a_trace_counts_it_on_cuda_alone() -> None:
    """A ViLT computes its attention from single operations, so its backward pass has a softmax's product."""
    model, shape = Vilt(), BatchShape(4, 40, 64, 64)
    softmax = str(ATEN._softmax_backward_data.default)
    most = {}
    for device in ("cuda", "cpu"):
        trace = StepTracer(model, device=device)(shape)
        places = [place for place, name in enumerate(trace.operations) if name == softmax]
        most[device] = max(trace.live_bytes[place] - trace.live_bytes[place - 1] for place in places)
    assert most["cuda"] > 1.9 * most["cpu"] > 0
