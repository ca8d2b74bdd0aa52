"""Common-subexpression elimination for the forward: of several equal calls, keep the first.

In: a joint graph. Out: the same graph, in which readers of later equal calls read the first. For example,
autocast casts an activation once for each layer that reads it, such as the projections to queries, keys and
values, and the backward would save each cast that it reads.

We merge only calls of torch's own operators that return new memory or a view, draw no random numbers, and
have the same recomputation marks. We do not merge values visible to the user, who may modify one result and
not the other.

Distant calls are merged only if the backward reads all of them, like the attention mask that every layer of
T5 computes for itself: all copies would be saved, now one is. The remaining call moves to its earliest
possible place, so that identical layers remain identical. Other distant calls are not saved anyway, and
merging them would hold the first layer's value until the last layer.
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
    operands_of,
    reads_memory,
    replace_by_equal,
)
from retrograd.graph.joint import JointSignature, output_values
from retrograd.graph.reach import reached
from retrograd.graph.structure import token_of

#: The largest distance, in calls, at which calls count as near: less than a layer of a transformer.
_NEAR = 48
#: ``meta`` keys that must be the same in equal calls.
_MARKS = ("recompute", "ac_graph_id", "custom")


def merge_equal_calls(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Merge equal calls of `gm`, in place. Its signature is in ``meta["signature"]``."""
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
    """Groups of two or more of `calls` that compute the same, each in graph order."""
    groups: dict[Hashable, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in calls:
        same = tuple([first.get(operand, operand) for operand in operands_of(node)])
        key = token_of(node), same, repr([node.meta.get(mark) for mark in _MARKS])
        group = groups.setdefault(key, [])
        group.append(node)
        first[node] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _merged(calls: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The calls that remain after each call with inputs is replaced by the last remaining one, if that is
    near."""
    left = [calls[0]]
    for node in calls[1:]:
        if node.all_input_nodes and place[node] - place[left[-1]] <= _NEAR:
            replace_by_equal(node, left[-1])
            node.graph.erase_node(node)
        else:
            left.append(node)
    return left


def _merge_far(graph: fx.Graph, equal: Sequence[Sequence[fx.Node]]) -> None:
    """In each group of `equal` calls, merge those that the backward reads.

    Their operands are the same, or belong to another group.
    """
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
