"""Backward passes in Python: a walk of the autograd graph that does not need the device.

torch's own engine needs a CUDA context as soon as a graph has CUDA tensors, even fake ones. Within
`python_backward()` `Tensor.backward` walks the graph in Python instead, in the order of torch's engine: the
node that was made last runs first, a leaf receives its gradient as soon as it is complete, and the tensors
that a node saved are freed when it has run. On real tensors the gradients are the same, bit for bit; on fake
tensors the bytes that live at each moment are those of torch's engine.

Costs about 30 us a node. Does not run tensor hooks, keep the graph for a second pass, compute second
derivatives, or compute gradients of chosen inputs only.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mmlab.errors import OptionError
from mmlab.pricing.torch_internals import (
    BackwardCFunction,
    Node,
    backward_replaced,
    next_sequence_number,
    output_forms,
    sequence_number,
)


@contextmanager
def python_backward() -> Iterator[None]:
    """Within it `backward()` runs in Python. Run both the forward and the backward pass inside."""
    walk = _Walk()
    with (
        backward_replaced(walk.backward, lambda: walk.task),
        torch.autograd.graph.saved_tensors_hooks(_Saved, walk.unpack),
    ):
        yield


class _Saved:
    """A tensor that a node has saved, until the node has run."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.number = next_sequence_number()  # above the number of the node that saves it
        node = tensor.grad_fn
        # a node that saves its own output would be a reference cycle, never freed if no backward pass runs
        is_output = node is not None and sequence_number(node) == self.number - 1
        self.tensor: Tensor | None = tensor.detach() if is_output else tensor


class _Walk:
    def __init__(self) -> None:
        self.task = -1  # the backward pass that is running; -1 outside
        self._tasks = count()
        # unpacked by nodes that have run, or by a checkpointed block that is recomputed
        self._used: list[_Saved] = []

    def unpack(self, saved: _Saved) -> Tensor:
        assert saved.tensor is not None, "a graph is walked once"
        self._used.append(saved)
        return saved.tensor

    def _free(self, number: int) -> None:
        """Free what nodes made after the node of this number have saved: all of them have run."""
        for saved in self._used:
            if saved.number > number:
                saved.tensor = None
        self._used = [saved for saved in self._used if saved.tensor is not None]

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`torch.autograd.backward` without its options.

        Raises:
            OptionError: `retain_graph`, `create_graph` or `inputs` is given.
        """
        if retain_graph or create_graph or inputs is not None:
            raise OptionError(
                "pricing walks each graph once: backward() with retain_graph, create_graph or inputs cannot be "
                "priced; call it without them"
            )
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(roots)
        outer, self.task = self.task, next(self._tasks)
        try:
            with torch.no_grad():
                self._walk([*map(_root, roots, given)])
        finally:
            self.task = outer

    def _walk(self, roots: list[tuple[Node, int, Tensor]]) -> None:
        """Run every node that has received all its gradients, the newest first."""
        received: dict[Node, dict[int, Tensor]] = {}  # gradients by node, by its output in the forward pass
        while roots:
            _add(received, *roots.pop())
        waiting = _num_users([*received])
        order = count()
        ready = [(-_number(node), next(order), node) for node in received if not waiting.get(node)]
        heapq.heapify(ready)
        while ready:
            priority, _, node = heapq.heappop(ready)
            self._free(-priority)
            edges = node.next_functions
            if _is_leaf(node):
                _accumulate(node, received.pop(node))
                continue
            outputs = _run_node(node, received.pop(node))
            self._free(-priority)
            del node  # nothing may keep a graph that has been walked
            for number, (target, index) in enumerate(edges):
                if target is None:
                    continue
                gradient, outputs[number] = outputs[number], None
                if gradient is not None:
                    _add(received, target, index, _fitted(gradient, target, index))
                gradient = None
                waiting[target] -= 1
                if not waiting[target]:
                    received.setdefault(target, {})
                    heapq.heappush(ready, (-_number(target), next(order), target))
            del edges, outputs


def _root(tensor: Tensor, gradient: Tensor | None) -> tuple[Node, int, Tensor]:
    node = tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node
    return node, tensor.output_nr, torch.ones_like(tensor) if gradient is None else gradient


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _number(node: Node) -> int:
    return sys.maxsize if _is_leaf(node) else sequence_number(node)


def _num_users(roots: list[Node]) -> dict[Node, int]:
    """How many gradients each node behind the roots will receive."""
    num_users: dict[Node, int] = {}
    seen, stack = set(roots), roots
    while stack:
        for target, _ in stack.pop().next_functions:
            if target is not None:
                num_users[target] = num_users.get(target, 0) + 1
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
    return num_users


def _run_node(node: Node, received: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradients of a node's inputs, one for each of its edges."""
    forms = output_forms(node)
    gradients = [received.pop(index, None) for index in range(len(forms))]
    if not isinstance(node, BackwardCFunction):
        outputs = node(*gradients)
        del gradients
        return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    gradients = [
        torch.zeros(form.shape, dtype=form.dtype, device=form.device) if gradient is None else gradient
        for gradient, form in zip(gradients, forms, strict=True)
    ]
    outputs = node.apply(*gradients)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = iter([output for output, needs in zip(outputs, node.needs_input_grad, strict=False) if needs])
    return [None if target is None else next(wanted) for target, _ in node.next_functions]


def _add(received: dict[Node, dict[int, Tensor]], node: Node, index: int, gradient: Tensor) -> None:
    sums = received.setdefault(node, {})
    sums[index] = sums[index] + gradient if index in sums else gradient


def _fitted(gradient: Tensor, target: Node, index: int) -> Tensor:
    """The gradient in the shape and type of the tensor that it belongs to."""
    form = target.variable if _is_leaf(target) else output_forms(target)[index]
    if gradient.shape != form.shape:
        gradient = gradient.sum_to_size(form.shape)
    return gradient.to(form.dtype)


def _accumulate(node: Node, received: dict[int, Tensor]) -> None:
    """Add to a leaf's gradient; the first is not copied if nothing else holds it and its strides match."""
    if not received:
        return
    leaf, gradient = node.variable, received.pop(0)
    if leaf.grad is not None:
        leaf.grad += gradient
    elif gradient.stride() == leaf.stride() and sys.getrefcount(gradient) <= _ALONE:
        leaf.grad = gradient.detach()
    else:
        own = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        leaf.grad = own.copy_(gradient)


def _references_in_accumulate(received: dict[int, object]) -> int:
    """The reference count that `_accumulate` sees for an object that nothing else holds."""
    gradient = received.pop(0)
    return sys.getrefcount(gradient)


_ALONE = _references_in_accumulate({0: object()})
