"""Reorder a captured backward, its hooks included, into the order in which eager would execute it.

In: a `BackwardGraph` in the engine's order, and the position in eager's order of every node call and of every
step of an inlined node. Out: the same calls, block by block in eager's order. Gradients that meet in one
buffer are added in the order in which eager's nodes deliver them, each as soon as it is available.

Law: every call with an effect occurs exactly once, and every value is defined before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from retrograd.errors import Reason, VerificationError
from retrograd.graph.backward_graph import BackwardGraph, Call, CallKind, call_of
from retrograd.graph.fx import add_call, add_copy

#: A node call and a step within it.
Place = tuple[int, int]


def reorder_like_eager(backward: BackwardGraph, position: Mapping[Place, int]) -> BackwardGraph:
    """Reorder `backward`.

    Args:
        backward: as captured.
        position: for each `Call.place`, its position in eager's order.

    Raises:
        VerificationError: the law does not hold.
    """
    laid_out = backward.with_graph(_laid_out(backward, position))
    verify_layout(backward, laid_out)
    return laid_out


def _laid_out(backward: BackwardGraph, position: Mapping[Place, int]) -> fx.Graph:
    def place_of(node: Any) -> Place:
        """The place that delivers a value. Node call 0 delivers the gradients of the roots."""
        if node.op == "placeholder":
            return 0, 0
        call = call_of(node)
        return call.place if call.place in position else (call.node_call, 0)

    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    blocks: dict[Place, list[fx.Node]] = {}
    #: By place, the sums to which it contributes, each with the gradient, in the order of its outputs.
    contributions: dict[Place, list[tuple[fx.Node, Any]]] = {}
    for node, call in backward.calls():
        if call.kind is not CallKind.SUM:
            blocks.setdefault(place_of(node), []).append(node)
        elif node.users:  # the recorder extends a sum by a new one with all terms: only the last has users
            for grad in node.args:
                contributions.setdefault(place_of(grad), []).append((node, grad))
    for node, _ in backward.placeholders():
        new[node] = add_copy(graph, node, new.__getitem__)
    for place in sorted(blocks, key=position.__getitem__):
        for node in blocks[place]:
            new[node] = add_copy(graph, node, new.__getitem__)
        for total, grad in contributions.get(place, ()):
            value = new[grad]
            if total in new:
                assert callable(total.target)
                value = add_call(graph, total.target, (new[total], value))
                value.meta["call"] = Call(CallKind.SUM, place[0], step=place[1])
            new[total] = value
    graph.output(tuple(None if node is None else new[node] for node in backward.outputs()))
    return graph


def verify_layout(before: BackwardGraph, after: BackwardGraph) -> None:
    """Check that `after` makes the calls of `before` in another order.

    Raises:
        VerificationError: a call other than a sum is missing or duplicated, or reads a value before it is
            defined.
    """
    wanted, made = _calls(before), _calls(after)
    if wanted != made:
        missing = wanted - made
        target, index = next(iter(missing + (made - wanted)))
        name = getattr(target, "__name__", str(target))
        _fail(after, index, f"{name} is made {'too rarely' if (target, index) in missing else 'too often'}")
    defined = {node for node, _ in after.placeholders()}
    for node, call in after.calls():
        for value in node.all_input_nodes:
            if value not in defined:
                _fail(after, call.node_call, f"{node.name} reads {value.name} before it is there")
        defined.add(node)


def _calls(backward: BackwardGraph) -> Counter[tuple[Any, int]]:
    return Counter(
        [(node.target, call.node_call) for node, call in backward.calls() if call.kind is not CallKind.SUM]
    )


def _fail(backward: BackwardGraph, node_call: int, text: str) -> None:
    raise VerificationError(
        Reason(
            "layout",
            text,
            "live.schedule",
            node=backward.node_name(node_call),
            source=backward.node_calls[node_call].source,
            way_out="this is a bug in retrograd: please report it with the program",
        )
    )
