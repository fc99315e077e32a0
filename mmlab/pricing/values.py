"""Values for models that need more than shapes: known values of fake tensors, and stand-ins for unknown ones.

A model may look at its masks: skip a mask that is all True, or gather the patches that are there. So the
values of a batch's masks are known, and those of tensors that the model makes from constants. `Answers` also
computes everything that depends on known values alone, up to 2^26 elements. For any other number that a
module reads, the answer is False for a truth value and 1 otherwise; `reads` counts these reads, so that a
price can state its assumptions. An operation whose result has a shape that depends on unknown values cannot
be priced.

Costs about 20 us an operation on known values, and their bytes.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import OptionError
from mmlab.pricing.torch_internals import (
    MODULE_CALL,
    READ_NUMBER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    WeakTensorKeyDictionary,
    schema_of,
    storage_key,
    tree_map_only,
    without_modes,
)
from mmlab.runs.meters import tensors_in

_MAX_KNOWN = 2**26  # most elements of a tensor whose values are known
_MAX_MADE = 2**16  # most elements of a known tensor that the model makes from constants
_DEVICE = torch.ops.prim.device.default
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_LIFT = torch.ops.aten.lift_fresh.default  # turns a constant in the model's code into a fake tensor


class Answers(TorchDispatchMode):
    """Gives a model the values that it reads. Enter it after, and so inside, a FakeTensorMode.

    Attributes:
        known: real tensors on the CPU, by the fake tensors that stand for them.
        reads: how often an unknown number was read, by module and line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakTensorKeyDictionary()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := device_asked_for(func, args)) is not None:
            return device
        inputs = list(tensors_in([*args, *kwargs.values()]))
        if inputs and func is not _LIFT and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            # real tensors on the host, such as the counts of a batch
            with without_modes():
                return func(*args, **kwargs)
        values = self._values(func, args, kwargs, inputs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            masked = self._without_masks(func, args) if values is None else None
            out = func(*masked, **kwargs) if masked else self._instead(error, values, args)
        except UnsupportedOperatorException as error:
            raise OptionError(
                f"{_place() or 'the step'} calls {func}, for which torch has no rule that gives the shape of its result"
            ) from error
        if values is not None:
            for fake, value in zip(tensors_in([out]), tensors_in([values]), strict=True):
                self.known[fake] = value
        elif schema_of(func).is_mutable:
            self._forget(func, args)
        return out

    def _values(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """The real result if the values of all input tensors are known; else None."""
        if inputs:
            if any(tensor.numel() > _MAX_KNOWN or not self._knows(tensor) for tensor in inputs):
                return None
        elif not _makes_values(func) or any(
            isinstance(size, list | tuple) and torch.Size(size).numel() > _MAX_MADE for size in args
        ):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        with without_modes():
            real = tree_map_only(Tensor, lambda tensor: self.known.get(tensor, tensor).cpu(), (args, kwargs))
            device = {"device": "cpu"} if "device" in kwargs else {}
            return func(*real[0], **{**real[1], **device})

    def _knows(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor in self.known

    def _without_masks(self, func: Any, args: Any) -> tuple[Any, ...] | None:
        """An indexing operation's arguments, with known masks replaced by indices; None for any other."""
        if func.overloadpacket not in _INDEXING or not all(map(self._knows, tensors_in(args[1]))):
            return None
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
                continue
            with without_modes():
                num_places = int(self.known[index].count_nonzero())
            indices += [index.new_empty(num_places, dtype=torch.int64) for _ in range(index.dim())]
        return (args[0], indices, *args[2:])

    def _instead(self, error: Any, values: Any, args: Any) -> Any:
        """The result of an operation that depends on values."""
        if values is not None:
            device = next(tensors_in(args)).device

            def like(value: Tensor) -> Tensor:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

            return tree_map_only(Tensor, like, values)
        if error.func is not READ_NUMBER:
            raise OptionError(
                f"{_place() or 'the step'} calls {error.func}, whose result depends on the values of a tensor; pricing "
                "has shapes only. Replace it by an operation with a fixed shape (torch.where, masked_fill, a sum "
                "weighted by the mask)"
            ) from error
        place, dtype = _place(), args[0].dtype
        if place:  # else the training step itself reads it: a gradient norm, a loss scale
            answer = "truth value as False" if dtype == torch.bool else "number as 1"
            self.reads[f"{place} reads a {answer}"] += 1
        kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        return kind(bool(place) and kind is not bool)

    def _forget(self, func: Any, args: Any) -> None:
        """Forget the values of tensors that an operation with unknown inputs wrote to, and of their views."""
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor) and value in self.known:
                storage = storage_key(value)
                for fake in [fake for fake in self.known if storage_key(fake) == storage]:
                    del self.known[fake]


def device_asked_for(func: Any, args: Any) -> torch.device | None:
    """The tensor's device if `func` is the operation by which torch asks for it; else None."""
    if func is not _DEVICE:
        return None
    (tensor,) = args
    return tensor.fake_device if isinstance(tensor, FakeTensor) else func(tensor)


@cache
def _makes_values(func: Any) -> bool:
    """Whether an operation without input tensors gives the same values each time."""
    schema = schema_of(func)
    return "empty" not in schema.name and any(item.name == "device" for item in schema.arguments)


def _place() -> str:
    """The line and module that is running; empty outside of modules.

    Reads code objects only: reading a frame's locals would keep them alive.
    """
    innermost, module = "", ""
    for frame, line in walk_stack(sys._getframe(2)):
        code = frame.f_code
        if code is MODULE_CALL:
            return innermost + (f" in {module}" if module not in innermost else "")
        if not code.co_filename.startswith(_TORCH) and code.co_name != "__torch_dispatch__":
            innermost = innermost or f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{line})"
            module = code.co_qualname
    return ""


_TORCH = torch.__path__[0]
