"""FX graphs as functions that take their inputs as one list and let each go after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx.nodes import add_copy
from retrograd.graph.emit import boxed_calls


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph`."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = add_copy(copy, node, made.__getitem__)
    return copy


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that runs the graph of `gm`, as it is now."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    *calls, output = [node for node in gm.graph.nodes if node.op != "placeholder"]
    return boxed_calls(inputs, calls, output.args[0], gm)
