"""How gradients flow through the graph of an AOT-compiled backward.

In: the graph, the gradients wanted of it, and which of its tangents are undefined. Out: `TangentFlow`: what
is undefined like in eager, in which order eager would have computed the rest, and where the gradient of an
output of the forward is complete.

The graph was traced for tangents that are all there; AOTAutograd fills in zeros. Eager runs no node whose
gradients are all undefined. A backward is linear in its tangents, so a value that hangs from undefined
tangents only is undefined too, and a sum loses that operand. Where another operation mixes them, the
undefined operand has to be zeros after all; if its size is not known, the tangent that it hangs from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx


class TangentFlow:
    """The analysis of one graph for one pattern of undefined tangents.

    Args:
        graph: an AOT backward graph.
        tangents: the placeholders of each tangent.
        undefined: numbers of the tangents that are undefined.
        outputs: the values wanted; each entry the nodes that one gradient is made of.

    Attributes:
        zeros: numbers of the undefined tangents that must be zeros.
        filled: undefined values in whose place other operations want zeros.
        stands_for: a sum that lost its other operand -> the node that it equals.
        totals: for each tangent, the node at which the gradient that it belongs to is complete.
        order: the nodes to compute, in eager's order.
        key: sequence number of the forward operation whose backward computes a node last needs: nodes run
            in descending order of it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        tangents: Sequence[Sequence[fx.Node]],
        undefined: Iterable[int],
        outputs: Sequence[Sequence[fx.Node]],
    ) -> None:
        self._graph = graph
        self._tangents = tangents
        self._outputs = outputs
        self._reach = self._reached_tangents()
        self._needed = _ancestors(part for parts in outputs for part in parts)
        self.zeros: set[int] = set()
        self._absent = undefined = set(undefined)
        while mixed := self._spread(undefined - self.zeros):
            self.zeros |= mixed
        self.totals = [self._total(number) for number in range(len(tangents))]
        self.key = self._keys()
        self.order = self._ordered(self._live())

    # dependence

    def _reached_tangents(self) -> dict[fx.Node, int]:
        """For each node, the tangents it depends on, as bits."""
        reach: dict[fx.Node, int] = {}
        for number, placeholders in enumerate(self._tangents):
            reach.update(dict.fromkeys(placeholders, 1 << number))
        for node in self._graph.nodes:
            if node.op != "placeholder":
                bits = 0
                for argument in node.all_input_nodes:
                    bits |= reach.get(argument, 0)
                reach[node] = bits
        return reach

    def is_undefined(self, node: fx.Node) -> bool:
        """Whether eager would have no gradient here."""
        return node in self._undefined

    def _spread(self, tangents: set[int]) -> set[int]:
        """Find what is undefined if `tangents` are; returns those of them that must be zeros instead."""
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
        """Have zeros in place of the undefined ones of `nodes`, if their sizes are known."""
        empty = [node for node in nodes if node in self._undefined]
        if not all(map(_has_static_value, empty)):
            return False
        self.filled.update(empty)
        return True

    def _numbers(self, nodes: Iterable[fx.Node], missing: int) -> set[int]:
        """The missing tangents that the undefined ones of `nodes` hang from."""
        bits = 0
        for node in nodes:
            if node in self._undefined:
                bits |= self._reach[node] & missing
        return {number for number in range(len(self._tangents)) if bits >> number & 1}

    # what is left

    def consumed(self) -> frozenset[float]:
        """Keys of the eager nodes that would release what they saved."""
        return frozenset(self.key[node] for node in self.order if self._reads_saved(node))

    def consumed_for(self, number: int) -> frozenset[float]:
        """The same, if only the gradient of this tangent's output is wanted."""
        before = _ancestors([self.totals[number]]).intersection(self.order)
        return frozenset(self.key[node] for node in before if self._reads_saved(node))

    def leaves_a_part(self) -> bool:
        """Whether what hangs from an undefined tangent can still be differentiated afterwards, because eager
        would need none of the nodes that it ran now and that saved something."""
        consumed = self.consumed()
        return not consumed or any(not self._keys_behind(i) & consumed for i in self._absent)

    def _keys_behind(self, tangent: int) -> set[float]:
        """Keys of the eager nodes that a tangent alone would have run, and that saved something."""
        bit = 1 << tangent
        return {
            self.key[node] for node, bits in self._reach.items() if bits & bit and self._reads_saved(node)
        }

    def _reads_saved(self, node: fx.Node) -> bool:
        """Whether a node computes with something that comes from no tangent, so from the forward."""
        arguments = node.all_input_nodes if self._reach.get(node) else ()
        return any(not self._reach.get(argument) for argument in arguments)

    # totals

    def _total(self, number: int) -> fx.Node:
        """Follow the sums in which the tangent meets what the graph itself sends to the same output."""
        bit = 1 << number
        current = self._tangents[number][0]
        while True:
            users = [user for user in current.users if user in self._needed]
            if len(users) != 1 or not _adds(users[0]):
                break
            user = users[0]
            other = next(iter(a for a in user.all_input_nodes if a is not current), None)
            if other is None or not self._reach.get(other) or self._reach[other] & bit:
                break
            current = user
        return current

    # order

    def _keys(self) -> dict[fx.Node, float]:
        """Eager runs the backward of one region by descending sequence number, and a node when the last of
        what it depends on is there."""
        calls = [n for n in self._graph.nodes if n.op == "call_function" and self._reach[n]]
        own = _own_keys(calls)
        key: dict[fx.Node, float] = {}
        for node in self._graph.nodes:
            if self._reach.get(node):
                keys = [key[argument] for argument in node.all_input_nodes if argument in key]
                key[node] = min([*keys, own.get(node, float("inf"))])
        for node in reversed(self._graph.nodes):
            if node not in key:
                key[node] = max((key[user] for user in node.users if user in key), default=float("inf"))
        return key

    def _live(self) -> set[fx.Node]:
        live: set[fx.Node] = set()
        pending = [part for parts in self._outputs for part in parts]
        pending += [total for total in self.totals if not self.is_undefined(total)]
        while pending:
            node = pending.pop()
            if node in live or node in self._undefined:
                continue
            live.add(node)
            pending += [self.stands_for[node]] if node in self.stands_for else node.all_input_nodes
        return live

    def _ordered(self, live: set[fx.Node]) -> list[fx.Node]:
        nodes = [node for node in self._graph.nodes if node in live and node.op != "placeholder"]
        return sorted(nodes, key=lambda node: -self.key[node])


def _has_static_value(node: fx.Node) -> bool:
    """Whether the graph tells the metadata of a node's value, and no size in it is symbolic."""
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and all(isinstance(size, int) for size in fake.shape)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they depend on."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _own_keys(calls: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """The key of each call for itself. A graph from AOTAutograd's cache keeps no sequence numbers: there
    every gradient is ready as soon as it can be.

    Where the transposes of a linear layer have been folded into its products, the weight's gradient is there
    with the bias's; in eager it takes one node more.
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
    """Whether `node` adds two values that are known to have one shape."""
    if not _adds(node):
        return False
    shapes = [_shape(argument) for argument in (*node.args, node)]
    return None not in shapes and len(set(shapes)) == 1


def _shape(value: Any) -> tuple[str, ...] | None:
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(map(str, fake.shape)) if isinstance(fake, torch.Tensor) else None
