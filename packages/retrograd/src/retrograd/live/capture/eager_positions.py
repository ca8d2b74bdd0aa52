"""Says where in a backward eager runs each node call.

In: a captured backward, and the live graph that it runs on. Out: positions in eager's order.
"""

from __future__ import annotations

from retrograd.engine import LiveBackward, steps_in_turns
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.eager_order import ROOT, eager_walk, with_steps


def positions_in_eager(graph: BackwardGraph, backward: LiveBackward) -> dict[tuple[int, int], int]:
    """For each node call and each of its steps, its position in eager's order.

    Raises:
        LookupError: the live graph is not the one that the engine walked.
    """
    live, walk = backward.graph, backward.walk
    for call, i in zip(graph.node_calls, walk, strict=False):
        if i != ROOT and call.name and call.name != live.nodes[i].name:
            raise LookupError(f"node call {call.index} is {call.name}, expected {live.nodes[i].name}")
    if len(walk) < len(graph.node_calls):
        raise LookupError(f"{len(graph.node_calls)} node calls, expected {len(walk)}")
    stepwise, chains = with_steps(live, _steps(graph, backward))
    place = {node: position for position, node in enumerate(eager_walk(stepwise))}
    return {
        (index, step): place[link]
        for index, node in enumerate(walk)
        for step, link in enumerate(chains.get(node, [node]))
    }


def _steps(graph: BackwardGraph, backward: LiveBackward) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The steps of live nodes that each replace many of eager's, by index in the live graph."""
    inlined = {backward.walk[index]: inlined.steps for index, inlined in graph.inlined.items()}
    return {i: steps_in_turns(node.handle) for i, node in enumerate(backward.graph.nodes)} | inlined
