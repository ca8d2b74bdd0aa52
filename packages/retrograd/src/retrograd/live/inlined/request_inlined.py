"""Have the engine execute compiled functions that are only asked for the gradient of an output.

In: an `EngineRequest`. Out: the same, or one that also asks for the gradient of an input of such a function.
``autograd.grad`` for an output that the compiled function uses itself needs the part of its own backward that
leads there (Grad-CAM, a loss on hidden states). The engine does not execute the node of an input, so it is
asked for something behind that node, too.
"""

from __future__ import annotations

from dataclasses import replace

from torch.autograd.graph import GradientEdge

from retrograd._torch.autograd import EngineRequest, edge_of, is_aot_node, read_live_graph
from retrograd.graph.eager_order import LiveGraph, LiveNode


def with_compiled_functions(request: EngineRequest) -> EngineRequest:
    """`request`, with inputs added where they are needed."""
    asked = {node for node, _ in map(edge_of, request.inputs) if node is not None and is_aot_node(node)}
    if not asked or request.accumulate_grad:
        return request
    live = read_live_graph(request)
    ends = [node for i, node in enumerate(live.nodes) if node.handle in asked and _is_end(live, i)]
    added = tuple(edge for edge in (_edge_behind(live, node) for node in ends) if edge is not None)
    return replace(request, inputs=request.inputs + added, added=len(added)) if added else request


def _is_end(live: LiveGraph, index: int) -> bool:
    """Whether eager would not execute the node: nothing behind it is asked for."""
    wanted = live.wanted or frozenset()
    return not any(edge is not None and edge.node in wanted for edge in live.nodes[index].edges)


def _edge_behind(live: LiveGraph, node: LiveNode) -> GradientEdge | None:
    """One of the edges that leave `node`."""
    for edge in node.edges:
        if edge is not None:
            return GradientEdge(live.nodes[edge.node].handle, edge.slot)
    return None
