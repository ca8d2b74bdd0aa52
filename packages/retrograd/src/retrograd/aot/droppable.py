"""Find the inputs that a call need not hold until its backward.

A region may have to run in eager, for example for a second derivative. We then re-run the function, so a call
holds its inputs. Eager holds less: only what its nodes saved. If everything that eager saved can be computed
from what we saved, the re-run receives zeros for an input, and we then overwrite what the nodes of the re-run
saved. So the call need not hold that input.

`releasable`. In: the autograd graph at the end of a trace. Out: a `Droppable`, in the metadata of the joint
graph. It also marks each call whose result eager saves with ``meta["saved_for"]``.

`released`. In: a joint graph and its partition. Out: the numbers of the primals that calls release.

`RestoreSaved`. In: the autograd graph of a re-run. Out: its nodes hold what eager's would have saved.
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
from retrograd.graph.eager_order import LiveGraph
from retrograd.graph.fx import SAVED_FOR, depends_on_data, has_effect, is_operator_overload
from retrograd.graph.joint import primal_name
from retrograd.graph.joint_graph import JointValues, Partition, RegionBackward, Saved, SavedKind, Update
from retrograd.graph.operator_effects import errors_by_value
from retrograd.graph.reach import bits_reaching, reached
from retrograd.runtime.modes import without_autocast
from retrograd.runtime.subclass import PLAIN
from retrograd.trace import JointTracer, bytes_of, plain

#: we release inputs of at least this many bytes.
FEWEST_BYTES = 1 << 20


@dataclass(frozen=True)
class NodeSave:
    """A tensor that an autograd node saves, and that may depend on a releasable primal.

    Attributes:
        node, name: the node's index in the graph, and its name.
        attribute, place: the node's attribute that holds the tensor, and the index in it if it is a list.
        regions: the regions that contain the node or lead to it; it is in the history of their gradients.
    """

    node: int
    name: str
    attribute: str
    place: int | None
    regions: frozenset[int]


@dataclass(frozen=True)
class Droppable:
    """What a trace finds out about releasing inputs.

    Attributes:
        primals: the numbers of the primals whose elements a re-run may replace by zeros.
        saves: the saved tensors that depend on them; ``meta["saved_for"]`` refers to these by index.
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
    """The primals that may be released, and what eager saves of them. None if there are none.

    Args:
        tracer: holds the traced forward.
        graph: the autograd graph.
        regions: the nodes of each region in it.
        inputs: the inputs of the trace.
        updates: the function's mutations of its inputs.
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
    """The numbers of the primals that are worth releasing: large ones that require grad and are no leaves. If
    an input is a wrapper subclass, there are none, because the graph takes its inner tensors."""
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
    """Whether the call can run with zeros in place of the large inputs: no elements of its arguments that
    depend on them (see `reaching`) can make it raise."""
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
    """The numbers of the primals that calls need not hold."""
    found: Droppable | None = joint.gm.meta.get("releasable")
    if found is None or getattr(joint, "reports", None):
        return frozenset()
    wanted = _saved_by_eager(joint)
    if len(wanted) < len(found.saves):
        return frozenset()  # Dead-code removal dropped a saved tensor that no gradient reads.
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
    """The tensors that eager's nodes save, and the calls that compute them."""
    saves = joint.gm.meta["releasable"].saves
    return {saves[i]: node for node in joint.gm.graph.nodes for i in node.meta.get(SAVED_FOR, ())}


class RestoreSaved:
    """Replaces what the nodes of a re-run saved, if the re-run received zeros for some inputs."""

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
        """Overwrite what the nodes of `graph` saved with what they would have saved for the real inputs.

        Args:
            graph: the autograd graph of the re-run.
            kept: the tensors that we saved for the region.
            primals: the primals of the call; released ones are zeros of the right sizes.

        Raises:
            CaptureError: the re-run took another path than the trace.
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
