"""torch's fake mode with a quicker memory: an operation seen before with such shapes gives what it gave then.

Layers repeat, so of ten operations in a step nine have been seen. torch remembers them too, but asks some thirty
questions about each tensor, as its sizes may be symbols; here they are numbers, and seven questions do. What those do
not settle is left to torch: operations that are not its own, sparse and constant tensors, results that share memory.

Costs about 30 us an operation that is recalled, some hundred more for a new one. Keeps shapes, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mmlab.runs.meters import tensors_in

Maker = Callable[[Any], Any]  # from an operation's arguments to its result

_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_layout = Tensor.layout.__get__  # type: ignore[attr-defined]  # FakeTensor's own asks more


class RecallingFakeMode(FakeTensorMode):
    """See the module."""

    def __init__(self) -> None:
        super().__init__(allow_fallback_kernels=False)
        self._makers: dict[Any, Maker | None] = {}  # None where torch has to be asked each time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            forms = (*map(self._form, args), *kwargs, *map(self._form, kwargs.values()))
        except _UnclearError:
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = (func, torch.get_default_dtype(), *forms)
        maker = self._makers.get(key)
        if maker is not None:
            return maker(args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in self._makers:
            self._makers[key] = self._maker(func, args, kwargs, out)
        return out

    def _form(self, value: Any) -> Any:
        """All of an argument that the shape of a result can depend on."""
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not self or value.constant is not None or _layout(value) != torch.strided:
                raise _UnclearError
            return (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
                value.requires_grad,
                torch._C._dispatch_keys(value).raw_repr(),  # conjugate, quantized, ...
            )
        if kind is list or kind is tuple:
            return kind, *map(self._form, value)
        if kind in _CONSTANTS:
            return kind, value  # 1, 1.0 and True are equal
        raise _UnclearError

    def _maker(self, func: Any, args: Any, kwargs: Any, out: Any) -> Maker | None:
        """What makes such a result again; None where that is not certain."""
        if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
            return None
        # by storage, the place of the first argument that has it: x.add_(x) gives the first; None: within a list
        owners: dict[int, int | None] = dict.fromkeys(map(_storage, tensors_in([*args, *kwargs.values()])))
        places = reversed([*enumerate(args)])
        owners |= {_storage(arg): place for place, arg in places if isinstance(arg, FakeTensor)}
        kind = type(out)
        try:
            if kind not in (list, tuple):
                return self._maker_of_one(args, out, owners)
            makers = [self._maker_of_one(args, each, owners) for each in out]
        except _UnclearError:
            return None
        return lambda args: kind([make(args) for make in makers])

    def _maker_of_one(self, args: Any, out: Any, owners: dict[int, int | None]) -> Maker:
        if out is None:
            return _nothing
        if type(out) is not FakeTensor:
            raise _UnclearError
        form, storage = self._form(out), _storage(out)
        place = owners.get(storage)
        if place is None and storage in owners:
            raise _UnclearError
        owners[storage] = place
        if place is not None and out is args[place]:
            return lambda args: args[place]
        maker = _tensor_maker(form, dict(vars(out)), place)
        again = maker(args)
        if self._form(again) != form or again.untyped_storage().nbytes() != out.untyped_storage().nbytes():
            raise _UnclearError
        return maker


class _UnclearError(Exception):
    """Something that is left to torch."""


def _tensor_maker(form: Any, attributes: dict[str, Any], place: int | None) -> Maker:
    """What makes a fake tensor of this form, on the storage of the argument at `place` or on a new one.

    Attributes are given all at once: FakeTensor's constructor takes eight times as long.
    """
    shape, stride, offset, dtype, device, *_ = form

    def make(args: Any) -> FakeTensor:
        if place is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(args[place].untyped_storage(), offset, shape, stride)
        fake = Tensor._make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake

    return make


def _nothing(args: Any) -> None:
    return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
