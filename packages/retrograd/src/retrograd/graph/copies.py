"""A copy of a graph module that may be changed while the first stays as it is.

In: a graph module. Out: another with the same nodes, names, metadata and constants.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx, nn


def copied(
    gm: fx.GraphModule, module: Callable[[nn.Module, fx.Graph, str], fx.GraphModule] = fx.GraphModule
) -> fx.GraphModule:
    """A copy of `gm`; tensors and submodules that it holds are shared, ``meta`` dictionaries are not.

    Args:
        gm: stays as it is.
        module: makes a module of one that holds the constants, a graph and a name.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        copy.meta = dict(node.meta)
        copy.name = node.name
    result = module(gm, graph, "joint")
    result.meta = dict(gm.meta)
    return result
