"""Cotangents for which a region's code was not traced: tracing it for them, or running it as eager does.

In: a partition and a root of a region. Out: `Expected`, which says whether an arriving cotangent is of the
kind that was traced, and which layout it has; and for other layouts, a graph in place of the region's own.
Formulas look at how a cotangent lies in memory (``grad.contiguous()``), so a graph that was traced for one
layout is wrong for another.

In: the inputs of a call, and cotangents of any kind. Out: gradients for the region's destinations, by running
the function again, then its autograd nodes by hand; under ``create_graph`` they have a history that leads to
the inputs and cotangents of the call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from retrograd._torch import pytree
from retrograd._torch.autograd import (
    edge_of,
    graph_below,
    idle_nodes,
    modified_error,
    outside_of_graph_task,
    refuse_reentry,
)
from retrograd._torch.fx import has_effect, is_symbolic
from retrograd._torch.state import Autocast, with_generator_states
from retrograd._torch.subclass import PLAIN, Layout, fits, parts_of
from retrograd._torch.tensor import common_base, is_lazy
from retrograd._torch.trace import FreeTensors, checkpoints_inlined, guard_count, hint_of
from retrograd.aot.capture import capture
from retrograd.aot.parts import extract, finished_backward, is_backward, needed_between, primals_read
from retrograd.aot.trace.differentiate import Walk
from retrograd.aot.trace.structure import divide
from retrograd.errors import CaptureError, RetrogradError
from retrograd.graph.eager_order import ACCUMULATES
from retrograd.graph.joint import Destination, Gradient, output_values
from retrograd.graph.joint_graph import AliasOf, ComputedOutput, JointValues, Partition

Strides = tuple[Any, ...]


@dataclass(frozen=True)
class Expected:
    """What a cotangent was traced as."""

    boundary: int
    wrapping: Layout
    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def of(partition: Partition, region: int, root: int) -> Expected:
        """What region `region` expects at the boundary `root`."""
        joint = partition.joint
        value = joint.values[joint.signature.boundaries[root].value]
        summary = partition.backwards[region].graph.summary
        fakes = dict(zip(summary.names, summary.inputs, strict=True))
        count = value.wrapping.count
        names = [f"cotangent_{root}_{part}" for part in range(count)] if count > 1 else [f"cotangent_{root}"]
        return Expected(root, value.wrapping, tuple(fakes[name] for name in names))

    @property
    def is_plain(self) -> bool:
        """Whether it is no wrapper subclass."""
        return self.wrapping is PLAIN

    @property
    def is_static(self) -> bool:
        """Whether it is a plain tensor without symbolic sizes."""
        return self.is_plain and not is_symbolic(self.parts[0])

    def fits(self, cotangent: torch.Tensor | None) -> bool:
        """Whether a cotangent is of the kind that was traced, whatever its layout."""
        if cotangent is None:
            return self.is_static
        return fits(self.wrapping, cotangent) and all(
            map(_is_ordinary, parts_of(cotangent, self.wrapping), self.parts)
        )

    def layout(self, cotangent: torch.Tensor | None) -> Strides | None:
        """Strides of a cotangent that is laid out otherwise than traced; of a subclass, of its parts."""
        if cotangent is None:
            return None
        if self.is_plain:
            return _strides(cotangent, self.parts[0])
        found = tuple(map(_strides, parts_of(cotangent, self.wrapping), self.parts))
        return found if any(found) else None

    def laid_out(self, cotangent: torch.Tensor | None) -> Sequence[Any]:
        """The plain tensors of a cotangent in the layout that was traced; zeros if it is undefined."""
        if cotangent is None:
            like = self.parts[0]
            zeros = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            return [zeros.zero_()]
        return list(map(_laid_out, parts_of(cotangent, self.wrapping), self.parts))


def _laid_out(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    if _strides(value, fake) is None:
        return value
    strides = _dense_strides(value.shape, fake)
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _is_ordinary(value: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether it is a tensor with elements of its own, such as are traced."""
    return (
        value.layout is torch.strided
        and value.dtype is fake.dtype
        and not (is_lazy(value) or value._is_zerotensor())
    )


def _strides(value: torch.Tensor, fake: torch.Tensor) -> Strides | None:
    """The strides of `value`, if they are not those of `fake`."""
    strides = value.stride()
    if 0 in value.shape or (not is_symbolic(fake) and strides == fake.stride()):
        return None
    triples = zip(value.shape, strides, _dense_strides(value.shape, fake), strict=True)
    return None if all(size == 1 or one == other for size, one, other in triples) else strides


def _dense_strides(shape: Sequence[int], fake: torch.Tensor) -> list[int]:
    """Strides for `shape` with dimensions in the order of those of `fake`, which is dense."""
    hints = [hint_of(stride) for stride in fake.stride()]
    order = sorted(range(len(shape)), key=lambda dim: (math.inf if hints[dim] is None else hints[dim], -dim))
    strides, count = [0] * len(shape), 1
    for dim in order:
        strides[dim] = count
        count *= max(shape[dim], 1)
    return strides


def traced_for(
    partition: Partition,
    number: int,
    layouts: Mapping[int, Strides],
    autocast: Autocast,
) -> fx.GraphModule | None:
    """The backward of region `number` for cotangents with these strides, by boundary, under `autocast`."""
    state, before = partition.joint.state, guard_count(partition.joint.state.fake_mode)
    try:
        joint = outside_of_graph_task(
            lambda: capture(
                state,
                single_region=partition.joint.is_single_region,
                split_at_leaf_grads=bool(partition.joint.hooked_leaves),
                sums_apart=partition.joint.sums_apart,
                layouts=layouts,
                backward_autocast=autocast,
            ),
            False,
        )
    except RetrogradError:
        return None
    if guard_count(state.fake_mode) != before or not _is_alike(partition.joint, joint, number):
        return None  # a guard that nobody would check, or another program
    return _cut_out(partition, joint, number)


def _is_alike(before: JointValues, now: JointValues, number: int) -> bool:
    one, other = (
        {there: wrapping for (region, there), wrapping in joint.gradients.items() if region == number}
        for joint in (before, now)
    )
    return before.signature.regions == now.signature.regions and one == other


def _cut_out(partition: Partition, joint: JointValues, number: int) -> fx.GraphModule | None:
    graph, taken = joint.gm.graph, partition.backwards[number].graph.summary.names
    named = {node.name: node for node in graph.nodes}
    targets = {saved.name: saved.target for saved in partition.saved}  # the others are cotangents
    if any(name not in named or str(named[name].target) != targets.get(name, name) for name in taken):
        return None
    given = [named[name] for name in taken]
    wanted = _gradients(joint, number)
    inside = needed_between(given, wanted)
    if any(node.op == "placeholder" or (has_effect(node) and not is_backward(node)) for node in inside):
        return None  # it reads what was not saved, or would draw numbers anew
    effects = [n for n in graph.nodes if is_backward(n) and n.meta["region"] == number and has_effect(n)]
    return finished_backward(extract(joint.gm, given, wanted, f"backward_{number}", also=effects))


def _gradients(joint: JointValues, number: int) -> list[fx.Node]:
    """Those that region `number` makes, in the joint graph."""
    roles = zip(output_values(joint.gm.graph), joint.signature.outputs, strict=True)
    return [node for node, role in roles if isinstance(role, Gradient) and role.region == number]


class RepeatableCall(NamedTuple):
    """What is needed to run a call again.

    Attributes:
        sources: the flat inputs.
        primals: the primals made of them.
        versions: of each primal; None of what tracks none, and of what may have changed.
        generators: states of the random number generators before the call.
        changed: numbers of the primals that the call changes; `primals` has copies, as they were, unless it
            does not matter what is in them.
    """

    sources: Sequence[Any]
    primals: Sequence[Any]
    versions: Sequence[int | None]
    generators: Mapping[torch.device, Any]
    changed: Sequence[Any] = ()


def rerun_region(
    joint: JointValues,
    number: int,
    call: RepeatableCall | None,
    cotangents: Mapping[int, Any],
    wanted: Collection[Destination] | None = None,
) -> dict[Destination, Any]:
    """Gradients of region `number`, for all its destinations or those `wanted`. These are given where a
    backward may not enter a reentrant checkpoint, which raises then if it is on the way to one of them.

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
    at = {n: version for n, version in enumerate(call.versions) if version is not None}
    changed = {n: version for n, version in at.items() if call.primals[n]._version != version}
    read = primals_read(joint, _gradients(joint, number)) if changed else set()
    for n in filter(read.__contains__, changed):
        raise RuntimeError(modified_error(call.primals[n], changed[n]))
    differentiable = torch.is_grad_enabled()
    inlined = not joint.reenters or (wanted is None and not differentiable)
    second = partial(_second_run, joint, number, call, differentiable, inlined)
    walk, outputs = second(is_view_cast_once=False)
    if walk is None and not differentiable and any(call.primals[n]._is_view() for n in _leaves(joint)):
        walk, outputs = second(is_view_cast_once=True)
    if walk is not None and wanted is not None:
        refuse_reentry(walk.graph.nodes[index].handle for index in walk.leading_to(wanted))

    def run(walk: Walk) -> dict[Destination, Any]:
        with torch.set_grad_enabled(differentiable):
            return walk.run(cotangents, wanted)

    found = {} if walk is None else outside_of_graph_task(partial(run, walk), differentiable)
    del outputs
    destinations = joint.signature.regions[number].destinations
    if not inlined and walk is not None:  # no gradient of what a checkpoint reads besides its arguments
        found = dict.fromkeys(destinations) | found
    return _as_divided(found, destinations, joint.state.name)


def _leaves(joint: JointValues) -> list[int]:
    """The numbers of the primals that are leaves of the autograd graph."""
    return [n for n, primal in enumerate(joint.primals) if primal.differentiable and primal.is_leaf]


def _second_run(
    joint: JointValues,
    number: int,
    call: RepeatableCall,
    differentiable: bool,
    inlined: bool,
    *,
    is_view_cast_once: bool,
) -> tuple[Walk | None, list[Any]]:
    """The backward of region `number` of the call, made again; None if its regions begin elsewhere than those
    of the trace. And the outputs, which own its autograd nodes.

    Autocast casts a leaf that is a view for each use; the trace has such a leaf cast once. Reentrant
    checkpoints are part of the graph if they are `inlined`.
    """
    primals = dict(enumerate(call.primals))
    with torch.enable_grad():
        given = {n: primal.clone() if n in call.changed else primal for n, primal in primals.items()}
        entries = {n: primal[...] for n, primal in primals.items() if joint.primals[n].differentiable}
        for n in _leaves(joint):  # autocast casts a leaf once for all its uses
            if differentiable:
                entries[n] = entries[n] if n in call.changed else primals[n]
            elif is_view_cast_once or not primals[n]._is_view():
                entries[n] = given[n].detach().requires_grad_()
        for n, entry in entries.items():
            entry._is_param = isinstance(primals[n], nn.Parameter)  # modules ask, and wrap what is none
        given = {n: one for n, one in given.items() if n in call.changed} | entries
        given |= {n: entries[n].clone() for n in call.changed if n in entries and entries[n].grad_fn}
        outputs = _again(joint, call, given, inlined)
        visible = _values(joint, outputs, given)
    ends = {edge_of(entry)[0]: number for number, entry in entries.items()}
    graph = graph_below(visible, ends, idle_nodes(visible, ends))
    known = {i: ends[node.handle] for i, node in enumerate(graph.nodes) if node.handle in ends}
    # At capture these ends were nodes that accumulate, and the graph must be divided in the same way now.
    nodes = [replace(n, sequence=ACCUMULATES) if i in known else n for i, n in enumerate(graph.nodes)]
    graph = replace(graph, nodes=tuple(nodes))
    structure = divide(graph, known, joint.is_single_region, joint.hooked_leaves, joint.sums_apart)
    if [one.roots for one in structure.regions] != [one.roots for one in joint.signature.regions]:
        return None, outputs
    checks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return Walk(graph, structure, known, number, lambda _: nullcontext(), checks), outputs


def _as_divided(
    found: Mapping[Destination, Any], destinations: Sequence[Destination], name: str
) -> dict[Destination, Any]:
    """The gradients for the destinations that were captured. Where a run has other contributions than the
    trace, as of casts that autocast does not share, they are added up here.

    Raises:
        CaptureError: the run has none for what the trace had some for.
    """
    if found.keys() == set(destinations):
        return dict(found)
    missing = {replace(one, number=0) for one in destinations} - {replace(one, number=0) for one in found}
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


def _again(joint: JointValues, call: RepeatableCall, given: Mapping[int, Any], inlined: bool) -> list[Any]:
    """The flat outputs of the function, run with the primals in `given`, which stand for what it finds by
    itself too."""
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
    with (
        joint.state.thread_modes.restored(),
        with_generator_states(dict(call.generators)),
        FreeTensors(lambda tensor: found.get(id(tensor), tensor)),
        checkpoints_inlined() if inlined else nullcontext(),
    ):
        return pytree.tree_leaves(joint.state.call(leaves))


def _moved(view: torch.Tensor, base: Any, to: torch.Tensor) -> torch.Tensor:
    """What `view` is of `base`, of another base that is laid out alike."""
    offset = view.storage_offset() - base.storage_offset() + to.storage_offset()
    return to if view is base else to.as_strided(view.shape, view.stride(), offset)


def _values(joint: JointValues, outputs: Sequence[Any], given: Mapping[int, Any]) -> list[tuple[Any, int]]:
    """The edges of the visible boundaries, in their order: of `outputs`, and of what was changed in place."""
    tensors = {u.value: given[u.primal] for u in joint.updates if u.value is not None and u.primal in given}
    for plan, output in zip(joint.outputs, outputs, strict=True):
        if isinstance(plan, ComputedOutput):
            tensors[plan.value] = output
        elif isinstance(plan, AliasOf):
            if plan.value is not None:
                known = tensors.get(plan.value)
                if known is None or not known.requires_grad:  # a view without history has no base with one
                    tensors[plan.value] = output if output._base is None else output._base
            if plan.made is not None:
                tensors[plan.made] = output
    edges = [edge_of(tensors[j.value]) for j in joint.signature.boundaries if j.is_visible]
    return [edge for edge in edges if edge[0] is not None]
