"""Of forward calls that compute the same, make the first only.

In: a joint graph. Out: the same, in which other calls read the first of equal ones. Autocast casts an
activation anew for each layer that reads it, such as those for queries, keys and values; and what a backward
reads of each cast would be kept.

Only calls of torch's own operators are merged that give memory of their own or show that of others, do not
draw random numbers, and are not marked for recomputation in different ways. What a user can see stays apart:
he may change one result, and not the other.

Calls far from one another are merged only if the backward reads the result of each, as of the attention mask
that every layer of T5 makes for itself: all of them would be kept, now one is. It is made as early as it can
be, so that layers that were equal still are. What is not kept in any case stays apart: kept from the first
layer for all others it would take memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.fx import (
    depends_on_data,
    has_effect,
    is_collective,
    is_mutating,
    is_operator_overload,
    is_wait,
    reads_memory,
    replace_by_equal,
)
from retrograd.graph.joint import JointSignature, output_values
from retrograd.graph.reach import reached
from retrograd.graph.structure import token_of

#: calls between two that are near one another, at most: fewer than a layer of a transformer has.
_NEAR = 48
#: what a call is marked with, besides where it comes from.
_MARKS = ("recompute", "ac_graph_id", "custom")


def merge_equal_calls(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Merge equal calls of `gm`, in place; its signature stands in ``meta["signature"]``."""
    signature: JointSignature = gm.meta["signature"]
    results = output_values(gm.graph)[: signature.forward_count]
    visible = set(reached((one for one in results if isinstance(one, fx.Node)), aliased_inputs))
    place = {node: i for i, node in enumerate(gm.graph.nodes) if node.op == "call_function"}
    equal = _equal_calls([node for node in place if node not in visible and _may_be_merged(node)])
    separate = [_merged(calls, place) for calls in equal]
    if not any(map(is_mutating, place)):
        _merge_far(gm.graph, [calls for calls in separate if len(calls) > 1])
    return gm


def _equal_calls(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Those of `calls` that compute the same, and there are several of, each time in their order."""
    groups: dict[Hashable, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in calls:
        operands: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), operands.append)
        same = tuple([first.get(operand, operand) for operand in operands])
        key = token_of(node), same, repr([node.meta.get(mark) for mark in _MARKS])
        group = groups.setdefault(key, [])
        group.append(node)
        first[node] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _merged(calls: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> list[fx.Node]:
    """What is left of equal calls if each that reads anything, and has the last one left near before it, is
    replaced by that."""
    left = [calls[0]]
    for node in calls[1:]:
        if node.all_input_nodes and place[node] - place[left[-1]] <= _NEAR:
            replace_by_equal(node, left[-1])
            node.graph.erase_node(node)
        else:
            left.append(node)
    return left


def _merge_far(graph: fx.Graph, equal: Sequence[Sequence[fx.Node]]) -> None:
    """Of each group of `equal` calls, merge those that the backward reads. Their operands are the same, or
    stand in another group."""
    repeated = {node for calls in equal for node in calls}
    merged = []
    for calls in equal:
        first, *others = [node for node in calls if _is_read_by_backward(node)] or calls[:1]
        for node in others:
            replace_by_equal(node, first)
        merged += [first] if others else []
    inputs = graph.find_nodes(op="placeholder")
    for node in sorted(reached(merged, lambda node: repeated.intersection(node.all_input_nodes))):
        max((inputs[-1], *node.all_input_nodes)).append(node)
    for node in sorted(repeated, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _is_read_by_backward(node: fx.Node) -> bool:
    return any(user.meta.get("is_backward") for user in node.users)


def _may_be_merged(node: fx.Node) -> bool:
    if node.meta.get("is_backward") or not is_operator_overload(node.target):
        return False
    if node.target.namespace not in ("aten", "prims") or has_effect(node) or depends_on_data(node):
        return False
    return not (is_collective(node) or is_wait(node) or reads_memory(node))
