"""The laws of the values in this folder, checked.

In: values before and after a stage or pass. Out: nothing, or a `VerificationError` that names the call.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from retrograd.errors import Reason, VerificationError
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.hook_kind import CallKind


def verify_layout(before: BackwardGraph, after: BackwardGraph) -> None:
    """`after` makes the calls of `before` in another order.

    Raises:
        VerificationError: a call other than a sum is missing, there twice, or reads a value that is not
            there yet.
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
