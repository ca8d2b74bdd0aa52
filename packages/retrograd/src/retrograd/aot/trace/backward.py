"""Run eager's autograd graph by hand: region by region, in eager's order.

`RegionInterpreter`. In: the autograd graph, its division into regions, and cotangents for one region's roots.
Out: gradients for the region's destinations, summed in the engine's order.

`differentiate`, inside a trace. In: the values that the traced function computed, with their ``grad_fn``.
Out: a `Differentiated`: the regions, their cotangents as new graph inputs, and the gradients they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd.aot.droppable import Droppable, releasable
from retrograd.aot.trace.analyse import Analysis, TracedValue, stand_in
from retrograd.aot.trace.enter import Inputs, new_input
from retrograd.aot.trace.structure import RegionNodes, Structure, divide
from retrograd.engine import (
    accumulating_only_into,
    call_node,
    edge_of,
    fitted,
    graph_below,
    idle_nodes,
    kept_by,
    leaf_of,
    materializes_grads,
    refuse_nan,
    results_by_value,
    saves_tensors,
    why_backward_has_effects,
)
from retrograd.errors import Refusal, not_representable
from retrograd.graph.aliases import bases_of
from retrograd.graph.eager_order import Edge, LiveGraph, LiveNode
from retrograd.graph.fx import KEPT_FOR
from retrograd.graph.joint import Destination, Gradient, Region, cotangent_name
from retrograd.graph.joint_graph import CaptureOptions
from retrograd.graph.reach import reached
from retrograd.runtime.modes import ThreadModes
from retrograd.runtime.subclass import SubclassSpec, is_wrapper, layout_of, parts_of
from retrograd.runtime.tensor import inner_tensors
from retrograd.trace import (
    JointTracer,
    errors_uncaught,
    instance_of,
    is_traced,
    plain,
)


@dataclass
class RegionInterpreter:
    """Runs the autograd nodes of one region.

    Attributes:
        graph, structure: the autograd graph and its division.
        primals: the primal of each node that accumulates a gradient.
        number: the number of the region.
        around: makes a context in which a node is called.
        checks: whether to refuse NaN gradients, as anomaly mode does.
        by_dtype: the destinations whose dtype affects their gradient, because we cast a gradient to it or sum
            several in it.
    """

    graph: LiveGraph
    structure: Structure
    primals: Mapping[int, int]
    number: int
    around: Callable[[LiveNode], AbstractContextManager[Any]]
    checks: bool = False
    by_dtype: set[Destination] = field(default_factory=set)
    _grads: dict[int, list[Any]] = field(default_factory=dict)
    _found: dict[Destination, Any] = field(default_factory=dict)

    def run(
        self, cotangents: Mapping[int | Edge, Any], wanted: Collection[Destination] | None = None
    ) -> dict[Destination, Any]:
        """Compute the gradients of the region's destinations; None is an undefined gradient.

        Like the engine, we call a node even if everything that reaches it is undefined: a Function then gets
        zeros and may compute gradients from them.

        Args:
            cotangents: by boundary or by edge inside the region. None at some roots: this backward does not
                start there, and we skip them. None at all roots: undefined cotangents arrived at all of them.
            wanted: if given, call only nodes that lead to one of these destinations.

        Raises:
            Refusal: a node returns a gradient that the engine would refuse.
            Exception: a node raised it.
        """
        region = self.structure.regions[self.number]
        self._found = dict.fromkeys(region.destinations)
        self._sends = region.sends
        given = [root for root in region.roots if cotangents[root] is not None]
        inside = [(edge, grad) for edge, grad in cotangents.items() if isinstance(edge, Edge)]
        for edge, grad in inside:
            self._add_inside(edge, grad)
        for root in given or (() if inside else region.roots):
            self._add_inside(self.structure.boundaries[root], cotangents[root])
        for node in region.nodes if wanted is None else self.leading_to(wanted):
            self._call(node)
        return self._found

    def leading_to(self, wanted: Collection[Destination]) -> list[int]:
        """The region's nodes that lead to a wanted destination, in order. Separately numbered contributions
        to one gradient count as one destination."""
        region, leading = self.structure.regions[self.number], set[int]()
        asked = {replace(there, number=0) for there in wanted}
        for index in reversed(region.nodes):
            for place, edge in enumerate(self.graph.nodes[index].edges):
                there = region.sends.get((index, place))
                if replace(there, number=0) in asked if there else edge and edge.node in leading:
                    leading.add(index)
        return [index for index in region.nodes if index in leading]

    def _call(self, index: int) -> None:
        node = self.graph.nodes[index]
        grads = self._grads.pop(index, None)
        if grads is None:
            return
        with self.around(node):
            results = results_by_value(node.handle, grads) or call_node(node.handle, grads)
            if self.checks:
                refuse_nan(node.name, results)
            for place, (edge, grad) in enumerate(zip(node.edges, results, strict=True)):
                if edge is not None:
                    there, dtype = self._sends.get((index, place)), getattr(grad, "dtype", None)
                    if grad is not None:
                        grad = fitted(self.graph.nodes[edge.node].handle, edge.slot, grad)
                    if there is not None and grad is not None and grad.dtype is not dtype:
                        self.by_dtype.add(there)
                    self._send(there, edge, grad)

    def _send(self, there: Destination | None, edge: Edge, grad: Any) -> None:
        if there is None:
            self._add_inside(edge, grad)
        else:
            known = self._found[there]
            if known is not None and grad is not None:
                self.by_dtype.add(there)
            self._found[there] = added(known, grad)

    def _add_inside(self, edge: Edge, grad: Any) -> None:
        count = len(self.graph.nodes[edge.node].handle._input_metadata)
        slots = self._grads.setdefault(edge.node, [None] * count)
        slots[edge.slot] = added(slots[edge.slot], grad)


def added(known: Any, more: Any) -> Any:
    """The sum of two gradients; None is an undefined gradient."""
    if known is None or more is None:
        return more if known is None else known
    return known + more


@dataclass
class Differentiated:
    """The backward of a joint graph.

    Attributes:
        structure: the boundaries, the nodes of the regions, and their order.
        boundary_values: the number of each boundary's value; visible boundaries come first.
        visible: how many boundaries are visible.
        stand_ins: the values of the hidden boundaries.
        cotangents: the boundary and subclass layout of each cotangent, in the order of the placeholders.
        regions: the regions, in the order of `structure`.
        grads: by region, the functional gradient of each destination, or None.
        by_dtype: as in `JointGraph`.
        releasable: the primals that a call may release before its backward.
    """

    structure: Structure = field(default_factory=lambda: Structure((), (), ()))
    boundary_values: tuple[int, ...] = ()
    visible: int = 0
    stand_ins: list[TracedValue] = field(default_factory=list)
    cotangents: list[tuple[int, SubclassSpec]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    grads: list[dict[Destination, Any]] = field(default_factory=list)
    by_dtype: set[int] = field(default_factory=set)
    releasable: Droppable | None = None

    def boundary_of(self, value: int) -> int | None:
        """The boundary of a forward value, or None."""
        return self.boundary_values.index(value) if value in self.boundary_values else None

    def leaves_gaps(self) -> bool:
        """Whether a hidden boundary gets no gradient. The next region would have to take zeros for it."""
        return any(
            grad is None and there.is_boundary and there.index >= self.visible
            for grads in self.grads
            for there, grad in grads.items()
        )

    def _defined(self) -> Iterator[tuple[int, Destination, Any]]:
        for number, grads in enumerate(self.grads):
            for destination, grad in grads.items():
                if grad is not None:
                    yield number, destination, plain(grad)

    def parts(self) -> list[Any]:
        """The gradients as plain tensors, with subclasses unwrapped."""
        return [part for _, _, grad in self._defined() for part in parts_of(grad, layout_of(grad))]

    def roles(self) -> list[Gradient]:
        """The role of each tensor in `parts`."""
        return [
            Gradient(region, destination, part)
            for region, destination, grad in self._defined()
            for part in range(layout_of(grad).count)
        ]

    def wrappings(self) -> dict[tuple[int, Destination], SubclassSpec]:
        """The subclass layout of each gradient."""
        return {(region, there): layout_of(grad) for region, there, grad in self._defined()}


def differentiate(
    tracer: JointTracer, inputs: Inputs, analysis: Analysis, options: CaptureOptions
) -> Differentiated:
    """Trace the backward of all differentiable values into the graph of `tracer`.

    Raises:
        Refusal: an autograd node returns a gradient that the engine would refuse, or has a side effect.
    """
    edges = {
        number: edge for number, value in enumerate(analysis.values) if (edge := _edge(value)) is not None
    }
    if not edges:
        return Differentiated()
    if len(set(edges.values())) < len(edges):
        raise not_representable("two of its outputs have one and the same place in the autograd graph")
    graph = graph_below(edges.values(), left_out=idle_nodes(edges.values()))
    _refuse_effects(graph)
    primals = _accumulated(graph, inputs)
    blocks = {i: found.block for i, node in enumerate(graph.nodes) if (found := instance_of(node.handle))}
    steps = {i: block.steps for i, block in blocks.items()}
    leaves = [number for number, primal in enumerate(inputs.primals) if primal.is_leaf]
    structure = divide(graph, primals, options, leaves, steps)
    if any(region.nodes and not region.destinations for region in structure.regions):
        raise not_representable("a result requires grad, and its gradient goes nowhere")
    if options.separate_sums:
        _refuse_bypasses(structure, [analysis.values[number] for number in edges])
    stand_ins = [
        TracedValue(stand_in(graph.nodes[edge.node].handle._input_metadata[edge.slot]), is_visible=False)
        for edge in structure.boundaries[len(edges) :]
    ]
    count = len(analysis.values)
    values = (*edges, *range(count, count + len(stand_ins)))
    made = Differentiated(structure, values, len(edges), stand_ins)
    nodes = [region.nodes for region in structure.regions]
    made.releasable = releasable(tracer, graph, nodes, inputs, analysis.updates)
    traced = [*analysis.values, *stand_ins]

    def noting(node: LiveNode) -> AbstractContextManager[None]:
        return tracer.noting(seq_nr=node.sequence, autograd_node=node.name)

    called = inputs.state.thread_modes
    modes = ThreadModes(False, options.autocast, dtype=called.dtype, device=called.device)
    recomputed = {node.meta.get("seq_nr") for node in tracer.graph.nodes if "ac_graph_id" in node.meta}
    for number, region in enumerate(structure.regions):
        with modes.restored(), tracer.noting(is_backward=True, region=number):
            roots = {root: traced[values[root]] for root in region.roots}
            made.regions.append(_described(region, graph, blocks))
            _mark_kept(tracer, [graph.nodes[node] for node in region.nodes], number, recomputed)
            walk = RegionInterpreter(graph, structure, primals, number, noting)
            with accumulating_only_into(is_traced), errors_uncaught():
                made.grads.append(walk.run(_cotangents(tracer, roots, options.layouts, made.cotangents)))
            given = {there.index for there in walk.by_dtype if not there.is_boundary}
            made.by_dtype |= {primal for primal in given if inputs.primals[primal].is_leaf}
            for there, grad in made.grads[-1].items():  # The next region gets a cotangent with these strides.
                if (
                    there.is_boundary
                    and there.index >= len(edges)
                    and _is_like(grad, traced[values[there.index]])
                ):
                    traced[values[there.index]] = TracedValue(grad, is_visible=False)
    if any(leaf.grad is not None for leaf in inputs.leaves.values()):
        raise Refusal("backward-effect", "its backward accumulates into the .grad of an input")
    return made


def _described(region: RegionNodes, graph: LiveGraph, blocks: Mapping[int, Any]) -> Region:
    """The region with its nodes' properties. Nodes in `blocks` stand for a repeated block, traced once."""
    inside = [blocks[node].region for node in region.nodes if node in blocks]
    handles = [graph.nodes[node].handle for node in region.nodes if node not in blocks]
    functions = [one for one in handles if hasattr(one, "apply")]
    return Region(
        region.roots,
        region.destinations,
        bool(functions) or any(block.has_functions for block in inside),
        region.is_merged
        or not all(map(materializes_grads, functions))
        or any(block.undefined_matters for block in inside),
        any(block.saves for block in inside) or any(map(saves_tensors, handles)),
    )


def _refuse_bypasses(structure: Structure, visible: Sequence[TracedValue]) -> None:
    """Refuse a returned view of an input if eager sums its gradient with others at a view in between. A call
    makes the view directly from the input, so the sum would happen at the input instead, where more gradients
    may arrive: the function's or, if the caller uses the input too, others.

    Raises:
        Refusal: the sum could differ from eager's in the last bit.
    """
    for region in structure.regions:
        is_view = any(visible[root].view is not None for root in region.roots if root < len(visible))
        if is_view and any(to.is_boundary and to.index >= len(visible) for to in region.destinations):
            raise not_representable("it returns a view of a view of an input, and uses that view")


def _refuse_effects(graph: LiveGraph) -> None:
    for node in graph.nodes:
        function = None if instance_of(node.handle) else getattr(node.handle, "_forward_cls", None)
        if function is not None and (reason := why_backward_has_effects(function)) is not None:
            raise Refusal("backward-effect", f"{function.__qualname__}: {reason}")


def _mark_kept(
    tracer: JointTracer, nodes: Sequence[LiveNode], region: int, recomputed: Collection[int | None]
) -> None:
    """Mark every tensor that a region's nodes saved, even unread ones: eager raises if any was modified. We
    skip nodes with a sequence number in `recomputed`: they are inside a checkpoint, which saves nothing."""
    made: list[fx.Node | None] = []
    for one in nodes:
        if (block := instance_of(one.handle)) is not None:
            made += [node for inner, node in block.nodes.items() if KEPT_FOR in inner.meta]
        elif one.sequence not in recomputed:
            tensors = (inner for kept in kept_by(one.handle) for inner in inner_tensors(plain(kept)))
            made += map(tracer.node_of, tensors)
    for node in reached(filter(None, made), bases_of):
        if not bases_of(node) and region not in node.meta.get(KEPT_FOR, ()):
            node.meta[KEPT_FOR] = (*node.meta.get(KEPT_FOR, ()), region)


def _edge(value: TracedValue) -> tuple[Any, int] | None:
    if not isinstance(value.value, torch.Tensor) or not value.is_seen or value.is_new_leaf:
        return None
    edge = edge_of(value.value if value.view is None else value.view)
    return None if edge[0] is None else edge


def _accumulated(graph: LiveGraph, inputs: Inputs) -> dict[int, int]:
    """For each node that accumulates a gradient, the primal that receives it."""
    numbers = {id(leaf): number for number, leaf in inputs.leaves.items()}
    found = {}
    for index, node in enumerate(graph.nodes):
        if (leaf := leaf_of(node.handle)) is not None:
            if id(leaf) not in numbers:
                raise not_representable("it makes a leaf that requires grad and computes with it")
            found[index] = numbers[id(leaf)]
    return found


def _is_like(grad: Any, stand_in: TracedValue) -> bool:
    """Whether a gradient has the shape and dtype of its boundary's stand-in. Adds no guard."""
    if grad is None or is_wrapper(grad) or grad.dtype is not stand_in.value.dtype:
        return False
    return [*map(str, grad.shape)] == [*map(str, stand_in.value.shape)]


def _cotangents(
    tracer: JointTracer,
    roots: Mapping[int, TracedValue],
    layouts: Mapping[int, Sequence[int]],
    made: list[tuple[int, SubclassSpec]],
) -> dict[int | Edge, Any]:
    """Make a new cotangent input of the graph for each root."""
    found: dict[int | Edge, Any] = {}
    for root, value in roots.items():
        bare = plain(value.value)
        wrapping: SubclassSpec = layout_of(bare)
        made.append((root, wrapping))
        likes = [_cotangent_like(part, layouts.get(root)) for part in parts_of(bare, wrapping)]
        found[root] = new_input(tracer, wrapping, likes, partial(cotangent_name, root))
    return found


def _cotangent_like(value: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """A fake cotangent for `value`. If `strides` is None, it has the strides of `value` if that is dense, and
    is contiguous otherwise."""
    with torch.no_grad():
        if strides is not None:
            return plain(value.detach().new_empty_strided(value.shape, strides))
        return torch.empty_like(value.detach(), memory_format=torch.preserve_format)
