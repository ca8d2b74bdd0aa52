"""Which values of a functional graph share memory.

In: a joint graph. Out: for each node the one whose memory it shows, and which of those a user can see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import is_operator_overload, schema_of
from retrograd.graph.joint import Gradient, JointSignature, Primal


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
