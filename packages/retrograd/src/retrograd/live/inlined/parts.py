"""Compiled functions of which only a part is differentiated.

In: a `LiveBackward`. Out: its request also asks for the gradient of an input of such a function; and eager's
error is raised where a part is differentiated a second time that eager's nodes would have released.

The engine does not execute the node whose input is asked for. ``autograd.grad`` for an output that the
compiled function uses itself (Grad-CAM, a loss on hidden states) needs the part of that function's own
backward that leads there, so the engine is asked for something behind the node, too. It keeps the function's
saved tensors for the other parts, and would not notice that one is used twice.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from retrograd._torch.autograd import EngineRequest, edge_of, is_aot_node, run_stock, window
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.live.backward import LiveBackward

#: by the context of a compiled function: which of eager's nodes in it have released what they saved.
_used: weakref.WeakKeyDictionary[Any, frozenset[float]] = weakref.WeakKeyDictionary()


def ask_for_compiled_functions(backward: LiveBackward) -> None:
    """Add inputs to the request of a backward, so that the engine executes the compiled functions."""
    asked = backward.asked
    nodes = {node for node, _ in map(edge_of, asked.inputs) if node is not None and is_aot_node(node)}
    if not nodes or asked.accumulate_grad:
        return
    live = backward.asked_graph
    wanted = live.wanted or frozenset()
    added: list[GradientEdge] = []
    for node in live.nodes:
        edges = [edge for edge in node.edges if edge is not None]
        # Eager would not execute the node if nothing behind it is asked for.
        if node.handle in nodes and edges and not any(edge.node in wanted for edge in edges):
            added.append(GradientEdge(live.nodes[edges[0].node].handle, edges[0].slot))
    if added:
        backward.request = replace(asked, inputs=(*asked.inputs, *added), added=len(added))


def use_up(captured: BackwardGraph, backward: LiveBackward) -> None:
    """Note what a backward with compiled functions is about to use.

    Raises:
        RuntimeError: eager's, if a part has been used already.
    """
    parts, request = captured.intact_calls(), backward.request
    if not (_used or parts or request.added):
        return
    for index, keys in _used_now(captured, backward).items():
        node = backward.node_calls[index]
        before = _used.get(node, frozenset())
        if before & keys:
            _raise_as_eager()
        # The engine itself watches what it releases.
        if not request.keep_graph and (index in parts or request.added):
            _used[node] = before | keys


def _used_now(captured: BackwardGraph, backward: LiveBackward) -> dict[int, frozenset[float]]:
    """By inlined node call, what this backward uses: all of it, or what leads to an output asked for."""
    used = {index: inlined.consumed for index, inlined in captured.inlined.items()}
    if backward.request.added:
        edges = [edge_of(tensor) for tensor in backward.asked.inputs]
        for index in used:
            slots = [slot for node, slot in edges if node is backward.node_calls[index]]
            if slots:
                used[index] = frozenset().union(*map(captured.inlined[index].consumed_for.__getitem__, slots))
    return used


def _raise_as_eager() -> None:
    """What torch raises where a graph is used a second time, in the words of the installed torch."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    with window.stock():
        run_stock(request)
        run_stock(request)
