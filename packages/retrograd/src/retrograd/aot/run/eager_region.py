"""Run a region as eager runs it: the function again, then its autograd nodes by hand.

In: the inputs of a call, and cotangents of any kind. Out: gradients for the region's destinations; under
``create_graph`` they have a history that leads to the inputs and cotangents of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from retrograd._torch import pytree
from retrograd._torch.autograd import edge_of, graph_below, modified_error, outside_of_graph_task
from retrograd._torch.state import with_generator_states
from retrograd._torch.trace import common_base
from retrograd.aot.trace.differentiate import Walk
from retrograd.aot.trace.structure import divide
from retrograd.errors import CaptureError
from retrograd.graph.eager_order import LiveGraph
from retrograd.graph.joint import Destination
from retrograd.graph.joint_graph import AliasOf, ComputedOutput, JointValues


class RepeatableCall(NamedTuple):
    """What is needed to run a call again.

    Attributes:
        sources: the flat inputs.
        primals: the primals made of them.
        versions: of each primal; None of what tracks none.
        generators: states of the random number generators before the call.
        changed: sources that the call changes; here they are copies, as they were.
    """

    sources: Sequence[Any]
    primals: Sequence[Any]
    versions: Sequence[int | None]
    generators: Mapping[torch.device, Any]
    changed: Sequence[Any] = ()


def rerun_region(
    joint: JointValues, number: int, call: RepeatableCall | None, cotangents: Mapping[int, Any]
) -> dict[Destination, Any]:
    """Gradients of region `number`.

    Raises:
        CaptureError: the call cannot be repeated, because it changed its inputs.
        RuntimeError: an input was changed in place since the call, in eager's words.
    """
    if call is None:
        raise CaptureError.because(
            "call-not-repeatable",
            f"{joint.state.name} changes its inputs in place, so that this backward (a second derivative, or "
            "cotangents of another kind than captured) cannot be made",
            "aot.run_backward",
            way_out="keep the change out of the function, or run it eagerly",
        )
    primals = dict(enumerate(call.primals))
    for primal, version in zip(call.primals, call.versions, strict=True):
        if version is not None and primal._version != version:
            raise RuntimeError(modified_error(primal, version))
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        entries = {
            number: primal[...] for number, primal in primals.items() if joint.primals[number].differentiable
        }
        outputs = _again(joint, call, entries)  # kept: they own their autograd nodes
        visible = _values(joint, outputs)
    ends = {entry.grad_fn: number for number, entry in entries.items()}
    graph = graph_below(visible, ends)
    known = {i: ends[node.handle] for i, node in enumerate(graph.nodes) if node.handle in ends}
    graph = _ending_like_a_trace(graph, known)
    structure = divide(graph, known, joint.is_single_region, joint.hooked_leaves, joint.sums_apart)
    walk = Walk(graph, structure, known, number, lambda _: nullcontext(), _checks())

    def run() -> dict[Destination, Any]:
        with torch.set_grad_enabled(differentiable):
            return walk.run(cotangents)

    found: dict[Destination, Any] = outside_of_graph_task(run, differentiable)
    del outputs
    return found


def _ending_like_a_trace(graph: LiveGraph, ends: Iterable[int]) -> LiveGraph:
    """The graph with the sequence numbers of its ends changed to those of nodes that accumulate. At capture
    the ends were such nodes, and the graph must be divided in the same way now."""
    nodes = list(graph.nodes)
    for i in ends:
        nodes[i] = replace(nodes[i], sequence=_ACCUMULATES)
    return replace(graph, nodes=tuple(nodes))


#: the sequence number of AccumulateGrad.
_ACCUMULATES = (1 << 64) - 1


def _checks() -> bool:
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _again(joint: JointValues, call: RepeatableCall, entries: Mapping[int, Any]) -> list[Any]:
    """The flat outputs of the function, run on `entries`."""
    leaves = list(call.sources[: len(joint.state.leaves)])
    for place in call.changed:
        leaves[place] = leaves[place].clone()
    for number, entry in entries.items():
        if (leaf := joint.primals[number].leaf) is not None:
            leaves[leaf] = entry
    for i, same in enumerate(leaf.same_as for leaf in joint.state.leaves):
        if same is not None:
            leaves[i] = leaves[same]
    with joint.state.thread_modes.restored(), with_generator_states(dict(call.generators)):
        return pytree.tree_leaves(joint.state.call(leaves))


def _values(joint: JointValues, outputs: Sequence[Any]) -> list[tuple[Any, int]]:
    """The edges of the visible boundaries, in their order."""
    tensors: dict[int, torch.Tensor] = {}
    for plan, output in zip(joint.outputs, outputs, strict=True):
        if isinstance(plan, ComputedOutput):
            tensors[plan.value] = output
        elif isinstance(plan, AliasOf) and plan.value is not None and plan.value not in tensors:
            tensors[plan.value] = common_base([output])  # type: ignore[assignment]
    edges = [edge_of(tensors[j.value]) for j in joint.signature.boundaries if j.is_visible]
    return [edge for edge in edges if edge[0] is not None]
