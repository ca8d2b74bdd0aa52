"""Of forward calls that compute the same, make the first only.

In: a joint graph. Out: the same, in which other calls read the first of equal ones. Autocast casts an
activation anew for each layer that reads it, such as those for queries, keys and values; and what a backward
reads of each cast would be kept.

Only calls of torch's own operators are merged that give memory of their own or show that of others, do not
draw random numbers, and are not marked for recomputation in different ways. What a user can see stays apart:
he may change one result, and not the other. So do calls far from one another: what is kept from the first
layer for all others takes memory, and layers that were equal are no longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import (
    aliased_inputs,
    depends_on_data,
    has_effect,
    is_collective,
    is_operator_overload,
    is_wait,
    reads_memory,
    replace_by_equal,
)
from retrograd.graph.joint import JointSignature, output_values
from retrograd.graph.reach import reached
from retrograd.graph.structure import token_of

#: calls between two that are merged, at most: fewer than a layer of a transformer has.
_NEAR = 48
#: what a call is marked with, besides where it comes from.
_MARKS = ("recompute", "ac_graph_id", "custom")


def merge_equal_calls(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Merge equal calls of `gm`, in place; its signature stands in ``meta["signature"]``."""
    signature: JointSignature = gm.meta["signature"]
    results = output_values(gm.graph)[: signature.forward_count]
    visible = set(reached((one for one in results if isinstance(one, fx.Node)), aliased_inputs))
    first: dict[Hashable, tuple[int, fx.Node]] = {}
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for place, node in enumerate(calls):
        if node in visible or not _may_be_merged(node):
            continue
        operands: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), operands.append)
        key = token_of(node), tuple(operands), repr([node.meta.get(mark) for mark in _MARKS])
        before, equal = first.setdefault(key, (place, node))
        if equal is node:
            continue
        if place - before > _NEAR:
            first[key] = place, node
            continue
        replace_by_equal(node, equal)
        gm.graph.erase_node(node)
    return gm


def _may_be_merged(node: fx.Node) -> bool:
    if node.meta.get("is_backward") or not is_operator_overload(node.target) or not node.all_input_nodes:
        return False
    if node.target.namespace not in ("aten", "prims") or has_effect(node) or depends_on_data(node):
        return False
    return not (is_collective(node) or is_wait(node) or reads_memory(node))
