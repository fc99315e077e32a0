"""The private parts of torch that pricing uses. No other module of `mmlab.pricing` names one.

tests/pricing/test_torch_internals.py tests each of them, so that an incompatible version of torch fails there
first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.autograd.function import BackwardCFunction as BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

from mmlab.runs.meters import tensors_in

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


class QuickFakeMode(FakeTensorMode):
    """A FakeTensorMode in which a training step takes about half the time, with the same resulting tensors.

    torch's mode checks every operation for symbolic sizes, constants and much else, and keys its cache of
    results by some twenty properties of each tensor. Here the key is shapes, strides and types: after the
    first call with a key, the operation's results are copied from the cache; the first call runs its kernel
    for meta tensors. Anything less simple (several devices, constants, no tensors at all, a result that
    depends on values) is left to torch's mode.
    """

    _known: ClassVar[dict[Any, Any]] = {}  # the results of operations, without data, by their inputs

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kind, tensors = _kind(func), tensors_in((*args, *kwargs.values()))
        devices = {getattr(tensor, "fake_device", None) if _is_plain(tensor) else None for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else None
        if not (kind and device and kwargs.get("device") in (None, device)):
            return self._dispatch_impl(func, types, args, kwargs)
        key = (device, func, _form(args), _form((*kwargs.items(),))) if kind.gives_memory else None
        if key in self._known:
            return _each(lambda known: FakeTensor(self, _like(known), device), self._known[key])
        if kind.has_rules:
            out = self._dispatch_impl(func, types, args, kwargs)
        else:
            with in_kernel_invocation_manager(self):
                out = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            out = _each(lambda one: FakeTensor(self, one, device) if type(one) is Tensor else one, out)
        results = out if isinstance(out, list | tuple) else (out,)
        if key and all(_is_whole(result, device) for result in results):
            self._known[key] = _each(_like, out)
        return out


class _Kind(NamedTuple):
    """What `QuickFakeMode` needs to know about an operation."""

    gives_memory: bool  # its results share no memory with its inputs
    has_rules: bool  # torch's mode has rules for it besides its kernel


@cache
def _kind(operation: Any) -> _Kind | None:
    """None if the results depend on more than the inputs' forms, or if the cache would gain nothing."""
    if getattr(operation, "namespace", "") != "aten" or _BY_VALUE.intersection(operation.tags):
        return None
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(operation.name(), "Meta")
    aliases = any(argument.alias_info for argument in schema_of(operation).arguments)
    gives_memory = not aliases and operation is not _UNSAFE_VIEW
    ruled = any(applies(operation) for applies, _ in op_implementations_checks)
    has_rules = ruled and operation not in _VIEWS
    return _Kind(gives_memory, has_rules) if has_kernel and (gives_memory or not has_rules) else None


_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view, although its schema does not say so
# views whose rules concern symbolic sizes only
_VIEWS = (torch.ops.aten.view.default, _UNSAFE_VIEW, torch.ops.aten.slice.Tensor)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout == torch.strided


def _form(value: Any) -> Any:
    """The part of an argument that can determine the results' shapes, strides and types."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, list | tuple) else (type(value), value)


def _is_whole(result: Any, device: torch.device) -> bool:
    """Whether a result is on this device and fills its storage."""
    if not _is_plain(result) or result.fake_device != device:
        return False
    return result.untyped_storage().nbytes() == _like(result).untyped_storage().nbytes()


def _like(tensor: Tensor) -> Tensor:
    """A new tensor of the same shape, strides and type, without data."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _each(change: Callable[[Any], Any], out: Any) -> Any:
    """Apply `change` to an operation's result, or to each of several results."""
    if not isinstance(out, list | tuple):
        return change(out)
    return [*map(change, out)] if isinstance(out, list) else tuple(map(change, out))


def schema_of(operation: Any) -> Any:
    """Name and arguments of an operation, and which of them it writes to."""
    return operation._schema


def sequence_number(node: Node) -> int:
    """A number that rises with each autograd node made."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The sequence number of the next node made in this thread."""
    return torch._C._autograd._get_sequence_nr()


def output_forms(node: Node) -> tuple[Any, ...]:
    """Shape, dtype and device of each output that a node had in the forward pass."""
    return node._input_metadata


@contextmanager
def backward_replaced(backward: Callable[..., None], task: Callable[[], int]) -> Iterator[None]:
    """Within it `Tensor.backward` calls `backward`.

    Args:
        task: returns the number of the running backward pass, -1 outside one. Activation checkpointing asks
            for it to recompute a block once in each pass.
    """
    with (
        patch.object(torch.autograd, "backward", backward),
        patch.object(torch._C, "_current_graph_task_id", task),
    ):
        yield


@contextmanager
def cuda_attention_replaced(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Within it `scaled_dot_product_attention` of CUDA tensors calls `attend`, however it was imported."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")  # below autocast
        yield


@contextmanager
def reading_known_values(known: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Within it fake tensors whose values are known can be read like real ones.

    `tolist` reads them, `torch.tensor` of a list that contains them, and transformers, which otherwise keeps
    every mask, even one that hides nothing.
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
