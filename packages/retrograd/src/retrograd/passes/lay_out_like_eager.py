"""Put a captured backward into the order in which eager would execute it.

In: a `BackwardGraph` in the engine's order, and the position in eager's order of every node call and of every
step of an inlined node. Out: the same calls, block by block in eager's order. Gradients that meet in one
buffer are added in the order in which eager's nodes deliver them, each as soon as it is there.

Law: every call that has an effect is there exactly once, and every value is defined before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import add_call, add_copy
from retrograd.errors import Reason, VerificationError
from retrograd.graph.backward_graph import BackwardGraph, Call, CallKind, call_of

#: a node call and a step in it.
Place = tuple[int, int]


def lay_out_like_eager(backward: BackwardGraph, position: Mapping[Place, int]) -> BackwardGraph:
    """Reorder `backward`.

    Args:
        backward: as captured.
        position: for each `Call.place`, its position in eager's order.

    Raises:
        VerificationError: the law does not hold.
    """
    laid_out = _Layout(backward, position).run()
    verify_layout(backward, laid_out)
    return laid_out


class _Layout:
    def __init__(self, backward: BackwardGraph, position: Mapping[Place, int]) -> None:
        self._backward = backward
        self._position = position
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node | None] = {}
        self._partial: dict[fx.Node, fx.Node | None] = {}

    def run(self) -> BackwardGraph:
        for node, _ in self._backward.placeholders():
            self._copy(node)
        blocks, sums = self._blocks()
        waiting = self._contributions(sums)
        for place in sorted(blocks, key=self._position.__getitem__):
            for node in blocks[place]:
                self._copy(node)
            for total, grad in waiting.get(place, ()):
                self._contribute(total, grad, place)
        outputs = tuple(self._value(node) for node in self._backward.outputs())
        self._graph.output(outputs)
        return self._backward.with_graph(self._graph)

    def _blocks(self) -> tuple[dict[Place, list[fx.Node]], list[fx.Node]]:
        """The calls other than sums, by place, and the sums."""
        blocks: dict[Place, list[fx.Node]] = {}
        sums: list[fx.Node] = []
        for node, call in self._backward.calls():
            if call.kind is CallKind.SUM:
                sums.append(node)
            else:
                blocks.setdefault(self._place(call), []).append(node)
        return blocks, sums

    def _place(self, call: Call) -> Place:
        return call.place if call.place in self._position else (call.node_call, 0)

    def _contributions(self, sums: Sequence[fx.Node]) -> dict[Place, list[tuple[fx.Node, fx.Node]]]:
        """For each producing place, the (sum, gradient) pairs that it delivers, in the order of its outputs.

        When a buffer receives a third gradient, its sum of two is left unused. Only the last sum counts.
        """
        waiting: dict[Place, list[tuple[fx.Node, fx.Node]]] = {}
        for total in sums:
            if total.users:  # the recorder extends a sum by naming all its parts again
                for grad in total.args:
                    assert isinstance(grad, fx.Node)
                    waiting.setdefault(self._producer(grad), []).append((total, grad))
        return waiting

    def _contribute(self, total: fx.Node, grad: fx.Node, place: Place) -> None:
        value = self._new[grad]
        if total in self._partial:
            before = self._partial[total]
            assert callable(total.target)
            value = add_call(self._graph, total.target, (before, value))
            value.meta["call"] = Call(CallKind.SUM, place[0], step=place[1])
        self._partial[total] = self._new[total] = value

    def _producer(self, grad: fx.Node) -> Place:
        """The place that delivered `grad`. The gradients of the roots come from node call 0."""
        return (0, 0) if grad.op == "placeholder" else self._place(call_of(grad))

    def _value(self, node: fx.Node | None) -> fx.Node | None:
        return None if node is None else self._new[node]

    def _copy(self, node: fx.Node) -> None:
        self._new[node] = add_copy(self._graph, node, self._required)

    def _required(self, node: fx.Node) -> fx.Node:
        value = self._new.get(node)
        if value is None:
            raise KeyError(f"{node} is used before eager's order defines it")
        return value


def verify_layout(before: BackwardGraph, after: BackwardGraph) -> None:
    """`after` makes the calls of `before` in another order.

    Raises:
        VerificationError: a call other than a sum is missing, there twice, or reads a value that is not
            there yet.
    """
    wanted, made = _calls(before), _calls(after)
    if wanted != made:
        missing = wanted - made
        target, index = next(iter(missing + (made - wanted)))
        name = getattr(target, "__name__", str(target))
        _fail(after, index, f"{name} is made {'too rarely' if (target, index) in missing else 'too often'}")
    defined = {node for node, _ in after.placeholders()}
    for node, call in after.calls():
        for value in node.all_input_nodes:
            if value not in defined:
                _fail(after, call.node_call, f"{node.name} reads {value.name} before it is there")
        defined.add(node)


def _calls(backward: BackwardGraph) -> Counter[tuple[Any, int]]:
    return Counter(
        [(node.target, call.node_call) for node, call in backward.calls() if call.kind is not CallKind.SUM]
    )


def _fail(backward: BackwardGraph, node_call: int, text: str) -> None:
    raise VerificationError(
        Reason(
            "layout",
            text,
            "live.schedule",
            node=backward.node_name(node_call),
            source=backward.node_calls[node_call].source,
            way_out="this is a bug in retrograd: please report it with the program",
        )
    )
