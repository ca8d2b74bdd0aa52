"""Converts gradients for leaves whose ``grad_dtype`` was changed after their backward was captured.

In: a `BackwardGraph` in eager's order, and at run time the leaves. Out: the dtypes that the leaves ask for,
and a graph that converts each gradient where eager does: before hooks see it, and before it is added to
others. We never capture a structure that has such leaves already, because the engine's cache does not
distinguish them from other leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.graph.backward_graph import BackwardGraph, Call, CallKind, HookKind, call_of, source_of
from retrograd.graph.fx import add_call, add_copy
from retrograd.runtime.modes import without_torch_functions

#: for each gradient: whether it is an output of ``autograd.grad`` (else it goes to a leaf), its index among
#: the outputs or inputs, and its dtype
Dtypes = tuple[tuple[bool, int, torch.dtype], ...]


def leaves_with_buffers(backward: BackwardGraph) -> tuple[int, ...]:
    """Indices of the leaves whose gradient passes a sum or a hook before it is accumulated. For other leaves,
    the accumulation itself converts the gradient."""
    return tuple(
        source_of(variable).index
        for variable, grad in _accumulated(backward)
        if list(_parts(grad)) != [grad] or len(grad.users) > 1
    )


@without_torch_functions
def asked_dtypes(leaves: Sequence[int], inputs: Sequence[Any], wanted: Sequence[Any]) -> Dtypes:
    """Which of these leaves, and of the `wanted` inputs of ``autograd.grad``, now ask for a dtype other than
    their own."""
    if not inputs:
        return ()
    asked = [(False, i, inputs[i].grad_dtype) for i in leaves if inputs[i].grad_dtype is not inputs[i].dtype]
    for i, leaf in enumerate(wanted):
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad_dtype is not leaf.dtype:
            asked.append((True, i, leaf.grad_dtype))
    return tuple((is_output, i, dtype) for is_output, i, dtype in asked if dtype is not None)


def in_dtypes(backward: BackwardGraph, dtypes: Dtypes) -> BackwardGraph:
    """`backward` with its gradients converted to these dtypes."""
    if not dtypes:
        return backward
    leaves = {i: dtype for is_output, i, dtype in dtypes if not is_output}
    converted: dict[fx.Node, torch.dtype] = {}
    outputs = backward.outputs()
    arriving: list[tuple[fx.Node | None, torch.dtype | None]]
    arriving = [(grad, leaves.get(source_of(variable).index)) for variable, grad in _accumulated(backward)]
    arriving += [(outputs[i], dtype) for is_output, i, dtype in dtypes if is_output]
    for grad, dtype in arriving:
        if grad is not None and dtype is not None:
            converted |= dict.fromkeys(_parts(grad), dtype)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node, _ in backward.placeholders():
        new[node] = add_copy(graph, node, new.__getitem__)
    for node in [node for node in new if node in converted]:
        new[node] = _conversion(graph, Call(CallKind.VALIDATE, 0), new[node], converted[node])
    for node, call in backward.calls():
        new[node] = add_copy(graph, node, new.__getitem__)
        if node in converted:
            new[node] = _conversion(graph, replace(call, kind=CallKind.VALIDATE), new[node], converted[node])
    graph.output(tuple(None if node is None else new[node] for node in outputs))
    return backward.with_graph(graph)


def _accumulated(backward: BackwardGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each leaf, with the gradient that is accumulated into it."""
    for node, call in backward.calls():
        variable, grad = node.args[:2] if call.kind is CallKind.ACCUMULATE else (None, None)
        if isinstance(variable, fx.Node) and isinstance(grad, fx.Node):
            yield variable, grad


def _parts(grad: fx.Node) -> Iterator[fx.Node]:
    """The gradients that arrive at a leaf, before the sums and hooks that produce `grad`."""
    call = call_of(grad) if grad.op == "call_function" else None
    parts: list[Any] = []
    if call is not None and call.kind is CallKind.SUM:
        parts = grad.all_input_nodes
    elif call is not None and call.hook is HookKind.TENSOR_PRE:
        parts = [grad.args[1]]
    elif call is not None and call.kind is CallKind.PROJECT:
        source: Any = grad.args[0]
        parts = [source.args[1][grad.args[1]]] if call_of(source).hook is HookKind.NODE_PRE else []
    if not parts:
        yield grad
    for part in parts:
        yield from _parts(part)


def _conversion(graph: fx.Graph, call: Call, grad: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = add_call(graph, convert, (grad, dtype))
    node.meta["call"] = replace(call, hook=None, note="", slot=None)
    return node


@without_torch_functions
def convert(grad: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert the gradient to the dtype that its leaf asks for."""
    return None if grad is None else grad.to(dtype)
