"""What is left of a running backward, with the hooks that came and without those that went.

In: the steps done, the values at hand and the `HookChanges` since. Out: the remaining `BackwardGraph` and
the values of its placeholders. Eager takes a snapshot of a tensor's (or node's) hooks when it begins to call
them, so a change to the very hooks that are being called counts only from the next backward on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from retrograd._torch.autograd import HookChanges, LateHook
from retrograd.graph.backward_graph import BackwardGraph, CallKind, OpaqueCall, PlanStep, Segment, call_of
from retrograd.live.backward import LiveBackward
from retrograd.live.calls import hooks
from retrograd.passes.insert_hooks import HookTargets, Insertion, insert_hooks

_TARGETS = HookTargets(
    hooks.call_tensor_hook,
    hooks.call_node_pre_hook,
    hooks.call_node_post_hook,
    hooks.call_post_accumulate_hook,
)


def rest_with_changes(
    graph: BackwardGraph,
    done: Sequence[PlanStep],
    values: dict[fx.Node, Any],
    backward: LiveBackward,
    changes: HookChanges,
) -> tuple[BackwardGraph, dict[fx.Node, Any]]:
    """Lay out the rest.

    Returns:
        The remaining backward and the values of its placeholders: first those of `values`, in order.

    Args:
        graph: the whole backward in eager's order. done: its steps up to the call that made the changes.
        values: the values that later steps read.
        backward: knows the live graph. changes: is emptied.
    """
    finished = set(_nodes(done))
    current = done[-1]
    assert isinstance(current, OpaqueCall)
    remaining = {call.node_call for node, call in graph.calls() if node not in finished}
    late, removed = changes.take(backward.node_calls[i] for i in sorted(remaining) if i)
    came, late_hooks = _by_node_call(late, backward, current)
    went = [
        node
        for node, call in graph.calls()
        if call.kind is CallKind.HOOK and node not in finished and not _same_hooks(node, current.node)
        if isinstance(node.args[0], fx.Node) and any(values.get(node.args[0]) is hook for hook in removed)
    ]
    computed = list(values)
    rest, placeholders = insert_hooks(graph, computed, finished, came, went, _TARGETS)
    bound = [*(values[node] for node in computed), *late_hooks]
    return rest, dict(zip(placeholders, bound, strict=True))


def _by_node_call(
    late: Sequence[LateHook], backward: LiveBackward, current: OpaqueCall
) -> tuple[dict[int, list[Insertion]], list[Any]]:
    """The hooks that came, by node call; those on nodes that are not in this backward are left out."""
    came: dict[int, list[Insertion]] = {}
    kept: list[Any] = []
    here = call_of(current.node)
    for hook in late:
        index = next((i for i, node in enumerate(backward.node_calls) if node is hook.node), None)
        ours = here.enters is None or here.enters == hook.slot
        if index is None or (index == here.node_call and hook.kind is here.hook and ours):
            continue
        came.setdefault(index, []).append(Insertion(hook.kind, hook.slot, len(kept)))
        kept.append(hook.hook)
    return came, kept


def _same_hooks(node: fx.Node, other: fx.Node) -> bool:
    """Whether two hook calls are of one kind at one node: eager took their snapshot together."""
    one, two = call_of(node), call_of(other)
    return (one.node_call, one.hook, one.enters) == (two.node_call, two.hook, two.enters)


def _nodes(steps: Sequence[PlanStep]) -> Iterator[fx.Node]:
    for step in steps:
        if isinstance(step, Segment):
            yield from step.nodes
        else:
            yield step.node
            yield from step.projections if isinstance(step, OpaqueCall) else ()
