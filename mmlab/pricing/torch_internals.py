"""What pricing uses of torch that torch does not document. Nothing else in `mmlab.pricing` names a private part of torch.

tests/pricing/test_torch_internals.py has a test of each, so that a new version of torch fails there first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "BackwardCFunction",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "WeakTensorKeyDictionary",
    "tree_map_only",
]

Node = Any  # torch.autograd.graph.Node, or a class of torch's own that looks like it

without_modes = _disable_current_modes  # a context in which no dispatch mode sees an operation
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
math_attention = torch.ops.aten._scaled_dot_product_attention_math
READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # what `Tensor.item` calls
MODULE_CALL = nn.Module._call_impl.__code__  # what runs while a module is called


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors that share memory, as `LiveBytes` uses it."""
    return id(tensor.untyped_storage())


def schema_of(operation: Any) -> Any:
    """Name and arguments of an operation, and which of them it writes to."""
    return operation._schema


def sequence_number(node: Node) -> int:
    """Rises from each node of an autograd graph to the next one made."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """Of the node that will be made next in this thread."""
    return torch._C._autograd._get_sequence_nr()


def output_forms(node: Node) -> tuple[Any, ...]:
    """Shape, dtype and device of each output that a node had in the forward pass."""
    return node._input_metadata


@contextmanager
def backward_replaced(backward: Callable[..., None], task: Callable[[], int]) -> Iterator[None]:
    """Within it `Tensor.backward` calls `backward`.

    Args:
        task: the number of the backward pass that is running, -1 outside. Activation checkpointing asks for it, to
            compute a block once more in each pass.
    """
    with (
        patch.object(torch.autograd, "backward", backward),
        patch.object(torch._C, "_current_graph_task_id", task),
    ):
        yield


@contextmanager
def cuda_attention_replaced(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Within it `scaled_dot_product_attention` of CUDA tensors calls `attend`, whoever imported it by whatever name."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")  # below autocast
        yield
    finally:
        library._destroy()


@contextmanager
def reading_known_values(known: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Within it fake tensors are read as real ones are, where their values are known: by `tolist`, by `torch.tensor` of a
    list that has some, and by transformers, which else keeps every mask, even one that hides nothing.
    """
    make, to_list = torch.tensor, FakeTensor.tolist

    def tensor(data: Any, **options: Any) -> Tensor:
        is_list = isinstance(data, list | tuple)
        return make(tree_map_only(Tensor, lambda value: value.tolist(), data) if is_list else data, **options)

    def is_unknown(value: Any) -> bool:
        return isinstance(value, FakeTensor) and value not in known

    def tolist(fake: Any) -> Any:
        return known[fake].tolist() if fake in known else to_list(fake)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "tensor", tensor))
        stack.enter_context(patch.object(FakeTensor, "tolist", tolist))
        if "transformers" in sys.modules:
            stack.enter_context(patch("transformers.utils.import_utils.is_fake_tensor", is_unknown))
        yield


@contextmanager
def mixed_precision_without_driver() -> Iterator[None]:
    """Within it autocast and loss scaling stay on for CUDA where there is no driver to ask."""
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda **_: True),
    ):
        yield
