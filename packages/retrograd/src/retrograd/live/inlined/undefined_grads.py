"""Finds the undefined gradients in the graph of an AOT-compiled backward.

In: the graph, the requested gradients, and which tangents are undefined. Out: `UndefinedGrads`: which values
are undefined in eager, the order in which eager would have computed the others, and where the gradient of
each output of the forward is complete.

The graph was traced with all tangents defined, because AOTAutograd fills in zeros. Eager runs no node whose
gradients are all undefined. A backward is linear in its tangents, so a value that depends only on undefined
tangents is undefined too, and a sum loses such an operand. If another operation mixes defined and undefined
operands, the undefined ones must be zeros after all. If the size of such an operand is unknown, the tangent
that it depends on must be zeros.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd.graph.reach import bits_reaching, reached


class UndefinedGrads:
    """The analysis of one graph for one set of undefined tangents.

    Args:
        graph: an AOT backward graph.
        tangents: the placeholders of each tangent.
        undefined: indices of the undefined tangents.
        outputs: the requested values. Each entry lists the nodes that one gradient is built from.

    Attributes:
        zeros: indices of the undefined tangents that must be zeros.
        filled: undefined values that other operations need as zeros.
        stands_for: maps a sum that lost its other operand to the node that it equals.
        totals: for each tangent, the node at which the full gradient of its output is complete.
        order: the nodes to compute, in eager's order.
        key: for each node, the sequence number of the forward operation in whose backward it runs. Nodes run
            in descending order of it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        tangents: Sequence[Sequence[fx.Node]],
        undefined: Iterable[int],
        outputs: Sequence[Sequence[fx.Node]],
    ) -> None:
        self._graph, self._tangents, self._outputs = graph, tangents, outputs
        #: for each node, a bit mask of the tangents that it depends on
        self._reach = bits_reaching(graph, {n: 1 << i for i, nodes in enumerate(tangents) for n in nodes})
        self._needed = _with_ancestors(part for parts in outputs for part in parts)
        self.zeros: set[int] = set()
        self._given_undefined = undefined = set(undefined)
        while mixed := self._spread(undefined - self.zeros):
            self.zeros |= mixed
        self.totals = [
            _total(found[0], 1 << i, self._reach, self._needed) for i, found in enumerate(tangents)
        ]
        self.key = _keys(graph, self._reach)
        live = self._live()
        nodes = [node for node in graph.nodes if node in live and node.op != "placeholder"]
        self.order = sorted(nodes, key=lambda node: -self.key[node])

    def is_undefined(self, node: fx.Node) -> bool:
        """Whether eager would have no gradient here."""
        return node in self._undefined

    def _spread(self, tangents: set[int]) -> set[int]:
        """Find the values that are undefined if `tangents` are. Return those tangents that must be zeros
        instead."""
        self._undefined = {node for number in tangents for node in self._tangents[number]}
        self.filled: set[fx.Node] = set()
        self.stands_for: dict[fx.Node, fx.Node] = {}
        missing = sum(1 << number for number in tangents)
        for node in self._graph.nodes:
            if node not in self._needed or node.op != "call_function" or not self._reach[node] & missing:
                continue
            operands = [a for a in node.all_input_nodes if self._reach.get(a)]
            defined = [a for a in operands if a not in self._undefined]
            if not defined:
                self._undefined.add(node)
            elif len(defined) < len(operands):
                if _is_sum(node):
                    self.stands_for[node] = defined[0]
                elif not self._fill(operands):
                    return self._numbers(operands, missing)
        for parts in self._outputs:
            found = {part in self._undefined for part in parts}
            if len(found) > 1 and not self._fill(parts):
                return self._numbers(parts, missing)
        return set()

    def _fill(self, nodes: Iterable[fx.Node]) -> bool:
        """Use zeros for the undefined ones of `nodes`, if their sizes are known. Return whether they are."""
        empty = [node for node in nodes if node in self._undefined]
        if not all(map(_has_static_value, empty)):
            return False
        self.filled.update(empty)
        return True

    def _numbers(self, nodes: Iterable[fx.Node], missing: int) -> set[int]:
        """The indices of the missing tangents that the undefined ones of `nodes` depend on."""
        bits = 0
        for node in nodes:
            if node in self._undefined:
                bits |= self._reach[node] & missing
        return {number for number in range(len(self._tangents)) if bits >> number & 1}

    def _live(self) -> Container[fx.Node]:
        def read_by(node: fx.Node) -> list[fx.Node]:
            read = [self.stands_for[node]] if node in self.stands_for else node.all_input_nodes
            return [value for value in read if value not in self._undefined]

        wanted = (*(part for parts in self._outputs for part in parts), *self.totals)
        return reached((node for node in wanted if node not in self._undefined), read_by)

    # what eager's nodes would release

    def consumed(self) -> frozenset[float]:
        """Keys of the eager nodes that would release their saved tensors."""
        return self._saving(self.order)

    def consumed_for(self, number: int) -> frozenset[float]:
        """The same, if only the gradient of this tangent's output is requested."""
        return self._saving(_with_ancestors([self.totals[number]]).keys() & set(self.order))

    def leaves_a_part(self) -> bool:
        """Whether the part that depends on an undefined tangent can still be differentiated later: this
        backward releases the saved tensors of none of the eager nodes in that part."""
        consumed = self.consumed()
        reached = self._reach.items()
        return not consumed or any(
            not self._saving(node for node, bits in reached if bits >> number & 1) & consumed
            for number in self._given_undefined
        )

    def _saving(self, nodes: Iterable[fx.Node]) -> frozenset[float]:
        """Keys of those of `nodes` that read a value that depends on no tangent, and so was saved."""
        return frozenset(
            self.key[node]
            for node in nodes
            if self._reach.get(node) and not all(map(self._reach.get, node.all_input_nodes))
        )


def _total(tangent: fx.Node, bit: int, reach: Mapping[fx.Node, int], needed: Container[fx.Node]) -> fx.Node:
    """The node of the full gradient of an output: follow the sums that add what the graph itself sends to
    that output."""
    current = tangent
    while True:
        users = [user for user in current.users if user in needed]
        if len(users) != 1 or not _adds(users[0]):
            return current
        other = next((a for a in users[0].all_input_nodes if a is not current), None)
        if other is None or not reach.get(other) or reach[other] & bit:
            return current
        current = users[0]


def _keys(graph: fx.Graph, reach: Mapping[fx.Node, int]) -> dict[fx.Node, float]:
    """Eager runs the backward of one region by descending sequence number. A node runs when the last value
    that it depends on is ready."""
    own = _own_keys([node for node in graph.nodes if node.op == "call_function" and reach[node]])
    key: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if reach.get(node):
            keys = [key[argument] for argument in node.all_input_nodes if argument in key]
            key[node] = min([*keys, own.get(node, float("inf"))])
    for node in reversed(graph.nodes):
        if node not in key:
            key[node] = max((key[user] for user in node.users if user in key), default=float("inf"))
    return key


def _has_static_value(node: fx.Node) -> bool:
    """Whether the graph knows the metadata of a node's value, and none of its sizes is symbolic."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and all(isinstance(size, int) for size in fake.shape)


def _with_ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """`nodes` and all that they depend on."""
    return reached(nodes, lambda node: node.all_input_nodes)


def _own_keys(calls: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """The key of each call by itself. A graph from AOTAutograd's cache has no sequence numbers, so in such a
    graph every gradient is ready as soon as possible.

    If the transposes of a linear layer have been folded into its products, the weight's gradient is ready
    with the bias's. In eager it is ready one node later.
    """
    known = {node: float(node.meta["seq_nr"]) for node in calls if "seq_nr" in node.meta}
    keys = known or {node: -float(place) for place, node in enumerate(calls)}
    for node in calls:
        if node.target is torch.ops.aten.mm.default and isinstance(node.args[0], fx.Node):
            source = _untransposed(node.args[0])
            biases = [user for user in source.users if user.target is torch.ops.aten.sum.dim_IntList]
            reshaped = [user for bias in biases for user in bias.users]
            if biases and source is not node.args[0]:
                keys[node] = min(keys[other] for other in (node, *biases, *reshaped) if other in keys) - 0.5
    return keys


def _untransposed(node: fx.Node) -> fx.Node:
    transposes = (torch.ops.aten.t.default, torch.ops.aten.permute.default)
    source = node.args[0] if node.target in transposes else node
    assert isinstance(source, fx.Node)
    return source


def _adds(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and not node.kwargs and len(node.args) == 2


def _is_sum(node: fx.Node) -> bool:
    """Whether `node` adds two values that are known to have the same shape."""
    if not _adds(node):
        return False
    shapes = [_shape(argument) for argument in (*node.args, node)]
    return None not in shapes and len(set(shapes)) == 1


def _shape(value: Any) -> tuple[str, ...] | None:
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(map(str, fake.shape)) if isinstance(fake, torch.Tensor) else None
