"""Drop what a backward computes only for its last outputs.

In: a `BackwardGraph`, and how many of its last outputs nobody wants. Out: the same, where those outputs are
None. Hooks on their gradients are not called, and functional calls that only they read are removed.
"""

from __future__ import annotations

from torch import fx

from retrograd.graph.backward_graph import BackwardGraph, CallKind, call_of


def without_last_outputs(backward: BackwardGraph, count: int) -> BackwardGraph:
    """`backward` without its last `count` outputs."""
    if not count:
        return backward
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    dropped = backward.outputs()[-count:]
    unwanted = _hooks_only_for(backward, dropped)
    for node in backward.graph.nodes:
        if node.op != "output":
            value = node.args[1] if node in unwanted else None
            copied[node] = copied[value] if value is not None else graph.node_copy(node, copied.__getitem__)
    kept = [None if node is None else copied[node] for node in backward.outputs()[:-count]]
    graph.output((*kept, *[None] * count))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and call_of(node).kind.is_functional:
            graph.erase_node(node)
    return backward.with_graph(graph)


def _hooks_only_for(backward: BackwardGraph, dropped: tuple[fx.Node | None, ...]) -> set[fx.Node]:
    """Hooks on the dropped gradients, which belong to node calls that execute nothing."""
    executed = {c.node_call for _, c in backward.calls() if c.kind.is_node or c.kind is CallKind.ATEN}
    hooks: set[fx.Node] = set()
    for output in dropped:
        while output is not None and output.op == "call_function" and call_of(output).kind is CallKind.HOOK:
            if call_of(output).node_call in executed:
                break
            hooks.add(output)
            output = output.args[1]  # type: ignore[assignment]
    return hooks
