"""Each undocumented part of torch that pricing uses does what pricing takes for granted."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mmlab.pricing import torch_internals as internals


def test_tensors_share_a_key_where_they_share_memory() -> None:
    with internals.FakeTensorMode():
        x = torch.ones(4, 4)
        assert internals.storage_key(x) == internals.storage_key(x.t()[1:])
        assert internals.storage_key(x) != internals.storage_key(x.clone())


def test_a_quick_fake_mode_gives_what_that_of_torch_gives() -> None:
    def found(mode: internals.FakeTensorMode, dtype: torch.dtype) -> list[object]:
        with mode:
            x, table = (
                torch.empty(3, 8, 8, device="cuda", dtype=dtype),
                torch.empty(9, 8, device="cuda", dtype=dtype),
            )
            ids, scalar = torch.zeros(3, 5, dtype=torch.int64, device="cuda"), torch.tensor(2.0)
            norm = (torch.empty(8, device="cuda", dtype=dtype), torch.empty(8, device="cuda", dtype=dtype))
            results = [
                *(
                    x + x,
                    x * 2,
                    x.transpose(1, 2) @ x,
                    x[:, 1:],
                    x.float(),
                    x.to(dtype),
                    x.flatten(1),
                    x * scalar,
                ),
                *(
                    x.permute(2, 0, 1),
                    x.relu_(),
                    x.softmax(-1),
                    x.sum(),
                    x.mean((1, 2)),
                ),
                *(
                    F.embedding(ids, table),
                    torch.zeros_like(x),
                    x.new_zeros(4),
                    torch.cat([x, x]),
                    x > 0,
                    x.clone(),
                ),
                *torch.ops.aten.native_layer_norm(x, [8], *norm, 1e-5),
                *F.max_pool2d(x[None], 2, return_indices=True),
                *(
                    F.conv2d(x[None], torch.empty(4, 3, 3, 3, device="cuda", dtype=dtype)),
                    x.view(3, 64),
                    *x.unbind(),
                ),
                *internals.efficient_attention(x[None], x[None], x[None], None, True)[:2],
            ]
            key = internals.storage_key(x)
            return [
                (item.shape, item.stride(), item.dtype, item.device, internals.storage_key(item) == key, item.untyped_storage().nbytes())
                for item in results
            ]  # fmt: skip

    usual, quick = internals.FakeTensorMode(), internals.QuickFakeMode()
    for dtype in (torch.float32, torch.bfloat16):
        expected = found(usual, dtype)
        assert found(quick, dtype) == expected
        assert found(quick, dtype) == expected  # what is remembered
        assert found(internals.QuickFakeMode(), dtype) == expected


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(3, requires_grad=True)
    number = internals.next_sequence_number()
    first = x * 2
    second = first + 1
    assert internals.sequence_number(first.grad_fn) == number
    assert internals.sequence_number(second.grad_fn) == number + 1
    assert internals.next_sequence_number() == number + 2


def test_a_node_knows_the_forms_of_its_outputs() -> None:
    halves = torch.ones(2, 5, requires_grad=True).half().chunk(2, dim=1)
    found = [
        (torch.Size(form.shape), form.dtype, form.device)
        for form in internals.output_forms(halves[0].grad_fn)
    ]
    assert found == [(half.shape, torch.float16, half.device) for half in halves]


def test_a_replaced_backward_is_called_and_checkpointing_asks_for_its_task() -> None:
    seen, asked = [], []

    def task() -> int:
        asked.append(True)
        return 7

    usual = torch.autograd.backward
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(torch.exp, x, use_reentrant=False)
    with internals.backward_replaced(lambda tensors, *rest, **options: seen.append(tensors), task):
        y.sum().backward()
        assert torch.equal(y.grad_fn(torch.ones(2)), y)
    assert len(seen) == 1
    assert asked
    assert torch.autograd.backward is usual


def test_attention_of_cuda_tensors_is_replaced_and_put_back() -> None:
    called = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
        called.append(query.device.type)
        return query + value

    with internals.cuda_attention_replaced(attend), internals.FakeTensorMode():
        query = torch.empty(1, 1, 8, 8, device="cuda")
        assert F.scaled_dot_product_attention(query, query, query).device.type == "cuda"
    assert called == ["cuda"]
    x = torch.rand(1, 1, 8, 8)
    assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
    assert called == ["cuda"]


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "math_attention"])
def test_attention_kernels_give_their_shapes_without_a_device(kernel: str) -> None:
    bias = {"efficient_attention": (None, False), "math_attention": (None,)}.get(kernel, ())
    with internals.FakeTensorMode(allow_fallback_kernels=False):
        x = torch.empty(2, 4, 24, 16, dtype=torch.float16, device="cuda")
        assert getattr(internals, kernel)(x, x, x, *bias, 0.0, False)[0].shape == x.shape


def test_transformers_reads_fake_tensors_whose_values_are_known() -> None:
    from transformers.utils.import_utils import is_tracing

    with internals.FakeTensorMode():
        mask, other = torch.ones(2, 2), torch.ones(2, 2)
        known = internals.WeakTensorKeyDictionary()
        with internals.without_modes():
            known[mask] = torch.ones(2, 2)
        with internals.reading_known_values(known):
            assert not is_tracing(mask)
            assert is_tracing(other)
            assert mask.tolist() == [[1, 1], [1, 1]]
        assert is_tracing(mask)


def test_mixed_precision_stays_on_without_a_driver() -> None:
    with internals.mixed_precision_without_driver(), internals.FakeTensorMode():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = torch.empty(4, 4, device="cuda")
            assert (x @ x).dtype == torch.bfloat16
        assert torch.amp.GradScaler("cuda").is_enabled()


def test_operations_without_modes_are_real() -> None:
    with internals.FakeTensorMode(), internals.without_modes():
        assert type(torch.ones(2)) is Tensor


def test_values_that_fake_tensors_lack_are_asked_for_by_name() -> None:
    with internals.FakeTensorMode(allow_fallback_kernels=False):
        x = torch.empty(3)
        with pytest.raises(internals.DataDependentOutputException) as read:
            x.sum().item()
        assert read.value.func is internals.READ_NUMBER
        with pytest.raises(internals.DynamicOutputShapeException):
            x.nonzero()
    known = internals.WeakTensorKeyDictionary()
    known[x] = 1
    assert known[x] == 1
    del x
    assert not known
    assert internals.tree_map_only(int, lambda number: number + 1, [1, ("a", 2)]) == [2, ("a", 3)]


def test_a_custom_function_s_node_is_told_apart() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    assert isinstance(Double.apply(x).grad_fn, internals.BackwardCFunction)
    assert not isinstance((2 * x).grad_fn, internals.BackwardCFunction)


def test_a_schema_tells_what_an_operation_writes_to() -> None:
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert [item.name for item in schema.arguments if item.is_write] == ["self"]
    assert internals.schema_of(torch.ops.aten.ones.default).name == "aten::ones"


def test_a_module_s_call_is_seen_on_the_stack() -> None:
    class Looks(nn.Module):
        def forward(self) -> bool:
            return sys._getframe(1).f_code is internals.MODULE_CALL

    assert Looks()()


def test_no_other_file_of_pricing_names_a_private_part_of_torch() -> None:
    folder = Path(internals.__file__).parent
    private = re.compile(r"from torch\S*\._|\b(torch|nn|func|node|storage\(\))(\.\w+)*\._[a-z]")
    found = {path.name for path in folder.glob("*.py") if private.search(path.read_text())}
    assert found == {"torch_internals.py"}
