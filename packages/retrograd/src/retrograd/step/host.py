"""Take the numbers of a step out of its graph, for backends that compile tensors only.

In: a graph in which tensors meet numbers that are computed on the host: a learning rate, Adam's corrections.
Out: a `HostPart`: which nodes run before and after the rest, and the rest as a graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from retrograd.aot.extract import extract, needed_between

__all__ = ["HostPart", "NumbersInTheWayError", "host_part"]

_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool, int, float, bool)


class NumbersInTheWayError(Exception):
    """A tensor is computed with a number that is read from a tensor of the same graph."""


@dataclass(frozen=True)
class HostPart:
    """How a graph is divided.

    Attributes:
        before, after: nodes that run on the host, in order; empty if the graph has no numbers.
        given: nodes whose values the rest takes; `wanted`: nodes whose values it gives.
        rest: the graph of the others.
    """

    before: Sequence[fx.Node]
    after: Sequence[fx.Node]
    given: Sequence[fx.Node]
    wanted: Sequence[fx.Node]
    rest: fx.GraphModule


def host_part(gm: fx.GraphModule) -> HostPart:
    """Divide `gm`.

    Raises:
        NumbersInTheWayError: that is not possible.
    """
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "get_attr")]
    before = _before(calls)
    after = {node for node in calls if node not in before and (_is_number(node) or _writes(node, before))}
    rest = [node for node in calls if node not in before and node not in after]
    for node in rest:
        if found := after & set(node.all_input_nodes):
            raise NumbersInTheWayError(
                f"{node.target} reads {next(iter(found)).name}, a number read from a tensor"
            )
    inside = set(rest)
    outputs = gm.graph.output_node()
    given = list(dict.fromkeys(n for node in rest for n in node.all_input_nodes if n not in inside))
    wanted = [n for n in rest if any(user in after or user is outputs for user in n.users)]
    writing = [node for node in rest if node.op == "call_function" and _is_write(node)]
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    given.sort(key=order.__getitem__)
    also = [*writing, *[node for node in rest if not node.users and node not in writing]]
    graph = extract(gm, given, wanted, "Step", also=also)
    return HostPart(
        [node for node in calls if node in before],
        [node for node in calls if node in after],
        given,
        wanted,
        graph,
    )


def _before(calls: Sequence[fx.Node]) -> set[fx.Node]:
    """What numbers that do not depend on large tensors are computed from."""
    small: set[fx.Node] = set()
    for node in calls:
        inputs = node.all_input_nodes
        are_known = all(n in small or (n.op == "placeholder" and _is_small(n)) for n in inputs)
        if are_known and _is_small(node) and not _is_write(node):
            small.add(node)
    numbers = [node for node in small if _is_number(node)]
    return needed_between((), numbers) & small


def _is_small(node: fx.Node) -> bool:
    """Whether the value is made of numbers and CPU tensors without dimensions."""
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target), None)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return all(
        isinstance(part, _NUMBERS)
        or (isinstance(part, torch.Tensor) and part.dim() == 0 and part.device.type == "cpu")
        for part in parts
    )


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _NUMBERS) or node.target is _ITEM


def _is_write(node: fx.Node) -> bool:
    return node.target is _aten.copy_.default


def _writes(node: fx.Node, before: set[fx.Node]) -> bool:
    return _is_write(node) and node.args[1] in before
