"""Parts of a joint graph: which calls belong to which half, which values share memory; and cutting one out.

In: a joint graph; values that are given and values that are wanted. Out: for each node the one whose memory
it shows, and which of those a user can see; a graph module of its own, with the calls between the values in
their old order. In the graph of a region, what is computed again stands just before its first use, so that
it is in memory only as long as it is needed; in that of the forward, what is only saved stands with what it
is made of.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import (
    add_copy,
    depends_on_data,
    has_effect,
    is_mutating,
    is_operator_overload,
    lazy_graph_module,
    schema_of,
)
from retrograd.graph.joint import Gradient, JointSignature, Primal, output_values
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.reach import reached
from retrograd.process import cached_property

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_backward(node: fx.Node) -> bool:
    """Whether a call belongs to the backward half."""
    return bool(node.meta.get("is_backward", False))


def backward_nodes(gm: fx.GraphModule, region: int | None = None) -> list[fx.Node]:
    """The calls of the backward half, or of one region of it."""
    nodes = [node for node in gm.graph.nodes if is_backward(node)]
    return nodes if region is None else [node for node in nodes if node.meta["region"] == region]


def read_by_backward(gm: fx.GraphModule, region: int | None = None) -> list[fx.Node]:
    """What those calls read that they do not make: values of the forward half, and cotangents."""
    read = [value for node in backward_nodes(gm, region) for value in node.all_input_nodes]
    return [value for value in dict.fromkeys(read) if not is_backward(value)]


def is_again(node: fx.Node) -> bool:
    """Whether the user wants it to be computed again."""
    return node.op == "call_function" and node.meta.get("recompute") in _AGAIN


def is_number(node: fx.Node) -> bool:
    """Whether the value is a (symbolic) number."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


@dataclass(frozen=True)
class Memory:
    """Sharing of memory in one joint graph.

    Attributes:
        owner: by node, the node whose memory it shows; itself if it has its own.
        primals, outputs: placeholders and forward outputs, by node their number. (A node may be given twice.)
        kept_by_eager: owners of which the backward half reads some alias: eager keeps them.
    """

    owner: Mapping[fx.Node, fx.Node]
    primals: Mapping[fx.Node, int]
    outputs: Mapping[fx.Node, int]
    kept_by_eager: frozenset[fx.Node]

    @cached_property
    def visible(self) -> frozenset[fx.Node]:
        """Owners that the user can reach, and so change."""
        return frozenset(self.owner[node] for node in (*self.primals, *self.outputs))

    def is_forbidden(self, node: fx.Node) -> bool:
        """Whether keeping the value would make the backward depend on memory that the user may change and on
        which eager's backward does not depend."""
        owner = self.owner[node]
        return owner in self.visible and owner not in self.kept_by_eager and not is_number(node)


def memory_of(gm: fx.GraphModule, signature: JointSignature) -> Memory:
    """Follow views through the graph of `gm`."""
    owner = _owners(gm.graph)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    primals = {node: i for i, node in enumerate(placeholders[: len(signature.primals)])}
    results, count = output_values(gm.graph), signature.forward_count
    outputs: dict[fx.Node, int] = {}
    for i, node in enumerate(results[:count]):
        if isinstance(node, fx.Node):
            outputs.setdefault(node, i)
    inside = {node for node in gm.graph.nodes if is_again(node) and "ac_graph_id" in node.meta}
    numbers = {node.meta.get("seq_nr") for node in inside}
    kept = {
        owner[value]
        for value in read_by_backward(gm)
        if value not in inside  # what a checkpoint computes is kept for what is outside of it only
        or any(is_backward(user) and user.meta.get("seq_nr") not in numbers for user in value.users)
    }
    kept |= {owner[node] for node in results[count:] if isinstance(node, fx.Node)}
    return Memory(owner, primals, outputs, frozenset(kept))


def _owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it shows."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = viewed(node)
        owner[node] = node if base is None else owner[base]
    return owner


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a call's result shows."""
    if node.op != "call_function" or not is_operator_overload(node.target):
        return None
    schema = schema_of(node.target)
    if not any(result.alias_info is not None for result in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def gradients_of(joint: JointValues, region: int) -> list[fx.Node]:
    """Those that a region makes, in the joint graph."""
    roles = zip(output_values(joint.gm.graph), joint.signature.outputs, strict=True)
    return [node for node, role in roles if isinstance(role, Gradient) and role.region == region]


def primals_read(joint: JointValues, wanted: Iterable[fx.Node]) -> set[int]:
    """Numbers of the primals of whose elements, not only of their sizes, `wanted` are computed."""

    def following(node: fx.Node) -> Sequence[fx.Node]:
        is_size = is_number(node) and not depends_on_data(node)
        return list(filter(is_number, node.all_input_nodes)) if is_size else node.all_input_nodes

    found = reached(wanted, following)
    inputs = zip(joint.gm.graph.find_nodes(op="placeholder"), joint.signature.inputs, strict=True)
    return {role.index for node, role in inputs if isinstance(role, Primal) and node in found}


def leaves_sharing(gm: fx.GraphModule, signature: JointSignature, primals: Sequence[Any]) -> frozenset[int]:
    """Numbers of the leaves whose gradient lies in memory that the backward reads too, or gives to others: a
    hook that changes the gradient in place changes it for them."""
    owner = _owners(gm.graph)
    reading = [node for node in gm.graph.nodes if owner[node] is node and node.op != "output"]
    readers = Counter(owner[value] for node in reading for value in node.all_input_nodes)
    roles = [*zip(output_values(gm.graph), signature.outputs, strict=True)]
    given = [(owner[node], role.of) for node, role in roles if isinstance(role, Gradient)]
    readers.update(memory for memory, _ in given)
    return frozenset(
        there.index
        for memory, there in given
        if readers[memory] > 1 and not there.is_boundary and primals[there.index].is_leaf
    )


def overwritten_unread(joint: JointValues) -> set[int]:
    """Numbers of the primals that a call writes, and of whose elements before that no gradient is made, such
    as the statistics of a normalisation: whatever is in them, the call has the same gradients again."""
    graph, signature = joint.gm.graph, joint.signature
    wanted = [node for node in output_values(graph)[signature.forward_count :] if isinstance(node, fx.Node)]
    matter = primals_read(joint, [*wanted, *filter(has_effect, graph.nodes)])
    written = {update.primal for update in joint.updates if update.value is not None and update.view is None}
    return {i for i in written - matter if joint.primals[i].group is None}


_NOTHING: Mapping[fx.Node, fx.Node] = MappingProxyType({})


def needed_between(
    given: Iterable[fx.Node], wanted: Sequence[Any], instead: Mapping[fx.Node, fx.Node] = _NOTHING
) -> set[fx.Node]:
    """All nodes on which `wanted` depends, not going beyond `given`, without those themselves.

    `instead` maps nodes to others that are read in their place.
    """
    border = set(given)

    def inside(nodes: Iterable[Any]) -> list[fx.Node]:
        read = [instead.get(node, node) for node in nodes if isinstance(node, fx.Node) and node not in border]
        return [node for node in read if node not in border]

    return set(reached(inside(wanted), lambda node: inside(node.all_input_nodes)))


def extract(
    gm: fx.GraphModule,
    given: Sequence[fx.Node],
    wanted: Sequence[Any],
    name: str,
    instead: Mapping[fx.Node, fx.Node] = _NOTHING,
    also: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """The part of `gm` that computes `wanted` (nodes or constants) of `given`, which become its placeholders;
    and calls that are to be made `also`, for what they do.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def copied(node: fx.Node) -> fx.Node:
        return made[node] if node in made else made[instead[node]]

    for node in given:
        placeholder = graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
        made[node] = placeholder
    inside = needed_between(given, [*wanted, *also], instead)
    for node in gm.graph.nodes:
        if node in inside:
            if node.op == "placeholder":
                raise KeyError(node.name)
            made[node] = add_copy(graph, node, copied)
    graph.output(tuple(copied(node) if isinstance(node, fx.Node) else node for node in wanted))
    return lazy_graph_module(gm, graph, name)


def copied_call(value: fx.Node, before: fx.Node | None = None) -> fx.Node:
    """A call that copies `value`; it stands before a node, or where the value is made."""
    graph = value.graph
    if before is None:
        before = (graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value).next
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta["val"] = value.meta["val"].clone()
    return copy


def finished_forward(gm: fx.GraphModule, count: int) -> fx.GraphModule:
    """The forward graph, once it is cut out: what is computed only to be saved stands behind what it reads,
    or, if it reads nothing but inputs, at their first use. So it is fused with its own layer. It came from
    the backward half, behind all layers: there, what it reads was read again, and kept until then.

    Args:
        gm: the graph. count: how many results, from the first, are the function's own.
    """
    graph = gm.graph
    if any(map(is_mutating, graph.nodes)):
        return gm
    own = [node for node in output_values(graph)[:count] if isinstance(node, fx.Node)]
    own += [node for node in graph.nodes if node.op != "call_function" or has_effect(node)]
    needed = reached(own, lambda node: [] if node.op == "output" else node.all_input_nodes)
    place = {node: i for i, node in enumerate(graph.nodes) if node in needed}
    for node in graph.nodes:
        if node not in needed:
            behind = [place[read] for read in node.all_input_nodes if read.op != "placeholder"]
            users = {user for read in node.all_input_nodes for user in read.users if user in needed}
            first = min((place[user] for user in users), default=len(graph.nodes))
            place[node] = max(behind, default=first)
    output = graph.output_node()
    for node in sorted(graph.nodes, key=place.__getitem__):
        if node is not output:
            output.prepend(node)
    gm.recompile()
    return gm


def finished_backward(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of a region, once it is cut out: what is computed again stands late; views may be copies,
    since a backend may give what is saved another layout than tracing did."""
    _compute_again_late(gm.graph)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm


def _compute_again_late(graph: fx.Graph) -> None:
    """Change the order of `graph` in place."""
    waiting = {
        node: i
        for i, node in enumerate(graph.nodes)
        if node.op == "call_function" and not is_backward(node) and not has_effect(node)
    }
    if not waiting:
        return
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr") or node in waiting:
            continue
        for needed in sorted(_needed_by(node, waiting), key=waiting.__getitem__):
            node.prepend(needed)
            del waiting[needed]


def _needed_by(node: fx.Node, waiting: dict[fx.Node, int]) -> set[fx.Node]:
    """What of `waiting` has to stand before the node; results of one call stay together."""

    def before(value: fx.Node) -> list[fx.Node]:
        together = (user for user in value.users if user.target is operator.getitem)
        return [needed for needed in (*value.all_input_nodes, *together) if needed in waiting]

    return set(reached((value for value in node.all_input_nodes if value in waiting), before))
