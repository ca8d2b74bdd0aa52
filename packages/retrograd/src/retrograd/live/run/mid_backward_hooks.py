"""Rebuilds the rest of a running backward after hooks were added or removed.

In: the finished steps, the current values, and the `HookChanges` since. Out: the remaining `BackwardGraph`
and the values of its placeholders. Eager takes a snapshot of a tensor's (or node's) hooks before it calls
them. So a change to the hooks that are being called takes effect only in the next backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from retrograd.engine import HookChanges, LateHook, LiveBackward, RemovedHook
from retrograd.graph.backward_graph import (
    BackwardGraph,
    Call,
    CallKind,
    HookKind,
    OpaqueCall,
    PlanStep,
    Segment,
    Source,
    SourceKind,
    call_of,
)
from retrograd.graph.fx import add_copy
from retrograd.live.calls import user_code
from retrograd.live.capture.call_graph import CallGraph


def rest_with_changes(
    graph: BackwardGraph,
    done: Sequence[PlanStep],
    values: dict[fx.Node, Any],
    backward: LiveBackward,
    changes: HookChanges,
) -> tuple[BackwardGraph, dict[fx.Node, Any]]:
    """Build the remaining backward.

    Args:
        graph: the whole backward in eager's order.
        done: its steps up to the call that made the changes.
        values: the values that later steps read. Hooks that were removed are replaced in it.
        backward: has the live graph.
        changes: is emptied.

    Returns:
        The remaining backward and the values of its placeholders: first those of `values`, in order.
    """
    finished = set(_nodes(done))
    current = done[-1]
    assert isinstance(current, OpaqueCall)
    remaining = {call.node_call for node, call in graph.calls() if node not in finished}
    late, removed = changes.take(backward.node_calls[i] for i in sorted(remaining) if i)
    came = _by_node_call(late, backward, current)
    _forget_removed(graph, finished, current, removed, values, backward)
    rest = _Rest(graph, list(values), finished, came)
    hooks = [late.hook for waiting in came.values() for late in waiting]
    return rest.laid_out(), dict(zip(rest.placeholders, [*values.values(), *hooks], strict=True))


def _forget_removed(
    graph: BackwardGraph,
    finished: Collection[fx.Node],
    current: OpaqueCall,
    removed: Sequence[RemovedHook],
    values: dict[Any, Any],
    backward: LiveBackward,
) -> None:
    """Put a function that does nothing in the place of each hook that was removed."""
    waiting = [
        (node.args[0], backward.node_calls[call.node_call])
        for node, call in graph.calls()
        if call.kind is CallKind.HOOK and node not in finished and not _same_hooks(node, current.node)
    ]
    for gone in removed:
        calls = [(hook, owner) for hook, owner in waiting if values.get(hook) is gone.hook]
        own = [hook for hook, owner in calls if gone.was_on(owner)][gone.place : gone.place + 1]
        if gone.sequence is None and not own and len(calls) == 1:  # registered before we could observe it
            own = [calls[0][0]]
        values.update((hook, lambda *_: None) for hook in own)


def _by_node_call(
    late: Sequence[LateHook], backward: LiveBackward, current: OpaqueCall
) -> dict[int, list[LateHook]]:
    """The added hooks, by node call. Hooks on nodes outside this backward are left out."""
    came: dict[int, list[LateHook]] = {}
    here = call_of(current.node)
    for hook in late:
        index = next((i for i, node in enumerate(backward.node_calls) if node is hook.node), None)
        ours = here.enters is None or here.enters == hook.slot
        has_run = hook.kind is here.hook or (hook.kind, here.hook) == (HookKind.TENSOR_PRE, HookKind.NODE_PRE)
        if index is None or (index == here.node_call and has_run and ours):
            continue
        came.setdefault(index, []).append(hook)
    return came


def _same_hooks(node: fx.Node, other: fx.Node) -> bool:
    """Whether two hook calls have one kind and one node: eager took their snapshot together."""
    one, two = call_of(node), call_of(other)
    return (one.node_call, one.hook, one.enters) == (two.node_call, two.hook, two.enters)


def _nodes(steps: Sequence[PlanStep]) -> Iterator[fx.Node]:
    for step in steps:
        if isinstance(step, Segment):
            yield from step.nodes
        else:
            yield step.node
            yield from step.projections if isinstance(step, OpaqueCall) else ()


class _Rest:
    """The remaining part of `backward`. Values that were computed already become its placeholders.

    Law: a new hook runs where eager would call it, after the older hooks of its kind.

    Attributes:
        placeholders: those for `computed`, then one for each new hook.
    """

    def __init__(
        self,
        backward: BackwardGraph,
        computed: Sequence[fx.Node],
        done: Collection[fx.Node],
        came: Mapping[int, Sequence[LateHook]],
    ) -> None:
        self._backward, self._done = backward, done
        self._waiting = {index: list(hooks) for index, hooks in came.items()}
        self._calls = CallGraph()
        self._graph = self._calls.graph
        self.placeholders: list[fx.Node] = []
        self._new: dict[fx.Node, Any] = {node: self._placeholder(node.name) for node in computed}
        numbers = [hook.number for hooks in came.values() for hook in hooks]
        self._hooks = {number: self._placeholder(f"late_hook_{i}") for i, number in enumerate(numbers)}

    def laid_out(self) -> BackwardGraph:
        for index, nodes in self._blocks():
            self._block(nodes, self._waiting.get(index, []))
        self._graph.output(tuple(self._value(node) for node in self._backward.outputs()))
        return self._backward.with_graph(self._graph)

    def _placeholder(self, name: str) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["source"] = Source(SourceKind.INPUT, len(self.placeholders))
        self.placeholders.append(node)
        return node

    def _blocks(self) -> list[tuple[int, list[fx.Node]]]:
        """The remaining calls of each node call, and of each step of an inlined node."""
        blocks: dict[tuple[int, int], list[fx.Node]] = {}
        for node, call in self._backward.calls():
            if node not in self._done:
                blocks.setdefault(call.place, []).append(node)
        return [(index, nodes) for (index, _), nodes in blocks.items()]

    def _block(self, nodes: list[fx.Node], waiting: list[LateHook]) -> None:
        """Add one node call: the hooks before it, the node, the hooks after it, then the sums of its results.

        We remove the hooks that we add from `waiting`.
        """
        own = [node for node in nodes if call_of(node).kind is not CallKind.SUM]
        for node in own:
            is_hook = call_of(node).hook is not None
            if not is_hook:
                self._insert_at_entry(node, own, waiting)
            self._insert_before(node, waiting)
            self._copy(node)
            if is_hook:
                self._insert_at_entry(node, own, waiting)
        self._insert_after(own, waiting)
        for node in nodes:
            if call_of(node).kind is CallKind.SUM:
                self._copy(node)

    def _insert_at_entry(self, node: fx.Node, own: Sequence[fx.Node], waiting: list[LateHook]) -> None:
        """Add the hooks on a gradient that enters an inlined node: before it enters, or after its older
        hooks."""
        call = call_of(node)
        hooks = [n for n in own if call_of(n).hook is not None and call_of(n).enters == call.enters]
        if call.enters is None or node is not (hooks[-1] if hooks else node):
            return
        grad = node if hooks else node.args[0]
        for hook in [h for h in waiting if h.kind is HookKind.TENSOR_PRE and h.slot == call.enters]:
            waiting.remove(hook)
            args = (self._hooks[hook.number], self._value(grad))
            self._rename(grad, self._call(user_code.call_tensor_hook, args, call, hook.kind))

    def _insert_before(self, node: fx.Node, waiting: list[LateHook]) -> None:
        """Add the hooks that run before `node`."""
        kinds = _kinds_before(node)
        for hook in [hook for hook in waiting if hook.kind in kinds]:
            waiting.remove(hook)
            call, old = call_of(node), _gradients(node)
            grads = [self._value(grad) for grad in old]
            value = self._hooks[hook.number]
            if hook.kind is HookKind.TENSOR_PRE:
                changed = self._call(user_code.call_tensor_hook, (value, grads[hook.slot]), call, hook.kind)
                self._rename(old[hook.slot], changed)
            else:
                result = self._call(user_code.call_node_pre_hook, (value, tuple(grads)), call, hook.kind)
                self._project(result, old)

    def _insert_after(self, nodes: list[fx.Node], waiting: list[LateHook]) -> None:
        executed = next((node for node in nodes if call_of(node).kind.is_node), None)
        if executed is None:
            return
        call = call_of(executed)
        for hook in waiting:
            value = self._hooks[hook.number]
            if hook.kind is HookKind.POST_ACCUMULATE and call.kind is CallKind.ACCUMULATE:
                variable = self._value(executed.args[0])
                self._call(user_code.call_post_accumulate_hook, (value, variable), call, hook.kind)
            elif hook.kind is HookKind.NODE_POST:
                old = _results(nodes)
                outputs = tuple(self._value(node) for node in old)
                grads = tuple(self._value(grad) for grad in _gradients(executed))
                args = (value, outputs, grads)
                self._project(self._call(user_code.call_node_post_hook, args, call, hook.kind), old)

    def _project(self, result: fx.Node, old: Sequence[Any]) -> None:
        for node, element in zip(
            old, self._calls.elements(result, [n is not None for n in old]), strict=True
        ):
            self._rename(node, element)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], call: Call, hook: HookKind) -> fx.Node:
        return self._calls.add(Call(CallKind.HOOK, call.node_call, hook), target, args)

    def _rename(self, old: Any, new: Any) -> None:
        if isinstance(old, fx.Node):
            self._new[old] = new

    def _value(self, node: Any) -> Any:
        return self._new.get(node, node) if isinstance(node, fx.Node) else node

    def _copy(self, node: fx.Node) -> None:
        if node not in self._new:
            self._new[node] = add_copy(self._graph, node, self._new.__getitem__)


def _kinds_before(node: fx.Node) -> tuple[HookKind, ...]:
    """The kinds of hooks that eager calls before this call, which takes gradients."""
    call = call_of(node)
    if call.kind.is_node and node.target is not None and _gradients(node):
        return HookKind.TENSOR_PRE, HookKind.NODE_PRE
    return (HookKind.TENSOR_PRE,) if call.hook is HookKind.NODE_PRE else ()


def _gradients(node: fx.Node) -> tuple[Any, ...]:
    """The gradients that a call takes."""
    call = call_of(node)
    if call.kind is CallKind.ACCUMULATE:
        return (node.args[1],)
    if call.kind is CallKind.COPY_SLICES:
        return (node.args[0],) if isinstance(node.args[0], fx.Node) else ()
    return tuple(node.args[0] if call.kind in (CallKind.NODE, CallKind.CPP_FUNCTION) else node.args[1])  # type: ignore[arg-type]


def _results(nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
    """The gradients that a node call returns, after its checks and its older post hooks."""
    last = [n for n in nodes if call_of(n).kind is CallKind.VALIDATE or call_of(n).hook is HookKind.NODE_POST]
    if not last:
        return ()
    operands = last[-1].args[0] if call_of(last[-1]).kind is CallKind.VALIDATE else last[-1].args[1]
    found: list[Any] = [None] * len(operands)  # type: ignore[arg-type]
    for user in last[-1].users:
        if call_of(user).kind is CallKind.PROJECT:
            found[user.args[1]] = user  # type: ignore[index]
    return tuple(found)
