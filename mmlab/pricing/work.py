"""The work of an operation on a device: floating-point operations, bytes read and written, scratch memory.

FLOPs are those of torch's own counter (`torch.utils.flop_counter`): matrix products, convolutions and
attention, forward and backward; everything else is assumed to be limited by memory bandwidth. Bytes are those
of the input and output tensors, each counted once: repeated reads and cache hits are not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from mmlab.pricing.torch_internals import schema_of, storage_key
from mmlab.runs.meters import tensors_in

_ATEN = torch.ops.aten
_LOOKUPS = {_ATEN.embedding, _ATEN.index, _ATEN.gather, _ATEN.index_select}
# on CUDA these begin with a copy of every input that is not contiguous
_COPYING = {_ATEN.native_layer_norm, _ATEN.native_layer_norm_backward, _ATEN.embedding_dense_backward}
_ATTENTION_BLOCK = 64  # rows and columns that the memory-efficient kernel works on at once
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Work(NamedTuple):
    """The work of one operation."""

    flops: int
    num_bytes: int
    precision: str  # of its arithmetic: "fp32", "bf16", "fp16"


NOTHING = Work(0, 0, "fp32")  # an operation that starts no kernel: a view, or memory without values


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of an operation, from its inputs and outputs; tensors may be fake."""
    schema = schema_of(func)
    inputs, outputs = [*tensors_in([*args, *kwargs.values()])], [*tensors_in([out])]
    if schema.is_mutable:
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        named |= kwargs
        outputs = [*tensors_in([named.get(item.name) for item in schema.arguments if item.is_write])]
    storages = {storage_key(tensor) for tensor in inputs}
    is_view = not schema.is_mutable and all(storage_key(tensor) in storages for tensor in outputs)
    if is_view or "empty" in schema.name:
        return NOTHING
    count = flop_registry.get(func.overloadpacket)
    flops = int(count(*args, **kwargs, out_val=out)) if count else 0
    if func.overloadpacket in _LOOKUPS:  # reads only the rows that it returns
        inputs = outputs
    precisions = (_PRECISIONS[tensor.dtype] for tensor in (*inputs, *outputs) if tensor.dtype in _PRECISIONS)
    # of an expanded tensor, only the elements stored in memory
    num_bytes = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*inputs, *outputs))
    return Work(flops, num_bytes, next(precisions, "fp32"))


def scratch_bytes(func: Any, args: Any, out: Any) -> int:
    """Bytes that a CUDA kernel asks torch for besides its results, and gives back when it is done.

    Measured operation by operation on an H200 (docs/internals/gpu.md). Known are the product in a softmax's
    backward pass, the query's gradient in fp32 in that of memory-efficient attention, and copies of inputs;
    all grow with the batch. Not known are cuDNN's convolutions, and sums over many rows, which take up to
    1 MiB for each multiprocessor of the GPU.
    """
    kernel = func.overloadpacket
    if kernel is _ATEN._softmax_backward_data:
        return out.nbytes
    if kernel is _ATEN._scaled_dot_product_efficient_attention_backward:
        size, heads, length, width = args[1].shape
        columns = _ATTENTION_BLOCK * -(-width // _ATTENTION_BLOCK) + 1  # and one sum for each row
        return 4 * size * heads * (length + _ATTENTION_BLOCK - 1) * columns
    if kernel in _COPYING:
        return sum(tensor.nbytes for tensor in tensors_in(args) if not tensor.is_contiguous())
    return 0
