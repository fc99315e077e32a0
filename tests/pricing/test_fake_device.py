"""A device that is not there behaves as the device, allocates nothing, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmlab.errors import OptionError
from mmlab.machine import process_rss_bytes
from mmlab.pricing.breakdown import price
from mmlab.pricing.fake import FakeDevice
from mmlab.pricing.torch_internals import FakeTensorMode
from mmlab.pricing.trace import StepTracer
from mmlab.runs.meters import LiveBytes
from mmlab.types import BatchShape
from tests.pricing.priced_models import clip, resnet, tiny

GIB = 2**30


def test_a_step_on_tensors_larger_than_this_machine() -> None:
    before_bytes = process_rss_bytes()
    with FakeDevice("cuda"), LiveBytes() as live:
        model = nn.Linear(2**16, 2**16, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(torch.empty(2**20, 2**16, device="cuda"))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        torch.optim.AdamW(model.parameters(), fused=True).step()
        assert model.weight.grad is not None
        assert model.weight.grad.device == torch.device("cuda", 0)
    assert live.peak_bytes > 300 * GIB
    assert process_rss_bytes() - before_bytes < GIB


@pytest.mark.parametrize("make", [tiny, clip, resnet])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_step_is_traced_as_in_fake_mode_of_torch(
    make: Callable[[], nn.Module], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, precision = BatchShape(3, 9, 64, 64), "bf16" if device == "cuda" else "fp32"
    torch.manual_seed(0)
    quick = StepTracer(make(), device=device, precision=precision)
    traces = [quick(shape), quick(shape)]
    monkeypatch.setattr("mmlab.pricing.torch_internals.QuickFakeMode", FakeTensorMode)
    expected = StepTracer(make(), device=device, precision=precision)(shape)
    for trace in traces:
        assert np.array_equal(trace.live_bytes, expected.live_bytes)
        assert trace.operations == expected.operations
        assert trace.work == expected.work


def test_nothing_is_left_behind() -> None:
    backward, autocast = torch.autograd.backward, torch.cuda.amp.common.amp_definitely_not_available
    with FakeDevice("cuda"):
        gru = nn.GRU(4, 4, device="cuda")  # asks the driver, unless told otherwise
        gru(torch.ones(3, 2, 4, device="cuda"))[0].sum().backward()
        assert gru.weight_hh_l0.grad is not None
    assert torch.backends.cudnn.enabled
    assert torch.autograd.backward is backward
    assert torch.cuda.amp.common.amp_definitely_not_available is autocast
    x = torch.ones(2, requires_grad=True)
    F.scaled_dot_product_attention(*[x.view(1, 1, 1, 2)] * 3).sum().backward()
    assert type(x.grad) is Tensor


def test_a_clone_keeps_ties_and_the_original_its_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("mean", torch.ones(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clone = FakeDevice("cuda").clone(model)
    assert clone[0].weight is clone[1].weight
    assert clone[0].weight is not model[0].weight
    assert {tensor.device.type for tensor in clone.state_dict().values()} == {"cuda"}
    for name, tensor in model.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])


def test_a_model_on_the_meta_device_costs_the_same() -> None:
    with torch.device("meta"):
        meta = tiny()
    assert price(meta, (4, 16, 64, 64)).peak_bytes == price(tiny(), (4, 16, 64, 64)).peak_bytes


@pytest.mark.parametrize(
    ("dtype", "masked", "dim", "square"),
    [
        (torch.bfloat16, False, 64, False),
        (torch.bfloat16, False, 60, False),
        (torch.bfloat16, True, 64, False),
        (torch.float32, True, 64, False),
        (torch.float32, False, 64, False),
        (torch.float32, True, 62, True),  # rows that no fused kernel takes
    ],
)
def test_fused_attention_keeps_no_square(dtype: torch.dtype, masked: bool, dim: int, square: bool) -> None:
    with FakeDevice("cuda"), LiveBytes() as live:
        query = torch.empty(2, 4, 1000, dim, device="cuda", dtype=dtype, requires_grad=True)
        mask = torch.ones(2, 1, 1, 1000, dtype=torch.bool, device="cuda") if masked else None
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()
        assert query.grad is not None
    assert (live.peak_bytes > 2 * 4 * 1000 * 1000 * dtype.itemsize) == square


class _Reads(nn.Module):
    """Looks at what it computes."""

    def __init__(self, *, picks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.picks = picks

    def forward(self, pixel_values: Tensor) -> object:
        scores = self.linear(pixel_values.flatten(2).mean(2))
        if self.picks:
            scores = scores[scores > 0]
        if (scores > 2).all() and scores.sum().item() > 3:
            raise AssertionError("no such batch")
        return type("Output", (), {"loss": scores.mean()})


def test_numbers_that_a_model_reads_are_listed() -> None:
    found = price(_Reads(picks=False), (4, 8, 32, 32), device="cpu").assumptions
    assert len(found) == 1
    assert found[0].startswith("_Reads.forward (test_fake_device.py:")
    assert found[0].endswith("reads a truth value as False, 1 times")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_cannot_be_priced_is_named(device: str) -> None:
    with pytest.raises(
        OptionError, match=r"_Reads\.forward \(test_fake_device\.py:\d+\) calls aten\.nonzero"
    ):
        price(_Reads(picks=True), (4, 8, 32, 32), device=device)


def test_a_graph_that_no_backward_pass_reaches_is_freed() -> None:
    device = FakeDevice("cuda")
    with device, LiveBytes() as live:
        weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
        live.add(weight)
        for _ in range(2):  # each keeps its own output for the backward pass
            heads = (weight @ weight).sigmoid().softmax(-1).view(1, 2, 4, 8)
            F.scaled_dot_product_attention(heads, heads, heads)
            del heads
    assert live.current_bytes == weight.nbytes


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_values_of_a_batch_are_read_as_real_ones(device: str) -> None:
    real = torch.tensor([[3, 0, 5], [7, 0, 0]])
    fake = FakeDevice(device)
    with fake:
        ids = fake.know(torch.empty(2, 3, dtype=torch.int64, device=fake.device), real)
        unknown = torch.empty(2, 3, 4, device=fake.device)
        assert ids.tolist() == [[3, 0, 5], [7, 0, 0]]
        lengths = torch.tensor([row.count_nonzero() for row in ids], device=fake.device)
        assert lengths.tolist() == [2, 1]
        assert unknown[ids > 0].shape == (3, 4)
        unknown[ids == 0, :] = 1.0
        assert [part.shape[0] for part in unknown.flatten(0, 1)[:3].split(lengths.tolist())] == [2, 1]
        assert int(real.sum()) == 15  # the host's own tensors stay real
    assert not fake.reads


def test_masks_are_known_and_what_follows_from_them() -> None:
    device, value = FakeDevice("cuda"), torch.tensor([[True, False, True], [True, True, True]])
    with device:
        mask = device.know(torch.empty(2, 3, dtype=torch.bool, device="cuda"), value)
        assert not mask.all()
        assert mask.long().sum().item() == 5
        assert mask.nonzero().shape == (5, 2)
        counts = torch.zeros(3, dtype=torch.long, device="cuda")
        view = counts[:2]
        counts.add_(mask.sum(0))
        assert view[1].item() == 1
        counts.add_(torch.randint(0, 9, (3,), device="cuda"))  # nobody knows what was drawn
        with pytest.raises(OptionError, match=r"the step calls aten\.nonzero"):
            view.nonzero()
    assert not device.reads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device to price 'tpu'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'"),
        ({"objectives": ["contrast"]}, "unknown objective 'contrast'"),
    ],
)
def test_options_that_do_not_exist(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        price(tiny(), (4, 16, 64, 64), **options)
