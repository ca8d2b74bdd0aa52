"""Inputs that a call need not hold until its backward.

A region may have to run as eager runs it: for a second derivative, say. Then the function is run again, and
for that a call holds what it was given. Eager holds less: what its nodes have saved. Where all of that can be
made of what the compiled forward has saved, a second run gets zeros in place of an input, and what its nodes
have saved of them gives way to the right values. So nobody need hold the input.

In: at the end of a trace, the autograd graph. Out: `Droppable`, in the metadata of the joint graph. Calls
whose results eager saves are marked with ``meta["saved_for"]``.

In: a joint graph and its partition. Out: the numbers of the primals that are released; and when a region runs
again, `RestoreSaved`, which gives the nodes of that run what eager's would have saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd.aot.extraction import elements_read, extract, is_number
from retrograd.aot.trace.enter import Inputs
from retrograd.backends.registry import EagerBackend
from retrograd.engine import put_in_place, saved_tensors_of
from retrograd.errors import CaptureError
from retrograd.graph.calls import errors_by_value
from retrograd.graph.eager_order import LiveGraph
from retrograd.graph.fx import SAVED_FOR, depends_on_data, has_effect, is_operator_overload
from retrograd.graph.joint import primal_name
from retrograd.graph.joint_graph import JointValues, Partition, RegionBackward, Saved, SavedKind, Update
from retrograd.graph.reach import bits_reaching, reached
from retrograd.runtime.modes import without_autocast
from retrograd.runtime.subclass import PLAIN
from retrograd.trace import JointTracer, bytes_of, plain

#: bytes of an input that it is worth while to let go of.
FEWEST_BYTES = 1 << 20


@dataclass(frozen=True)
class NodeSave:
    """A tensor that an autograd node saves, and that may depend on a releasable primal.

    Attributes:
        node, name: the node, by its place in the graph.
        attribute, place: where the node has the tensor; `place` is that in a list, None if it is alone.
        regions: those that the node belongs to or is below of, whose gradients have it in their history.
    """

    node: int
    name: str
    attribute: str
    place: int | None
    regions: frozenset[int]


@dataclass(frozen=True)
class Droppable:
    """What is known when a function has been traced.

    Attributes:
        primals: by number, those on which the function can be run with other elements.
        saves: what eager's nodes save of them, as numbered in ``meta["saved_for"]``.
    """

    primals: frozenset[int]
    saves: tuple[NodeSave, ...]


def releasable(
    tracer: JointTracer,
    graph: LiveGraph,
    regions: Sequence[Sequence[int]],
    inputs: Inputs,
    updates: Iterable[Update],
) -> Droppable | None:
    """What may be released, if a trace has got as far as the autograd graph; None if nothing may.

    Args:
        graph: the autograd graph. regions: their nodes in it. updates: what the function does to its inputs.
    """
    primals = _large_inputs(inputs, updates)
    if not primals:
        return None
    placeholders = {node.target: node for node in tracer.graph.find_nodes(op="placeholder")}
    reaching = bits_reaching(tracer.graph, {placeholders[primal_name(i)]: 1 << i for i in primals})
    for node in tracer.graph.nodes:
        if reaching[node] and not _is_harmless(node, reaching):
            primals = {i for i in primals if not reaching[node] >> i & 1}
    if not primals:
        return None
    saves, mask = list[NodeSave](), sum(1 << i for i in primals)
    edges = [[edge.node for edge in node.edges if edge] for node in graph.nodes]
    below = [reached(nodes, edges.__getitem__) for nodes in regions]
    for index, node in enumerate(graph.nodes):
        saved = saved_tensors_of(node.handle)
        if saved is None:
            return None
        for attribute, place, tensor in saved:
            made = tracer.node_of(plain(tensor))
            if made is not None and reaching.get(made, mask) & mask:
                made.meta[SAVED_FOR] = (*made.meta.get(SAVED_FOR, ()), len(saves))
                among = frozenset(number for number, nodes in enumerate(below) if index in nodes)
                saves.append(NodeSave(index, node.name, attribute, place, among))
    return Droppable(frozenset(primals), tuple(saves))


def _large_inputs(inputs: Inputs, updates: Iterable[Update]) -> set[int]:
    """Numbers of the primals that it may be worth while to let go of: large ones with a history. None where
    wrapper subclasses are among the inputs, of which the graph takes the parts."""
    if any(primal.wrapping is not PLAIN for primal in inputs.primals):
        return set()
    kept = {update.primal for update in updates}
    twice = {leaf.same_as for leaf in inputs.state.leaves}
    return {
        i
        for i, primal in enumerate(inputs.primals)
        if i not in kept
        and primal.differentiable
        and not primal.is_leaf
        and primal.leaf is not None
        and primal.leaf not in twice
        and bytes_of(primal.fake) >= FEWEST_BYTES
    }


def _is_harmless(node: fx.Node, reaching: Mapping[fx.Node, int]) -> bool:
    """Whether the call can be made with zeros in place of large inputs: it raises for no elements of what
    depends on them (`reaching`)."""
    if node.op != "call_function" or node.target is operator.getitem or is_number(node):
        return not depends_on_data(node)
    if not is_operator_overload(node.target) or node.target.namespace not in ("aten", "prims"):
        return False
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda read: read.meta.get("val") if reaching[read] else None
    )
    return errors_by_value(node.target, args, kwargs) is None and not depends_on_data(node)


def released(
    joint: JointValues, saved: Sequence[Saved], backwards: Sequence[RegionBackward]
) -> frozenset[int]:
    """Numbers of the primals that calls need not hold."""
    found: Droppable | None = joint.gm.meta.get("releasable")
    if found is None or getattr(joint, "reports", None):
        return frozenset()
    wanted = _saved_by_eager(joint)
    if len(wanted) < len(found.saves):
        return frozenset()  # what no gradient reads was left out of the graph
    numbers = {primal_name(i): i for i in found.primals}
    left = set(found.primals)
    for number, backward in enumerate(backwards):
        entries = [saved[i] for i in backward.saved]
        below = [node for save, node in wanted.items() if number in save.regions]
        read = elements_read(below, {entry.name for entry in entries})
        if any(map(has_effect, read)):
            return frozenset()
        left -= {numbers[node.target] for node in read if node.target in numbers}
        left -= {numbers[one.name] for one in entries if one.kind is SavedKind.PRIMAL and one.name in numbers}
    return frozenset(left)


def _saved_by_eager(joint: JointValues) -> dict[NodeSave, fx.Node]:
    """What eager's nodes save, and the calls that make it."""
    saves = joint.gm.meta["releasable"].saves
    return {saves[i]: node for node in joint.gm.graph.nodes for i in node.meta.get(SAVED_FOR, ())}


class RestoreSaved:
    """What the nodes of a second run, which got zeros for some inputs, are given instead."""

    def __init__(self, partition: Partition, number: int) -> None:
        joint = partition.joint
        wanted = {s: node for s, node in _saved_by_eager(joint).items() if number in s.regions}
        named = {node.name: node for node in joint.gm.graph.nodes}
        names = [partition.saved[i].name for i in partition.backwards[number].saved]
        self._kept = [place for place, name in enumerate(names) if name in named]
        given = [named[names[place]] for place in self._kept]
        inputs = joint.gm.graph.find_nodes(op="placeholder")[: len(joint.signature.primals)]
        self._primals = [i for i, node in enumerate(inputs) if node not in given]
        given += [inputs[i] for i in self._primals]
        self._saves = list(wanted)
        gm = extract(joint.gm, given, [*wanted.values()], "saved_by_eager")
        self._run = without_autocast(EagerBackend().compile(gm, ()))

    def __call__(self, graph: LiveGraph, kept: Sequence[Any], primals: Sequence[Any]) -> None:
        """Give the nodes of `graph` what they would have saved.

        Args:
            graph: of the second run.
            kept: what the region has saved.
            primals: of the call; what is released has the right sizes, and zeros.

        Raises:
            CaptureError: the second run went another way than the trace.
        """
        args = [kept[place] for place in self._kept] + [primals[i] for i in self._primals]
        with torch.no_grad():
            values = self._run(args)
        for save, value in zip(self._saves, values, strict=True):
            live = graph.nodes[save.node] if save.node < len(graph.nodes) else None
            if live is None or live.name != save.name:
                raise CaptureError.because(
                    "call-not-repeatable",
                    f"where the trace had {save.name}, a second run has {live and live.name}",
                    "aot.run_backward",
                    way_out="run the function eagerly, or keep what differs between two runs out of it",
                )
            put_in_place(live.handle, save.attribute, save.place, value)
