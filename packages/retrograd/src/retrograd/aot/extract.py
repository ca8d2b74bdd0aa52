"""Cut a part out of a graph.

In: a graph, values that are given and values that are wanted. Out: a graph module of its own, with the calls
between them in their old order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from retrograd._torch.fx import lazy_graph_module

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
