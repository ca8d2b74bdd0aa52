"""Alias analysis and subgraph extraction for joint graphs.

`memory_of`. In: a joint graph. Out: a `Memory`: the owners of each node's memory, and which of them the user
can reach.

`extract`. In: a joint graph, input nodes and wanted nodes. Out: a new graph module with the calls in between,
in their old order.

`finished_backward` moves recomputed calls of a region to just before their first use, so that their results
live only as long as needed. `finished_forward` moves calls whose results are only saved next to their inputs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.graph.aliases import memory_owners
from retrograd.graph.fx import add_copy, depends_on_data, has_effect, is_mutating, lazy_graph_module
from retrograd.graph.joint import Gradient, JointSignature, Primal, output_values
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.reach import reached

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_backward(node: fx.Node) -> bool:
    """Whether a call belongs to the backward."""
    return bool(node.meta.get("is_backward", False))


def backward_nodes(gm: fx.GraphModule, region: int | None = None) -> list[fx.Node]:
    """The calls of the backward, or of one of its regions."""
    nodes = [node for node in gm.graph.nodes if is_backward(node)]
    return nodes if region is None else [node for node in nodes if node.meta["region"] == region]


def read_by_backward(gm: fx.GraphModule, region: int | None = None) -> list[fx.Node]:
    """The inputs of `backward_nodes`: values that the forward computes, and cotangents."""
    read = [value for node in backward_nodes(gm, region) for value in node.all_input_nodes]
    return [value for value in dict.fromkeys(read) if not is_backward(value)]


def is_recomputed(node: fx.Node) -> bool:
    """Whether the user asks for the value to be recomputed."""
    return node.op == "call_function" and node.meta.get("recompute") in _RECOMPUTED


def is_number(node: fx.Node) -> bool:
    """Whether the value is a (symbolic) number."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


class Memory:
    """Which nodes of a joint graph share memory.

    Attributes:
        owners: for each node, the nodes whose memory it may share; the node itself if it shares none.
        primals, outputs: the numbers of the primals' placeholders and of the forward outputs. (One node may
            be two outputs.)
        kept_by_eager: the owners that eager keeps alive, because the backward reads an alias of them.
        unkept: owners that the user can reach, and so overwrite, and that eager does not keep alive.
        checkpointed: the calls inside checkpoints, which eager makes again in the backward.
        reread: owners that such calls read. Eager reads them as they are when the backward runs.
        unlike_forward: the checkpointed calls that give another result in the backward if the user has
            overwritten what they depend on.
        exits: calls like these, whose results eager keeps, for other nodes or for another checkpoint.
    """

    def __init__(self, gm: fx.GraphModule, signature: JointSignature) -> None:
        self.owners = owners = memory_owners(gm.graph.nodes)
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.primals = {node: i for i, node in enumerate(placeholders[: len(signature.primals)])}
        results, count = output_values(gm.graph), signature.forward_count
        self.outputs: dict[fx.Node, int] = {}
        for i, node in enumerate(results[:count]):
            if isinstance(node, fx.Node):
                self.outputs.setdefault(node, i)
        nodes = gm.graph.nodes
        self.checkpointed = inside = {n for n in nodes if is_recomputed(n) and "ac_graph_id" in n.meta}
        numbers = {node.meta.get("seq_nr") for node in inside}
        kept = [
            value
            for value in read_by_backward(gm)
            if value not in inside  # A value inside a checkpoint is kept only for readers outside of it.
            or any(is_backward(user) and user.meta.get("seq_nr") not in numbers for user in value.users)
        ]
        kept += [node for node in results[count:] if isinstance(node, fx.Node)]
        self.kept_by_eager = frozenset[fx.Node]().union(*(owners[node] for node in kept))
        self.unkept = self.of(*self.primals, *self.outputs) - self.kept_by_eager
        read = [(node, value) for node in inside for value in node.all_input_nodes]
        self.reread = self.of(*(value for _, value in read)) - inside
        groups = {node: node.meta["ac_graph_id"] for node in inside}
        exits = inside.intersection(kept) | {
            value for node, value in read if value in inside and groups[value] != groups[node]
        }
        self.unlike_forward, self.exits = set[fx.Node](), set[fx.Node]()
        for node in nodes:
            inputs = node.all_input_nodes if node in inside else ()
            if any(one in self.unlike_forward or self.is_overwritable(one) for one in inputs):
                (self.exits if node in exits else self.unlike_forward).add(node)

    def of(self, *nodes: fx.Node) -> frozenset[fx.Node]:
        """The owners of all memory that `nodes` share. A node added since the analysis owns its memory."""
        return frozenset[fx.Node]().union(*(self.owners.get(node, (node,)) for node in nodes))

    def is_overwritable(self, node: fx.Node) -> bool:
        """Whether the user may overwrite the value's memory before the backward, because eager does not save
        it."""
        return not self.unkept.isdisjoint(self.owners[node]) and not is_number(node)

    def is_reread(self, node: fx.Node) -> bool:
        """Whether the user may overwrite the value's memory, and eager then reads the new value."""
        return self.is_overwritable(node) and self.reread.issuperset(self.owners[node] & self.unkept)

    def is_forbidden(self, node: fx.Node) -> bool:
        """Whether saving the value is unsafe: the user may overwrite its memory, and eager would not read it
        in the backward."""
        return self.is_overwritable(node) and not self.is_reread(node)


def gradients_of(joint: JointValues, region: int) -> list[fx.Node]:
    """The nodes of the joint graph that are a region's gradients."""
    roles = zip(output_values(joint.gm.graph), joint.signature.outputs, strict=True)
    return [node for node, role in roles if isinstance(role, Gradient) and role.region == region]


def elements_read(wanted: Iterable[fx.Node], given: Collection[str] = ()) -> list[fx.Node]:
    """The nodes whose elements, not only sizes, `wanted` is computed from. The search stops at nodes with the
    names in `given`."""

    def unknown(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node.name not in given]

    def following(node: fx.Node) -> list[fx.Node]:
        is_size = is_number(node) and not depends_on_data(node)
        return unknown(filter(is_number, node.all_input_nodes) if is_size else node.all_input_nodes)

    return list(reached(unknown(wanted), following))


def primals_read(joint: JointValues, wanted: Iterable[fx.Node]) -> set[int]:
    """The numbers of the primals whose elements, not only sizes, `wanted` are computed from."""
    found = set(elements_read(wanted))
    inputs = zip(joint.gm.graph.find_nodes(op="placeholder"), joint.signature.inputs, strict=True)
    return {role.index for node, role in inputs if isinstance(role, Primal) and node in found}


def leaves_sharing(gm: fx.GraphModule, signature: JointSignature, primals: Sequence[Any]) -> frozenset[int]:
    """The numbers of the leaves whose gradient shares memory that the backward also reads, or that another
    gradient shares. A hook that changes such a gradient in place would change the other value too."""
    owners = memory_owners(gm.graph.nodes)
    reading = [node for node in gm.graph.nodes if node in owners[node] and node.op != "output"]
    roles = [*zip(output_values(gm.graph), signature.outputs, strict=True)]
    given = [(node, role.of) for node, role in roles if isinstance(role, Gradient)]
    read = [value for node in reading for value in node.all_input_nodes] + [node for node, _ in given]
    readers = Counter(owner for value in read for owner in owners[value])
    return frozenset(
        there.index
        for node, there in given
        if not there.is_boundary
        and primals[there.index].is_leaf
        and any(readers[owner] > 1 for owner in owners[node])
    )


def overwritten_unread(joint: JointValues) -> set[int]:
    """The numbers of the primals that a call writes, and whose old elements no gradient depends on, such as
    running statistics of a batch norm. Repeating the call gives the same gradients whatever they contain."""
    graph, signature = joint.gm.graph, joint.signature
    wanted = [node for node in output_values(graph)[signature.forward_count :] if isinstance(node, fx.Node)]
    matter = primals_read(joint, [*wanted, *filter(has_effect, graph.nodes)])
    written = {update.primal for update in joint.updates if update.value is not None and update.view is None}
    return {i for i in written - matter if joint.primals[i].group is None}


_NOTHING: Mapping[fx.Node, fx.Node] = MappingProxyType({})


def needed_between(
    given: Iterable[fx.Node], wanted: Sequence[Any], instead: Mapping[fx.Node, fx.Node] = _NOTHING
) -> set[fx.Node]:
    """All nodes that `wanted` depends on, except `given` and what only `given` depends on.

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
    """The subgraph of `gm` that computes `wanted` (nodes or constants) from `given`, which become its
    placeholders. The calls in `also` are included for their effects, and `instead` is as in `needed_between`.
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
    """Insert a call that copies `value`, before a node or right after `value` is computed."""
    graph = value.graph
    if before is None:
        before = (graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value).next
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta["val"] = value.meta["val"].clone()
    return copy


def finished_forward(gm: fx.GraphModule, count: int) -> fx.GraphModule:
    """Reorder an extracted forward graph: move each call whose result is only saved to right after its
    inputs, or, if it reads only placeholders, to their first use.

    Such calls come from the backward, so they follow all layers. There, their inputs would have to stay in
    memory and be read once more. Next to its own layer, the backend can fuse such a call with it.

    Args:
        gm: the graph.
        count: how many of the first results are the function's own.
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
    _put_in_order(graph, place)
    gm.recompile()
    return gm


def finished_backward(gm: fx.GraphModule) -> fx.GraphModule:
    """Finish an extracted region's graph: move recomputed calls late, and replace ``view`` by ``reshape``,
    because a backend may give saved tensors other strides than the traced ones."""
    _recompute_late(gm.graph)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm


def _recompute_late(graph: fx.Graph) -> None:
    """Reorder `graph` in place: move each recomputed call to just before its first use, and keep the results
    of one call together."""
    waiting = {
        node
        for node in graph.nodes
        if node.op == "call_function" and not is_backward(node) and not has_effect(node)
    }
    if not waiting:
        return
    place = {node: (i, 1) for i, node in enumerate(graph.nodes)}
    for node in reversed(graph.nodes):
        if node in waiting and node.users:
            place[node] = min(place[user] for user in node.users)[0], 0
    for node in graph.nodes:
        if node in waiting and node.target is operator.getitem and node.args[0] in waiting:
            place[node] = place[node.args[0]]
    _put_in_order(graph, place)


def _put_in_order(graph: fx.Graph, place: Mapping[fx.Node, Any]) -> None:
    """Sort the nodes by `place`; nodes with equal places stay in their order."""
    output = graph.output_node()
    for node in sorted(graph.nodes, key=place.__getitem__):
        if node is not output:
            output.prepend(node)
