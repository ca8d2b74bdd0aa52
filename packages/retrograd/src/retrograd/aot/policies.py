"""Which values are saved: torch's minimum cut, and the two extremes.

In: a joint graph and its sharing of memory. Out: the set of forward nodes that the backward may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import is_operator_overload, is_random
from retrograd._torch.inductor import cut_by
from retrograd.aot.parts import Memory, is_backward, is_number, memory_of, read_by_backward
from retrograd.config import PARTITIONERS, Policy
from retrograd.errors import OptionError, VerificationError
from retrograd.graph.joint import cotangents_reaching
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.reach import reached

_aten = torch.ops.aten
_CONVERSIONS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call itself, not one in a graph given to it, draws random numbers."""
    return is_operator_overload(node.target) and is_random(node)


def choose_saved(joint: JointValues, memory: Memory, policy: Policy) -> set[fx.Node]:
    """The nodes that are saved; of those that `memory` forbids to keep, a copy.

    Raises:
        OptionError: an unknown policy.
        VerificationError: one that saves something that is not a value of the forward half.
    """
    if policy == "save_all":
        return _without_marked(_read(joint))
    if policy == "recompute_all":
        must = CheckpointPolicy.MUST_SAVE
        kept = {node for node in joint.gm.graph.nodes if node.meta.get("recompute") is must}
        return kept | {node for node in memory.primals if not is_number(node)}
    if policy == "min_cut" and (read := _read(joint)) <= set(memory.primals):
        return read
    if policy == "min_cut":
        with _copies_offered(joint, memory) as copied:
            saved = {copied.get(node, node) for node in _cut(joint, memory_of(joint.gm, joint.signature))}
        lawful = not any(memory.is_forbidden(node) for node in saved - {*copied.values()})
        return saved if lawful else _read(joint)
    if callable(policy):
        saved = _cut(joint, memory, policy)
        return saved if not any(map(memory.is_forbidden, saved)) else _read(joint)
    expected = f"one of {', '.join(map(repr, PARTITIONERS))}, or a callable (gm, inputs, *, num_fwd_outputs)"
    raise OptionError("partitioner", f"got {policy!r}", expected)


def _cut(joint: JointValues, memory: Memory, partitioner: Callable[..., Any] | None = None) -> set[fx.Node]:
    """What `partitioner` (None: torch's minimum cut) saves."""
    inputs = joint.gm.graph.find_nodes(op="placeholder")
    names = cut_by(
        partitioner,
        joint.gm,
        frozenset(node.name for node in inputs if node not in memory.primals),
        joint.signature.forward_count,
        _pinned(joint, memory),
    )
    return named(joint, names)


@contextmanager
def _copies_offered(joint: JointValues, memory: Memory) -> Iterator[dict[fx.Node, fx.Node]]:
    """Let a cut choose a copy of what must not be kept, where a call only makes it wider.

    The loss of a language model reads half-precision logits as float32. Eager does not keep the logits; a
    copy of them takes half the memory of what it keeps instead. Gives the values by their copies, which are
    in the graph until the end of the context.
    """
    graph, copied = joint.gm.graph, dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        if node.target in _CONVERSIONS and not is_backward(node) and _widens(node, memory):
            (value,) = node.all_input_nodes
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta["val"] = value.meta["val"].clone()
            node.replace_input_with(value, copy)
            copied[copy] = value
    try:
        yield copied
    finally:
        for copy, value in copied.items():
            copy.replace_all_uses_with(value)
            graph.erase_node(copy)


def _widens(conversion: fx.Node, memory: Memory) -> bool:
    (value,) = conversion.all_input_nodes
    sizes = [node.meta["val"].dtype.itemsize for node in (value, conversion)]
    return memory.is_forbidden(value) and sizes[0] < sizes[1]


def _read(joint: JointValues) -> set[fx.Node]:
    """What the backward half reads of the forward half: what eager would save."""
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    return {value for value in read_by_backward(joint.gm) if not reaching[value]}


def _without_marked(saved: set[fx.Node]) -> set[fx.Node]:
    """In place of values that the user wants to be computed again, what they are computed of."""

    def is_again(node: fx.Node) -> bool:
        return node.meta.get("recompute") in _AGAIN and node.op == "call_function"

    found = reached(saved, lambda node: node.all_input_nodes if is_again(node) else ())
    return {node for node in found if not is_again(node)}


def _pinned(joint: JointValues, memory: Memory) -> frozenset[str]:
    """Calls that must not be made again in the backward: those that read memory which eager would not keep,
    and those that draw random numbers (unless the user wants that)."""
    return frozenset(
        node.name
        for node in joint.gm.graph.nodes
        if node.op == "call_function"
        and not is_backward(node)
        and not (draws_random_numbers(node) and node.meta.get("recompute") in _AGAIN)
        and (draws_random_numbers(node) or _reads_forbidden(node, memory))
    )


def _reads_forbidden(node: fx.Node, memory: Memory) -> bool:
    """Whether a call makes memory of its own from memory that must not be kept."""
    return not memory.is_forbidden(node) and any(map(memory.is_forbidden, node.all_input_nodes))


def named(joint: JointValues, names: Iterable[str]) -> set[fx.Node]:
    """The nodes of these names.

    Raises:
        VerificationError: one that depends on a cotangent, or is not there.
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
