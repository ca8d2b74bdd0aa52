"""Which values are saved: torch's minimum cut, and the two extremes.

In: a joint graph and its sharing of memory. Out: the set of forward nodes that the backward may read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import is_operator_overload, is_random
from retrograd._torch.inductor import cut_by
from retrograd.aot.trace.aliases import Memory, is_backward, is_number, read_by_backward
from retrograd.config import PARTITIONERS, Policy
from retrograd.errors import OptionError, VerificationError
from retrograd.graph.joint import cotangents_reaching
from retrograd.graph.joint_graph import JointValues

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call itself, not one in a graph given to it, draws random numbers."""
    return is_operator_overload(node.target) and is_random(node)


def choose_saved(joint: JointValues, memory: Memory, policy: Policy | frozenset[str]) -> set[fx.Node]:
    """The nodes that are saved.

    Raises:
        OptionError: an unknown policy.
        VerificationError: one that saves something that is not a value of the forward half.
    """
    if isinstance(policy, frozenset):
        reaching = cotangents_reaching(joint.gm.graph, joint.signature)
        return _named({node.name: node for node in reaching if not reaching[node]}, policy)
    if policy == "save_all":
        return _without_marked(_read(joint))
    if policy == "recompute_all":
        return {node for node in memory.primals if not is_number(node)} | _must(
            joint, CheckpointPolicy.MUST_SAVE
        )
    if policy == "min_cut" and (read := _read(joint)) <= set(memory.primals):
        return read
    if policy == "min_cut" or callable(policy):
        reaching = cotangents_reaching(joint.gm.graph, joint.signature)
        names = cut_by(
            None if isinstance(policy, str) else policy,
            joint.gm,
            frozenset(node.name for node in reaching if node.op == "placeholder" and reaching[node]),
            joint.signature.forward_count,
            _pinned(joint, memory),
        )
        saved = _named({node.name: node for node in reaching if not reaching[node]}, names)
        return saved if not any(map(memory.is_forbidden, saved)) else _read(joint)
    expected = f"one of {', '.join(map(repr, PARTITIONERS))}, or a callable (gm, inputs, *, num_fwd_outputs)"
    raise OptionError("partitioner", f"got {policy!r}", expected)


def _read(joint: JointValues) -> set[fx.Node]:
    """What the backward half reads of the forward half: what eager would save."""
    reaching = cotangents_reaching(joint.gm.graph, joint.signature)
    return {value for value in read_by_backward(joint.gm) if not reaching[value]}


def _without_marked(saved: set[fx.Node]) -> set[fx.Node]:
    """In place of values that the user wants to be computed again, what they are computed of."""
    found, stack = set[fx.Node](), list(saved)
    while stack:
        node = stack.pop()
        if node.meta.get("recompute") in _AGAIN and node.op == "call_function":
            stack.extend(node.all_input_nodes)
        else:
            found.add(node)
    return found


def _must(joint: JointValues, policy: CheckpointPolicy) -> set[fx.Node]:
    return {node for node in joint.gm.graph.nodes if node.meta.get("recompute") is policy}


def _pinned(joint: JointValues, memory: Memory) -> frozenset[str]:
    """Calls that must not be made again in the backward: those that read memory which eager would not keep,
    and those that draw random numbers (unless the user wants that)."""
    return frozenset(
        node.name
        for node in joint.gm.graph.nodes
        if node.op == "call_function"
        and not is_backward(node)
        and not (draws_random_numbers(node) and node.meta.get("recompute") in _AGAIN)
        and (draws_random_numbers(node) or (_reads_forbidden(node, memory) and not memory.is_forbidden(node)))
    )


def _reads_forbidden(node: fx.Node, memory: Memory) -> bool:
    return any(memory.is_forbidden(value) for value in node.all_input_nodes)


def _named(known: Mapping[str, fx.Node], names: Iterable[str]) -> set[fx.Node]:
    """The nodes of these names, of those that depend on no cotangent."""
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
