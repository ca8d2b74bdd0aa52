"""Cut a part out of a graph.

In: a graph, values that are given and values that are wanted. Out: a graph module of its own, with the calls
between them in their old order. In the graph of a region, what is computed again stands just before its first
use, so that it is in memory only as long as it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import has_effect, lazy_graph_module
from retrograd.aot.trace.aliases import is_backward

_NOTHING: Mapping[fx.Node, fx.Node] = MappingProxyType({})


def needed_between(
    given: Iterable[fx.Node], wanted: Sequence[Any], instead: Mapping[fx.Node, fx.Node] = _NOTHING
) -> set[fx.Node]:
    """All nodes on which `wanted` depends, not going beyond `given`, without those themselves.

    `instead` maps nodes to others that are read in their place.
    """
    border, found = set(given), set[fx.Node]()
    stack = [node for node in wanted if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node in border:
            continue
        node = instead.get(node, node)
        if node not in found and node not in border:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def extract(
    gm: fx.GraphModule,
    given: Sequence[fx.Node],
    wanted: Sequence[Any],
    name: str,
    instead: Mapping[fx.Node, fx.Node] = _NOTHING,
    also: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """The part of `gm` that computes `wanted` (nodes or constants) of `given`, which become its placeholders;
    and calls that are to be made `also`, for what they do.

    Raises:
        KeyError: `wanted` depends on a placeholder that is not given.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def copied(node: fx.Node) -> fx.Node:
        return made[node] if node in made else made[instead[node]]

    for node in given:
        placeholder = graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
        made[node] = placeholder
    inside = needed_between(given, [*wanted, *also], instead)
    for node in gm.graph.nodes:
        if node in inside:
            if node.op == "placeholder":
                raise KeyError(node.name)
            made[node] = graph.node_copy(node, copied)
    graph.output(tuple(copied(node) if isinstance(node, fx.Node) else node for node in wanted))
    return lazy_graph_module(gm, graph, name)


def finished_backward(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of a region, once it is cut out: what is computed again stands late; views may be copies,
    since a backend may give what is saved another layout than tracing did."""
    _compute_again_late(gm.graph)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm


def _compute_again_late(graph: fx.Graph) -> None:
    """Change the order of `graph` in place."""
    waiting = {
        node: i
        for i, node in enumerate(graph.nodes)
        if node.op == "call_function" and not is_backward(node) and not has_effect(node)
    }
    if not waiting:
        return
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr") or node in waiting:
            continue
        for needed in sorted(_needed_by(node, waiting), key=waiting.__getitem__):
            node.prepend(needed)
            del waiting[needed]


def _needed_by(node: fx.Node, waiting: dict[fx.Node, int]) -> set[fx.Node]:
    """What of `waiting` has to stand before the node; results of one call stay together."""
    found, stack = set[fx.Node](), list(node.all_input_nodes)
    while stack:
        value = stack.pop()
        if value in waiting and value not in found:
            found.add(value)
            stack.extend(value.all_input_nodes)
            stack.extend(user for user in value.users if user.target is operator.getitem)
    return found
