"""Backward passes in Python: a walk of the autograd graph that asks nothing of the device.

torch's own engine needs a CUDA context as soon as a graph has CUDA tensors, fake ones too. `python_engine()` lets
`Tensor.backward` walk the graph in Python instead, in the order of torch's engine: the node made last runs first,
gradients of leaves as soon as they are known, and what a node has saved is let go when it has run. So on real tensors
the gradients are the same, bit for bit, and on fake ones the bytes that live at each moment are those of torch's
engine.

Costs about 30 us a node. Does not: run tensor hooks, keep the graph for a second pass, differentiate the gradient, nor
give gradients of chosen inputs only.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from mmlab.errors import OptionError

Node = Any  # torch.autograd.graph.Node, or a class of torch's own that looks like it


@contextmanager
def python_engine() -> Iterator[None]:
    """Within it `backward()` runs in Python. Forward pass and backward pass both belong inside."""
    engine = _Engine()
    with (
        patch.object(torch.autograd, "backward", engine.backward),
        # activation checkpointing asks which backward pass it is in, to recompute once in each
        patch.object(torch._C, "_current_graph_task_id", lambda: engine.task),
        torch.autograd.graph.saved_tensors_hooks(_Saved, engine.unpack),
    ):
        yield


class _Saved:
    """A tensor that a node has saved, until it is let go."""

    __slots__ = ("__weakref__", "number", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.number = torch._C._autograd._get_sequence_nr()  # of the next node to be made


class _Engine:
    def __init__(self) -> None:
        self.task = -1  # the backward pass that is running; -1 outside
        self._tasks = count()
        self._used: list[_Saved] = []  # by the node that is running
        self._inputs: list[_Saved] = []  # of checkpointed regions that are being walked

    def unpack(self, saved: _Saved) -> Tensor:
        assert saved.tensor is not None, "a graph is walked once"
        direct = (
            sys._getframe(1).f_code is _run_node.__code__
        )  # else for a checkpointed region, to be recomputed
        (self._used if direct else self._inputs).append(saved)
        return saved.tensor

    def _release_used(self) -> None:
        """Let go of what the node that has just run had saved."""
        for saved in self._used:
            saved.tensor = None
        self._used.clear()

    def _release_inputs(self, number: int) -> None:
        """Let go of the inputs of regions all of whose nodes have run, as the next to run is this one."""
        for saved in self._inputs:
            if saved.number > number:
                saved.tensor = None
        self._inputs = [saved for saved in self._inputs if saved.tensor is not None]

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`torch.autograd.backward`, less its options.

        Raises:
            OptionError: a graph that is to be kept, a second derivative, or chosen inputs.
        """
        if retain_graph or create_graph or inputs is not None:
            raise OptionError(
                "pricing walks each graph once: backward() with retain_graph, create_graph or inputs cannot be "
                "priced; call it without them"
            )
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = (
            [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or [None] * len(roots))
        )
        outer, self.task = self.task, next(self._tasks)
        try:
            with torch.no_grad():
                gradients = [
                    torch.ones_like(root) if gradient is None else gradient
                    for root, gradient in zip(roots, given, strict=True)
                ]
                del given
                self._walk(roots, gradients)
        finally:
            self.task = outer

    def _walk(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        received: dict[Node, dict[int, Tensor | None]] = {}  # by node, by its output in the forward pass
        gradient: Tensor | None
        for root, gradient in zip(roots, gradients, strict=True):
            _add(received.setdefault(_node(root), {}), root.output_nr, gradient)
        gradients.clear()
        gradient = None
        waiting = _num_users(list(received))
        order = count()
        ready = [(-_priority(node), next(order), node) for node in received if not waiting.get(node)]
        heapq.heapify(ready)
        while ready:
            priority, _, node = heapq.heappop(ready)
            self._release_inputs(-priority)
            edges = node.next_functions
            outputs = (
                _accumulate(node, received.pop(node))
                if _is_leaf(node)
                else _run_node(node, received.pop(node))
            )
            self._release_used()
            del node  # nothing may keep a graph that has been walked
            for number, (target, index) in enumerate(edges):
                if target is None:
                    continue
                gradient, outputs[number] = outputs[number], None
                _add(received.setdefault(target, {}), index, _fitted(gradient, target, index))
                gradient = None
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, (-_priority(target), next(order), target))
            del edges, outputs


def _node(tensor: Tensor) -> Node:
    return tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _priority(node: Node) -> int:
    return sys.maxsize if _is_leaf(node) else node._sequence_nr()


def _num_users(roots: list[Node]) -> dict[Node, int]:
    """How many gradients each node behind the roots will be given."""
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


def _run_node(node: Node, received: dict[int, Tensor | None]) -> list[Tensor | None]:
    """The gradients of a node's inputs, one for each of its edges."""
    expected = node._input_metadata
    gradients = [received.pop(index, None) for index in range(len(expected))]
    if not isinstance(node, BackwardCFunction):
        outputs = node(*gradients)
        del gradients
        return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    gradients = [
        torch.zeros(form.shape, dtype=form.dtype, device=form.device) if gradient is None else gradient
        for gradient, form in zip(gradients, expected, strict=True)
    ]
    outputs = node.apply(*gradients)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = iter([output for output, needs in zip(outputs, node.needs_input_grad, strict=False) if needs])
    return [None if target is None else next(wanted) for target, _ in node.next_functions]


def _add(sums: dict[int, Tensor | None], index: int, gradient: Tensor | None) -> None:
    held = sums.get(index)
    sums[index] = gradient if held is None else held if gradient is None else held + gradient


def _fitted(gradient: Tensor | None, target: Node, index: int) -> Tensor | None:
    """In the shape and type of what it is the gradient of."""
    if gradient is None:
        return None
    form = target.variable if _is_leaf(target) else target._input_metadata[index]
    if gradient.shape != form.shape:
        gradient = gradient.sum_to_size(form.shape)
    return gradient.to(form.dtype)


def _accumulate(node: Node, received: dict[int, Tensor | None]) -> list[Tensor | None]:
    """Add to a leaf's gradient; the first one becomes it, where nobody else has it and its layout is the leaf's."""
    leaf, gradient = node.variable, received.pop(0)
    if gradient is None:
        return []
    if leaf.grad is not None:
        leaf.grad += gradient
    elif gradient.stride() == leaf.stride() and sys.getrefcount(gradient) <= _ALONE:
        leaf.grad = gradient.detach()
    else:
        leaf.grad = torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
        ).copy_(gradient)
    return []


def _references_in_accumulate(received: dict[int, object]) -> int:
    """What `_accumulate` counts for an object that nobody else holds."""
    gradient = received.pop(0)
    return sys.getrefcount(gradient)


_ALONE = _references_in_accumulate({0: object()})
