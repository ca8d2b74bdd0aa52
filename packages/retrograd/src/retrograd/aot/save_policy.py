"""Choose which forward values are saved for the backward.

In: a joint graph, its alias analysis, and a policy: torch's minimum cut, save everything, recompute
everything, or the user's own partitioner. Out: the set of forward nodes that the backward may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.aot.extraction import (
    Memory,
    copied_call,
    is_backward,
    is_number,
    is_recomputed,
    read_by_backward,
)
from retrograd.backends.inductor import cut_by, memory_budget
from retrograd.config import Policy
from retrograd.errors import VerificationError
from retrograd.graph.fx import draws_random_numbers, has_effect, reads_memory
from retrograd.graph.joint import cotangents_reaching
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.reach import reached
from retrograd.trace import bytes_of


def choose_saved(joint: JointValues, memory: Memory, policy: Policy) -> set[fx.Node]:
    """The nodes to save. A node that `memory` forbids to save must be saved as a copy.

    Raises:
        VerificationError: the user's partitioner saves something that the forward does not compute.
    """
    if policy == "save_all":
        return _without(set(filter(is_recomputed, joint.gm.graph.nodes)) - memory.exits, _read(joint))
    if policy == "recompute_all":
        must = CheckpointPolicy.MUST_SAVE
        kept = {node for node in joint.gm.graph.nodes if node.meta.get("recompute") is must}
        return kept | {node for node in memory.primals if not is_number(node)}
    if policy == "min_cut" and (read := _read(joint)) <= set(memory.primals):
        return read
    if policy == "min_cut":
        is_short = memory_budget(joint.gm) < 1
        with _copies_offered(joint, memory, of_all=is_short) as copied:
            saved = {copied.get(node, node) for node in _cut(joint, Memory(joint.gm, joint.signature))}
        lawful = is_short or not any(memory.is_forbidden(node) for node in saved - {*copied.values()})
    else:
        assert callable(policy)
        saved = _cut(joint, memory, policy)
        lawful = not any(map(memory.is_forbidden, saved))
    if lawful:
        return saved | _read_by_strides(joint, memory)
    return _without(memory.checkpointed - memory.exits, _read(joint))


def _read_by_strides(joint: JointValues, memory: Memory) -> set[fx.Node]:
    """The forward calls that read memory by strides and must not be recomputed, because a saved input may get
    other strides: a backend chooses those of a computed value, and we save only a copy of a forbidden primal.
    """
    readers = list(filter(reads_memory, joint.gm.graph.nodes))
    reaching = cotangents_reaching(joint.gm.graph, joint.signature) if readers else {}
    kept = {node for node in memory.primals if not memory.is_forbidden(node)}
    return {node for node in readers if not reaching[node] and not kept.issuperset(node.all_input_nodes)}


def _cut(joint: JointValues, memory: Memory, partitioner: Callable[..., Any] | None = None) -> set[fx.Node]:
    """The nodes that `partitioner` saves; None is torch's minimum cut."""
    inputs, count = joint.gm.graph.find_nodes(op="placeholder"), joint.signature.forward_count
    cotangents = frozenset(node.name for node in inputs if node not in memory.primals)
    return named(joint, cut_by(partitioner, joint.gm, cotangents, count, _pinned(joint, memory)))


@contextmanager
def _copies_offered(joint: JointValues, memory: Memory, of_all: bool) -> Iterator[dict[fx.Node, fx.Node]]:
    """Let a cut save copies of values that must not be saved themselves. We offer a copy if a call turns the
    value into one of at least twice the size or, under a memory budget (`of_all`), always.

    The loss of a language model casts half-precision logits to float32. Eager does not save the logits, but
    a copy of them takes half the memory of what eager saves instead. A normalisation adds a bias, which eager
    does not save either. A copy of the bias is small, and without one the normalisation's result could not be
    recomputed.

    Yields:
        The value of each copy. The copies are in the graph until the context ends.
    """
    graph, copied = joint.gm.graph, dict[fx.Node, fx.Node]()
    first: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_backward(node) or has_effect(node) or reads_memory(node):
            continue
        if node in memory.checkpointed:  # reads the value itself, as in eager
            continue
        for value in node.all_input_nodes:
            is_tensor = isinstance(value.meta.get("val"), torch.Tensor)
            if is_tensor and memory.is_overwritable(value) and (of_all or _makes_more(node, value)):
                if value not in first:
                    first[value] = copy = copied_call(value, node)
                    copied[copy] = value
                node.replace_input_with(value, first[value])
    try:
        yield copied
    finally:
        for copy, value in copied.items():
            copy.replace_all_uses_with(value)
            graph.erase_node(copy)


def _makes_more(call: fx.Node, value: fx.Node) -> bool:
    """Whether the result of a call takes at least twice the memory of its input `value`."""
    made = call.meta["val"]
    return isinstance(made, torch.Tensor) and bytes_of(made) >= 2 * bytes_of(value.meta["val"])


def _read(joint: JointValues) -> set[fx.Node]:
    """The forward values that the backward reads, which is what eager would save."""
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    return {value for value in read_by_backward(joint.gm) if not reaching[value]}


def _without(recomputed: set[fx.Node], saved: set[fx.Node]) -> set[fx.Node]:
    """`saved`, with each value in `recomputed` replaced by the values it is computed from."""
    found = reached(saved, lambda node: node.all_input_nodes if node in recomputed else ())
    return {node for node in found if node not in recomputed}


def _pinned(joint: JointValues, memory: Memory) -> frozenset[str]:
    """The calls that the backward must not recompute: those that read memory which eager would not save,
    unless eager recomputes them too, and those that draw random numbers, unless the user asks for it."""
    return frozenset(
        node.name
        for node in joint.gm.graph.nodes
        if node.op == "call_function"
        and not is_backward(node)
        and (
            (draws_random_numbers(node) and not is_recomputed(node))
            or node in memory.exits
            or (node not in memory.checkpointed and _reads_overwritable(node, memory))
        )
    )


def _reads_overwritable(node: fx.Node, memory: Memory) -> bool:
    """Whether a call reads memory that the user may overwrite, and its result does not share that memory; or
    a value that a checkpoint will compute from such memory again."""
    given = node.all_input_nodes
    reads = not memory.is_overwritable(node) and any(map(memory.is_overwritable, given))
    return reads or not memory.unlike_forward.isdisjoint(given)


def named(joint: JointValues, names: Iterable[str]) -> set[fx.Node]:
    """The nodes with these names.

    Raises:
        VerificationError: a node depends on a cotangent, or does not exist.
    """
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    known = {node.name: node for node in reaching if not reaching[node]}
    for name in names:
        if name not in known:
            raise VerificationError.because(
                "partitioner",
                f"the partitioner saves {name}, which is no value that the forward can compute",
                "aot.partition",
                node=name,
                way_out="save nodes of the joint graph by their own names",
            )
    return {known[name] for name in names}
