"""Capture a graph from Dynamo that repeats a block of calls, as the layers of a deep model do.

In: a `CaptureState` that calls a `GraphCall`. Out: the `JointGraph` that tracing every call would give. We
trace one copy of each kind of block; the others are instances of it (`trace.blocks`).

A block qualifies if it has only tensor inputs and outputs, mutates nothing, returns no view, and has at most
one differentiable output, so that the engine runs its autograd nodes consecutively. Its backward returns each
contribution to a gradient separately, in eager's order.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd.aot.extraction import extract
from retrograd.aot.joint_capture import JointGraph, capture_divided
from retrograd.aot.modules import ModuleState
from retrograd.aot.state import state_of_flat
from retrograd.aot.trace.structure import Structure
from retrograd.errors import CaptureError, Refusal
from retrograd.graph.fx import add_copy, has_effect, is_higher_order, is_random, operands_of
from retrograd.graph.joint import Gradient, PrimalKind, output_values
from retrograd.graph.joint_graph import CaptureOptions, CaptureState, ComputedOutput
from retrograd.graph.structure import token_of
from retrograd.repeats.borders import border_costs
from retrograd.repeats.divide import find_repeats
from retrograd.repeats.outline import Outline, TokenisedCall
from retrograd.runtime.modes import ThreadModes
from retrograd.runtime.tensor import is_dense
from retrograd.trace import (
    CALL_OF_BLOCK,
    BlockCopy,
    BlockInput,
    Form,
    OtherCotangent,
    TracedBlock,
    form_of,
    refuse_block,
    run_graph,
    switched,
    switches_more,
)

#: the fewest calls of a block, and the fewest copies of it.
_LEAST, _COPIES = 6, 3
#: how often we trace the graph because a cotangent of a block has other strides than expected.
_ATTEMPTS = 4


@dataclass(frozen=True, eq=False)
class GraphCall:
    """The call of a state that was made for a graph from Dynamo.

    Attributes:
        gm: the graph.
        module: the tensors that the graph holds; they come first among the input values.
        graph: if given, runs in place of the graph of `gm`: repeated blocks are single calls in it.
    """

    gm: fx.GraphModule
    module: ModuleState
    graph: fx.Graph | None = None

    def __call__(self, values: Sequence[Any]) -> Any:
        """Run the graph."""
        count = len(self.module.tensors)
        # If the graph leaves grad mode changed, each compiled call changes it afterwards; a capture must not.
        with self.module.replaced(values[:count]), torch.set_grad_enabled(torch.is_grad_enabled()):
            return run_graph(self.gm, values[count:], self.graph)


def capture_graph(state: CaptureState, manner: CaptureOptions) -> tuple[JointGraph, Structure]:
    """`capture_divided` for a state that calls a `GraphCall`."""
    call: GraphCall = state.call  # type: ignore[assignment]
    kinds = _traced_kinds(state, call.gm) if _may_repeat(state, manner) else []
    if kinds:
        folded = replace(state, call=replace(call, graph=_folded(call.gm.graph, kinds)))
        for _ in range(_ATTEMPTS):
            try:
                joint, structure = capture_divided(folded, manner)
                if not manner.separate_sums or len(structure.regions) <= 1:
                    return replace(joint, state=state), structure
                break  # Contributions of several regions interleave, node by node.
            except OtherCotangent as found:
                kind = next(kind for kind in kinds if found.copy in kind.copies)
                kind.expect(found.copy, found.form)
            except CaptureError:
                break
    return capture_divided(state, manner)


def _may_repeat(state: CaptureState, manner: CaptureOptions) -> bool:
    """Whether we may use instances of a block. Releasing inputs and splitting at leaf gradients need eager's
    own autograd nodes, which instances do not have."""
    inner = any(leaf.is_tensor and leaf.requires_grad and not leaf.is_leaf for leaf in state.leaves)
    return not (inner or state.is_symbolic or manner.split_at_leaf_grads)


@dataclass(eq=False)
class _Kind:
    """A set of equal blocks.

    Attributes:
        state: the state of the graph.
        gm: the graph.
        blocks: the blocks, in order.
        copies: for each block, what the folded graph calls in its place.
    """

    state: CaptureState
    gm: fx.GraphModule
    blocks: list[Outline]
    copies: list[BlockCopy] = field(default_factory=list)

    def expect(self, copy: BlockCopy, form: Form | None) -> None:
        """Expect a cotangent of this form at `copy` and at all earlier copies, whose backward runs later. If
        it is expanded, as the gradient of a sum is, only `copy` gets it, and we trace that copy call by call.
        """
        place = self.copies.index(copy)
        block = None if form is None or form.offset or 0 in form.stride else self.capture(form.stride)
        if block is not None and block.cotangent != form:
            block = None
        for one in self.copies[place if block is None else 0 : place + 1]:
            one.block = block

    def capture(self, strides: Sequence[int] | None = None) -> TracedBlock | None:
        """Capture the first block for a cotangent with these strides. None if the block does not qualify."""
        block, modes = self.blocks[0], list[ThreadModes]()
        module = _module_of(block, self.gm)
        for number, node in enumerate(node for node in module.graph.nodes if not _is_given(node)):
            node.meta[CALL_OF_BLOCK] = number

        def call(values: Sequence[Any]) -> Any:
            modes.append(ThreadModes.now())
            return run_graph(module, values)

        fakes = [*map(_example, block.inputs)]
        state = state_of_flat(
            call,
            fakes,
            name="a repeated block of calls",
            names=[node.name for node in block.inputs],
            kinds=[PrimalKind.ARGUMENT] * len(fakes),
            decompositions=self.state.decompositions,
            fake_mode=self.state.fake_mode,
        )
        leaves = [
            replace(leaf, requires_grad=one.requires_grad, is_leaf=_is_given(node) or not one.requires_grad)
            for leaf, node, one in zip(state.leaves, block.inputs, fakes, strict=True)
        ]
        state = replace(state, leaves=tuple(leaves), thread_modes=self.state.thread_modes)
        manner = CaptureOptions(separate_sums=True, layouts={} if strides is None else {0: strides})
        try:
            return _traced(*capture_divided(state, manner), modes[-1])
        except (CaptureError, Refusal):
            return None


def _traced(joint: JointGraph, structure: Structure, modes: ThreadModes) -> TracedBlock:
    """The captured block as a template for instances.

    Raises:
        Refusal: the block does not qualify.
    """
    graph, given = joint.gm.graph, output_values(joint.gm.graph)
    values = [plan.value for plan in joint.outputs if isinstance(plan, ComputedOutput)]
    boundaries = [joint.values[value].boundary for value in values]
    differentiable = [place for place, boundary in enumerate(boundaries) if boundary is not None]
    if (
        not len(set(values)) == len(joint.outputs) == len(joint.values)
        or not len(structure.regions) == len(differentiable) <= 1
        or any(value.version for value in joint.values)
        or any((joint.updates, joint.found))
        or joint.offsets_matter
        or joint.reenters
        or any(has_effect(node) and not is_random(node) for node in graph.nodes if node.op != "output")
    ):
        raise Refusal("unnotable", "it does more than to compute")
    sends = structure.regions[0].sends if differentiable else {}
    if len(set(sends.values())) < len(sends):
        raise Refusal("unnotable", "it adds contributions up")
    steps = defaultdict[int, list[int]](list)
    for number, (node, _) in enumerate(sends):
        steps[node].append(number)
    outputs = zip(joint.signature.outputs, given, strict=True)
    found = {one.of: node for one, node in outputs if isinstance(one, Gradient)}
    refuse_block(graph)
    return TracedBlock(
        graph=graph,
        inputs=tuple(
            [BlockInput(form_of(one.fake), one.differentiable, one.is_leaf) for one in joint.primals]
        ),
        modes=modes,
        outputs=tuple([given[value] for value in values]),
        differentiable=next(iter(differentiable), None),
        gradients=tuple([found.get(there) for there in sends.values()]),
        contributed=tuple([there.index for there in sends.values()]),
        steps=tuple(map(tuple, steps.values())),
        region=next(iter(joint.signature.regions), None),
    )


# repeated blocks of a graph


def _traced_kinds(state: CaptureState, gm: fx.GraphModule) -> list[_Kind]:
    """The kinds of blocks that repeat and could be captured."""
    groups = defaultdict[Hashable, list[Outline]](list)
    for block in _blocks(gm.graph):
        if _qualifies(block, state.thread_modes):
            groups[block.key].append(block)
    kinds = []
    for blocks in groups.values():
        kind = _Kind(state, gm, blocks)
        if len(blocks) < _COPIES or (traced := kind.capture()) is None:
            continue
        kind.copies = [BlockCopy(traced, one.calls, partial(_otherwise, one, gm)) for one in blocks]
        kinds.append(kind)
    return kinds


def _module_of(block: Outline, gm: fx.GraphModule) -> fx.GraphModule:
    return extract(gm, block.inputs, block.outputs, "block", also=block.calls)


def _otherwise(block: Outline, gm: fx.GraphModule, *args: Any) -> Any:
    return run_graph(_module_of(block, gm), args)


def _blocks(graph: fx.Graph) -> Iterator[Outline]:
    """All repeated blocks of the graph."""
    calls = [node for node in graph.nodes if not _is_given(node)]
    if len(calls) < _LEAST * _COPIES or any(map(switches_more, calls)):
        return
    # A block must not begin or end where grad mode or autocast differ from the beginning of the graph.
    costs = border_costs(
        calls, lambda node: _cost(_example(node)), closed=[(i, i + 1) for i in switched(calls)]
    )
    known = {node: TokenisedCall(_token(node), operands_of(node)) for node in calls}
    results = dict.fromkeys(graph.output_node().all_input_nodes, True)
    for repeat in find_repeats([known[node].token for node in calls], costs, _LEAST, _COPIES):
        for start in repeat.cuts()[:-1]:
            yield Outline(calls[start : start + repeat.length], known, results, _value_key)


#: metadata by which otherwise equal calls differ.
_NOTES = frozenset({"custom", "recompute", "ac_graph_id"})


def _cost(value: Any) -> float | None:
    """The cost of passing this value between blocks. Views are expensive because they prevent reuse."""
    return (100.0 if value._is_view() else 1.0) if isinstance(value, torch.Tensor) else None


def _token(node: fx.Node) -> Hashable:
    if node.op == "call_module" or is_higher_order(node.target) or not _NOTES.isdisjoint(node.meta):
        return node
    return node.op, token_of(node), _value_key(node)


def _value_key(node: fx.Node) -> Hashable:
    return _is_given(node), _fingerprint(_example(node))


def _fingerprint(value: Any) -> Hashable:
    """A key that is equal for equal kinds of values. A tensor without a known form equals only itself."""
    if isinstance(value, (tuple, list)):
        return ("items", *map(_fingerprint, value))
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    form = form_of(value)
    return (form, value.requires_grad) if form else ("unlike", id(value))


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_given(node: fx.Node) -> bool:
    return not node.op.startswith("call_")


def _qualifies(block: Outline, modes: ThreadModes) -> bool:
    given, made = ([*map(_example, nodes)] for nodes in (block.inputs, block.outputs))
    if not given or not all(map(form_of, (*given, *made))):
        return False
    if any(value._is_view() or not is_dense(value) for value in made):
        return False
    # Autocast caches the cast of a parameter, so calls outside of the block may reuse it.
    kept = [node for node in block.inputs if _is_given(node) and _example(node).requires_grad]
    shares = modes.autocast and not all(set(block.calls).issuperset(node.users) for node in kept)
    return not shares and sum(value.requires_grad for value in made) <= 1


def _folded(graph: fx.Graph, kinds: Sequence[_Kind]) -> fx.Graph:
    """The graph with one call of a copy in place of each block."""
    pairs = [pair for kind in kinds for pair in zip(kind.blocks, kind.copies, strict=True)]
    ends = {block.calls[-1]: (block, copy) for block, copy in pairs}
    inside = {node for block, _ in pairs for node in block.calls}
    folded, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in inside:
            made[node] = add_copy(folded, node, made.__getitem__)
        if node in ends:
            block, copy = ends[node]
            args = tuple([made[read] for read in block.inputs])
            called = folded.create_node("call_function", copy, args, name="block")
            for number, output in enumerate(block.outputs):
                made[output] = folded.call_function(operator.getitem, (called, number))
    return folded
