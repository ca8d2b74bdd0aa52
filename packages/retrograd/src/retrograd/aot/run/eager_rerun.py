"""Computes a region's gradients by re-running the call in eager mode.

In: a call's replay record, and cotangents of any kind. Out: gradients for the region's destinations. We run
the function again, then its autograd nodes one by one. Under ``create_graph`` the gradients have a history
that leads to the inputs and cotangents of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograd.aot.extraction import gradients_of, primals_read
from retrograd.aot.modules import FlatCall
from retrograd.aot.run.contributions import Meetings
from retrograd.aot.trace.backward import RegionInterpreter
from retrograd.aot.trace.enter import enter_as
from retrograd.aot.trace.structure import Structure, divide
from retrograd.engine import (
    edge_of,
    entry_of,
    graph_below,
    idle_nodes,
    modified_error,
    outside_of_graph_task,
    refuse_reentry,
)
from retrograd.errors import CaptureError
from retrograd.graph.eager_order import ACCUMULATES, Edge, LiveGraph
from retrograd.graph.joint import Destination, JointSignature
from retrograd.graph.joint_graph import AliasOf, ComputedOutput, JointValues
from retrograd.runtime import pytree
from retrograd.runtime.modes import with_generator_states
from retrograd.runtime.tensor import common_base
from retrograd.trace import ClosureTensors, checkpoints_inlined, python_forms


class StandIn(torch.autograd.Function):
    """A tensor with another tensor's size and autograd history, but with its own memory."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
        """Create the tensor. With strides of 0 it occupies one element."""
        ctx.set_materialize_grads(False)
        return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Pass the gradient through."""
        return grad, None


#: takes a tensor and strides; returns a `StandIn` for the tensor.
stand_in = entry_of(StandIn)


class ReplayRecord(NamedTuple):
    """What we need to run a call again.

    Attributes:
        sources: the flat inputs.
        primals: the primals made from them.
        versions: the version counter of each primal. None if it has none, or if the primal may have changed.
        generators: states of the random number generators before the call.
        changed: indices of the primals that the call mutates. `primals` holds copies from before the call,
            unless their elements do not matter.
        released: the strides of each primal that we dropped, by its index. `primals` holds only its history.
    """

    sources: Sequence[Any]
    primals: Sequence[Any]
    versions: Sequence[int | None]
    generators: Mapping[torch.device, Any]
    changed: Sequence[Any] = ()
    released: Mapping[int, Sequence[int]] = MappingProxyType({})


#: overwrites what the nodes of a re-run saved, if the re-run received zeros for some primals.
RestoringSaved = Callable[[LiveGraph, Sequence[Any]], None]


def why_not_rerun(joint: JointValues, number: int, call: ReplayRecord) -> RuntimeError | None:
    """Why region `number` of a call cannot be re-run: the error that `rerun_region` would raise, or None."""
    at = {n: version for n, version in enumerate(call.versions) if version is not None}
    changed = {n: version for n, version in at.items() if call.primals[n]._version != version}
    read = primals_read(joint, gradients_of(joint, number)) if changed else set()
    for n in filter(read.__contains__, changed):
        return RuntimeError(modified_error(call.primals[n], changed[n]))
    return None


def draws_otherwise(name: str, why: str, way_out: str) -> CaptureError:
    """The error of a call of `name` that must be re-run, since `why`, but would get other random numbers."""
    return CaptureError.because(
        "call-not-repeatable",
        f"the gradients of {name} must be computed in eager mode, since {why}; but its forward drew other "
        "random numbers than eager would",
        "aot.run_backward",
        way_out=way_out,
    )


def rerun_region(
    joint: JointValues,
    number: int,
    ctx: Any,
    restore_saved: RestoringSaved,
    cotangents: Mapping[int | Edge, Any],
    wanted: Collection[Destination] | None = None,
) -> list[Any]:
    """Gradients of region `number`, whose node has the context `ctx`.

    Returns gradients for all destinations of the region, or for those in `wanted`. Pass `wanted` if the
    running backward must not enter a reentrant checkpoint: if a checkpoint leads to one of them, this raises
    as eager does. `restore_saved` is called with the autograd graph and the primals of the re-run.

    Raises:
        CaptureError: the function took another path than at capture.
        RuntimeError: an input was changed in place since the call; the message is eager's.
    """
    call = ctx.replay_record
    if (error := why_not_rerun(joint, number, call)) is not None:
        raise error
    differentiable = torch.is_grad_enabled()
    inlined = not joint.reenters or (wanted is None and not differentiable)
    has_functions = any(region.has_functions for region in joint.signature.regions)
    # a custom Function would receive zeros
    meetings = Meetings(ctx) if differentiable and not has_functions else None
    second = partial(_second_run, joint, number, call, restore_saved, differentiable, inlined)
    walk, outputs = second()
    if walk is None and joint.state.uses_python_forms:
        with python_forms():
            walk, outputs = second()
    if walk is not None and wanted is not None:
        refuse_reentry(walk.graph.nodes[index].handle for index in walk.leading_to(wanted))

    if walk is not None and meetings is not None:
        meetings.meet(walk)

    def run(walk: RegionInterpreter) -> dict[Destination, Any]:
        with torch.set_grad_enabled(differentiable):
            return walk.run(cotangents, wanted)

    found = {} if walk is None else outside_of_graph_task(partial(run, walk), differentiable)
    del outputs
    destinations = joint.signature.regions[number].destinations
    if not inlined and walk is not None:  # a checkpoint gives no gradient to tensors that it closes over
        found = dict.fromkeys(destinations) | found
    made = _as_divided(found, destinations, joint.state.name)
    gradients = [made[there] for there in destinations]
    return gradients if meetings is None else meetings.linked(gradients)


def _second_run(
    joint: JointValues,
    number: int,
    call: ReplayRecord,
    restore_saved: RestoringSaved,
    differentiable: bool,
    inlined: bool,
) -> tuple[RegionInterpreter | None, list[Any]]:
    """Run the function again, and return the backward of region `number`, with the function's outputs.

    The backward is None if the re-run's regions begin or end in other places than the trace's. The outputs
    own the autograd nodes. Reentrant checkpoints become part of the graph if `inlined` is set.
    """
    primals = dict(enumerate(call.primals))
    with torch.enable_grad():
        replayed = {n: primal.clone() if n in call.changed else primal for n, primal in primals.items()}
        entries = {
            n: replayed[n] if n in call.changed else primal[...]
            for n, primal in primals.items()
            if joint.primals[n].differentiable
        }
        for n, strides in call.released.items():
            entries[n] = stand_in(primals[n], strides)
            entries[n].detach().zero_()
        for n in entries:  # as in the trace, autocast casts a leaf once for all its uses
            if joint.primals[n].is_leaf and not differentiable:
                entries[n] = replayed[n].detach().requires_grad_()
            elif joint.primals[n].is_leaf and n not in call.changed:
                entries[n] = primals[n]
        for n, entry in entries.items():
            entry._is_param = isinstance(primals[n], nn.Parameter)  # modules check it, and wrap other tensors
        given = {n: replayed[n] for n in call.changed}
        given |= {n: enter_as(joint.entered_as, joint.primals[n], entry) for n, entry in entries.items()}
        outputs = _replayed(joint, call, given, inlined)
        visible = _values(joint, outputs, given)
    ends = {edge_of(entry)[0]: number for number, entry in entries.items()}
    graph = graph_below(visible, ends, idle_nodes(visible, ends))
    known = {i: ends[node.handle] for i, node in enumerate(graph.nodes) if node.handle in ends}
    # At capture these ends were AccumulateGrad nodes. The graph must be divided in the same way now.
    nodes = [replace(n, sequence=ACCUMULATES) if i in known else n for i, n in enumerate(graph.nodes)]
    graph = replace(graph, nodes=tuple(nodes))
    leaves = [n for n, primal in enumerate(joint.primals) if primal.differentiable and primal.is_leaf]
    structure = divide(graph, known, joint.options, leaves)
    if not _is_divided_alike(structure, joint.signature):
        return None, outputs
    if call.released:
        restore_saved(graph, [*(primals | {n: entries[n].detach() for n in call.released}).values()])
    checks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return RegionInterpreter(graph, structure, known, number, lambda _: nullcontext(), checks), outputs


def _is_divided_alike(structure: Structure, signature: JointSignature) -> bool:
    """Whether a re-run has the regions of the trace. Its number of contributions may differ."""
    pairs = zip(structure.regions, signature.regions, strict=False)
    return len(structure.regions) == len(signature.regions) and all(
        now.roots == then.roots and _ends(now.destinations) <= _ends(then.destinations) for now, then in pairs
    )


def _ends(destinations: Sequence[Destination]) -> set[Destination]:
    return {replace(one, number=0) for one in destinations}


def _as_divided(
    found: Mapping[Destination, Any], destinations: Sequence[Destination], name: str
) -> dict[Destination, Any]:
    """The gradients for the destinations that were captured.

    A re-run may have more contributions than the trace, for example if autocast does not share a cast. We add
    those contributions up here.

    Raises:
        CaptureError: the re-run has no contribution where the trace had some.
    """
    if found.keys() == set(destinations):
        return dict(found)
    missing = _ends(destinations) - _ends(list(found))
    if missing:
        raise CaptureError.because(
            "call-not-repeatable",
            f"{name} took another way when it was run again for its backward: it lacks {len(missing)} of its "
            "gradients",
            "aot.run_backward",
            way_out="run it eagerly, or keep what differs between two runs out of it",
        )
    made: dict[Destination, Any] = dict.fromkeys(destinations)
    for there, grad in found.items():
        if grad is not None:
            to = next(one for one in destinations if replace(one, number=there.number) == there)
            made[to] = grad if made[to] is None else made[to] + grad
    return made


def _replayed(joint: JointValues, call: ReplayRecord, given: Mapping[int, Any], inlined: bool) -> list[Any]:
    """The function's flat outputs. It runs with the primals in `given`, which also replace the tensors that
    it closes over."""
    leaves = list(call.sources[: len(joint.state.leaves)])
    for number, entry in given.items():
        primal = joint.primals[number]
        if primal.leaf is not None:
            leaves[primal.leaf] = entry
        if primal.group is not None:
            members = [member.leaf for member in joint.state.aliases[primal.group].members]
            base = common_base([call.sources[leaf] for leaf in members])
            leaves = [_moved(v, base, entry) if i in members else v for i, v in enumerate(leaves)]
    for i, same in enumerate(leaf.same_as for leaf in joint.state.leaves):
        if same is not None:
            leaves[i] = leaves[same]
    found = {id(joint.primals[number].found): entry for number, entry in given.items()}
    called = joint.state.call
    shown = called.shown(call.sources[: len(leaves)]) if isinstance(called, FlatCall) else {}
    for place, real in shown.items():  # same as in the capture
        found[id(real)], leaves[place] = leaves[place], real
    with (
        joint.state.thread_modes.restored(),
        with_generator_states(dict(call.generators)),
        ClosureTensors(lambda tensor: found.get(id(tensor), tensor)),
        checkpoints_inlined() if inlined else nullcontext(),
    ):
        return pytree.tree_leaves(called(leaves))


def _moved(view: torch.Tensor, base: Any, to: torch.Tensor) -> torch.Tensor:
    """The same view as `view` is of `base`, but of `to`, which has the layout of `base`."""
    offset = view.storage_offset() - base.storage_offset() + to.storage_offset()
    return to if view is base else to.as_strided(view.shape, view.stride(), offset)


def _values(joint: JointValues, outputs: Sequence[Any], given: Mapping[int, Any]) -> list[tuple[Any, int]]:
    """The edges of the visible boundaries, in order: from `outputs`, and from tensors changed in place."""
    tensors = {u.value: given[u.primal] for u in joint.updates if u.value is not None and u.primal in given}
    for plan, output in zip(joint.outputs, outputs, strict=True):
        if isinstance(plan, ComputedOutput):
            tensors[plan.value] = output
        elif isinstance(plan, AliasOf):
            if plan.value is not None:
                known = tensors.get(plan.value)
                if known is None or not known.requires_grad:  # if the view has no history, its base has none
                    tensors[plan.value] = output if output._base is None else output._base
            if plan.made is not None:
                tensors[plan.made] = output
    edges = [edge_of(tensors[j.value]) for j in joint.signature.boundaries if j.is_visible]
    return [edge for edge in edges if edge[0] is not None]
