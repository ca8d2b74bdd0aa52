"""Which values of the forward half are saved for the backward.

In: a joint graph, its sharing of memory, and a policy: torch's minimum cut, or one of the two extremes, or
the user's own. Out: the set of forward nodes that the backward may read.
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
    memory_of,
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
    """The nodes that are saved; of those that `memory` forbids to keep, a copy.

    Raises:
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
        is_short = memory_budget(joint.gm) < 1
        with _copies_offered(joint, memory, of_all=is_short) as copied:
            saved = {copied.get(node, node) for node in _cut(joint, memory_of(joint.gm, joint.signature))}
        lawful = is_short or not any(memory.is_forbidden(node) for node in saved - {*copied.values()})
        return saved | _read_by_strides(joint, memory) if lawful else _read(joint)
    assert callable(policy)
    saved = _cut(joint, memory, policy)
    lawful = not any(map(memory.is_forbidden, saved))
    return saved | _read_by_strides(joint, memory) if lawful else _read(joint)


def _read_by_strides(joint: JointValues, memory: Memory) -> set[fx.Node]:
    """What forward calls read by strides of something that has others where it is saved: something computed,
    for which a backend chooses them, or what only a copy may be saved of. They must not be made again."""
    readers = list(filter(reads_memory, joint.gm.graph.nodes))
    reaching = cotangents_reaching(joint.gm.graph, joint.signature) if readers else {}
    kept = {node for node in memory.primals if not memory.is_forbidden(node)}
    return {node for node in readers if not reaching[node] and not kept.issuperset(node.all_input_nodes)}


def _cut(joint: JointValues, memory: Memory, partitioner: Callable[..., Any] | None = None) -> set[fx.Node]:
    """What `partitioner` (None: torch's minimum cut) saves."""
    inputs, count = joint.gm.graph.find_nodes(op="placeholder"), joint.signature.forward_count
    cotangents = frozenset(node.name for node in inputs if node not in memory.primals)
    return named(joint, cut_by(partitioner, joint.gm, cotangents, count, _pinned(joint, memory)))


@contextmanager
def _copies_offered(joint: JointValues, memory: Memory, of_all: bool) -> Iterator[dict[fx.Node, fx.Node]]:
    """Let a cut choose a copy of what must not be kept: where a call makes more of it, or `of_all`, under a
    memory budget.

    The loss of a language model reads half-precision logits as float32. Eager does not keep the logits; a
    copy of them takes half the memory of what it keeps instead. A normalisation adds a bias, which eager does
    not keep: a copy of that is small, and without it what the normalisation gives could not be computed
    again. Gives the values by their copies, which are in the graph until the end of the context.
    """
    graph, copied = joint.gm.graph, dict[fx.Node, fx.Node]()
    first: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_backward(node) or has_effect(node) or reads_memory(node):
            continue
        for value in node.all_input_nodes:
            is_tensor = isinstance(value.meta.get("val"), torch.Tensor)
            if is_tensor and memory.is_forbidden(value) and (of_all or _makes_more(node, value)):
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
    """Whether what a call makes of a value takes at least twice its memory."""
    made = call.meta["val"]
    return isinstance(made, torch.Tensor) and bytes_of(made) >= 2 * bytes_of(value.meta["val"])


def _read(joint: JointValues) -> set[fx.Node]:
    """What the backward half reads of the forward half: what eager would save."""
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    return {value for value in read_by_backward(joint.gm) if not reaching[value]}


def _without_marked(saved: set[fx.Node]) -> set[fx.Node]:
    """In place of values that the user wants to be computed again, what they are computed of."""
    found = reached(saved, lambda node: node.all_input_nodes if is_recomputed(node) else ())
    return {node for node in found if not is_recomputed(node)}


def _pinned(joint: JointValues, memory: Memory) -> frozenset[str]:
    """Calls that must not be made again in the backward: those that read memory which eager would not keep,
    and those that draw random numbers (unless the user wants that)."""
    return frozenset(
        node.name
        for node in joint.gm.graph.nodes
        if node.op == "call_function"
        and not is_backward(node)
        and not (draws_random_numbers(node) and is_recomputed(node))
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
