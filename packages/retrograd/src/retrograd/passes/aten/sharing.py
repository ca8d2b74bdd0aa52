"""Find the values whose memory is visible outside the graph.

In: a graph of ATen operators. Out: the nodes whose value may share memory with an output, or with a tensor
that the graph writes to. Each of them must stay a tensor of its own.
"""

from __future__ import annotations

from torch import fx

from retrograd._torch.fx import aliased_inputs, is_mutating


def nodes_seen_outside(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that share memory with an output or with a tensor that is written to; outputs included."""
    base: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while base[node] is not node:
            base[node] = base[base[node]]
            node = base[node]
        return node

    for node in graph.nodes:
        base[node] = node
        for value in aliased_inputs(node):
            base[root(value)] = root(node)
    seen = {root(value) for value in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if is_mutating(node):
            seen |= {root(value) for value in node.all_input_nodes}
    return frozenset(node for node in base if root(node) in seen)
