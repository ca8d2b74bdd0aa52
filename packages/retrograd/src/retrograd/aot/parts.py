"""Parts of a joint graph: which calls belong to which half, which values share memory; and cutting one out.

In: a joint graph; values that are given and values that are wanted. Out: for each node the one whose memory
it shows, and which of those a user can see; a graph module of its own, with the calls between the values in
their old order. In the graph of a region, what is computed again stands just before its first use, so that it
is in memory only as long as it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import has_effect, is_operator_overload, lazy_graph_module, schema_of
from retrograd.graph.joint import Gradient, JointSignature, Primal
from retrograd.graph.reach import reached


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

    @property
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
    owner: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        base = _viewed(node)
        owner[node] = owner[base] if base is not None else node
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    primals = {
        node: i
        for i, (node, role) in enumerate(zip(placeholders, signature.inputs, strict=True))
        if isinstance(role, Primal)
    }
    results: Any = gm.graph.output_node().args[0]
    forward = [
        node for node, role in zip(results, signature.outputs, strict=True) if not isinstance(role, Gradient)
    ]
    outputs: dict[fx.Node, int] = {}
    for i, node in enumerate(forward):
        if isinstance(node, fx.Node):
            outputs.setdefault(node, i)
    kept = {owner[value] for value in read_by_backward(gm)}
    kept |= {owner[node] for node in results[len(forward) :] if isinstance(node, fx.Node)}
    return Memory(owner, primals, outputs, frozenset(kept))


def _viewed(node: fx.Node) -> fx.Node | None:
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
            made[node] = graph.node_copy(node, copied)
    graph.output(tuple(copied(node) if isinstance(node, fx.Node) else node for node in wanted))
    return lazy_graph_module(gm, graph, name)


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
