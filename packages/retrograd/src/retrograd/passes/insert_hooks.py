"""Add hooks to a backward that is half run, and remove hooks from it.

In: the calls of a `BackwardGraph` that have not run yet, the hooks that were registered since (by node call),
and the hooks that were removed since. Out: a `BackwardGraph` of the remaining calls. What has been computed
already is a placeholder in it.

Law: a new hook runs where eager would call it, after the older hooks of its kind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.graph.backward_graph import (
    BackwardGraph,
    Call,
    CallKind,
    HookKind,
    Source,
    SourceKind,
    call_of,
)


@dataclass(frozen=True)
class Insertion:
    """A hook to be added: its kind, the gradient that it is for, and its number among the new hooks."""

    kind: HookKind
    slot: int
    number: int


@dataclass(frozen=True)
class HookTargets:
    """The functions that call a hook of each kind."""

    tensor: Callable[..., Any]
    node_pre: Callable[..., Any]
    node_post: Callable[..., Any]
    post_accumulate: Callable[..., Any]


def insert_hooks(
    backward: BackwardGraph,
    computed: Sequence[fx.Node],
    done: Collection[fx.Node],
    came: Mapping[int, Sequence[Insertion]],
    went: Collection[fx.Node],
    targets: HookTargets,
) -> tuple[BackwardGraph, list[fx.Node]]:
    """Lay out what remains of `backward`.

    Args:
        backward: in eager's order.
        computed: the values that are there. done: the calls that have run.
        came: new hooks, by node call. went: hook calls that must not be made.
        targets: what calls a hook.

    Returns:
        The remaining backward, and its placeholders: those for `computed`, then one for each new hook, in the
        order of their numbers.
    """
    return _Rest(backward, computed, done, came, went, targets).laid_out()


class _Rest:
    def __init__(
        self,
        backward: BackwardGraph,
        computed: Sequence[fx.Node],
        done: Collection[fx.Node],
        came: Mapping[int, Sequence[Insertion]],
        went: Collection[fx.Node],
        targets: HookTargets,
    ) -> None:
        self._backward, self._done, self._went, self._targets = backward, done, went, targets
        self._waiting = {index: list(hooks) for index, hooks in came.items()}
        self._graph = fx.Graph()
        self._placeholders = [self._placeholder(node.name, i) for i, node in enumerate(computed)]
        self._new: dict[fx.Node, Any] = dict(zip(computed, self._placeholders, strict=True))
        first, count = len(computed), sum(map(len, came.values()))
        self._hooks = [self._placeholder(f"late_hook_{i}", first + i) for i in range(count)]

    def laid_out(self) -> tuple[BackwardGraph, list[fx.Node]]:
        for index, nodes in self._blocks():
            self._block(nodes, self._waiting.get(index, []))
        self._graph.output(tuple(self._value(node) for node in self._backward.outputs()))
        return self._backward.with_graph(self._graph), [*self._placeholders, *self._hooks]

    def _placeholder(self, name: str, index: int) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta["source"] = Source(SourceKind.INPUT, index)
        return node

    def _blocks(self) -> list[tuple[int, list[fx.Node]]]:
        """The remaining part of each node call, and of each step of an inlined node."""
        blocks: dict[tuple[int, int], list[fx.Node]] = {}
        for node, call in self._backward.calls():
            if node not in self._done:
                blocks.setdefault(call.place, []).append(node)
        return [(index, nodes) for (index, _), nodes in blocks.items()]

    def _block(self, nodes: list[fx.Node], waiting: list[Insertion]) -> None:
        """One node call: its hooks before, the node, its hooks after, then the sums that it feeds.

        Hooks that are called are taken out of `waiting`."""
        own = [node for node in nodes if call_of(node).kind is not CallKind.SUM]
        for node in own:
            is_hook = call_of(node).hook is not None
            if not is_hook:
                self._insert_at_entry(node, own, waiting)
            self._insert_before(node, waiting)
            if node in self._went:
                self._leave_out(node)
            else:
                self._copy(node)
            if is_hook:
                self._insert_at_entry(node, own, waiting)
        self._insert_after(own, waiting)
        for node in nodes:
            if call_of(node).kind is CallKind.SUM:
                self._copy(node)

    def _insert_at_entry(self, node: fx.Node, own: Sequence[fx.Node], waiting: list[Insertion]) -> None:
        """Insert hooks on a gradient that enters an inlined node: before that, or after its older hooks."""
        call = call_of(node)
        hooks = [n for n in own if call_of(n).hook is not None and call_of(n).enters == call.enters]
        if call.enters is None or node is not (hooks[-1] if hooks else node):
            return
        grad = node if hooks else node.args[0]
        for hook in [h for h in waiting if h.kind is HookKind.TENSOR_PRE and h.slot == call.enters]:
            waiting.remove(hook)
            args = (self._hooks[hook.number], self._value(grad))
            self._rename(grad, self._call(self._targets.tensor, args, call, hook.kind))

    def _insert_before(self, node: fx.Node, waiting: list[Insertion]) -> None:
        """Insert the hooks that run before `node`."""
        kinds = _kinds_before(node)
        for hook in [hook for hook in waiting if hook.kind in kinds]:
            waiting.remove(hook)
            call, old = call_of(node), _gradients(node)
            grads = [self._value(grad) for grad in old]
            value = self._hooks[hook.number]
            if hook.kind is HookKind.TENSOR_PRE:
                changed = self._call(self._targets.tensor, (value, grads[hook.slot]), call, hook.kind)
                self._rename(old[hook.slot], changed)
            else:
                result = self._call(self._targets.node_pre, (value, tuple(grads)), call, hook.kind)
                self._project(result, old, call)

    def _insert_after(self, nodes: list[fx.Node], waiting: list[Insertion]) -> None:
        executed = next((node for node in nodes if call_of(node).kind.is_node), None)
        if executed is None:
            return
        call = call_of(executed)
        for hook in waiting:
            value = self._hooks[hook.number]
            if hook.kind is HookKind.POST_ACCUMULATE and call.kind is CallKind.ACCUMULATE:
                variable = self._value(executed.args[0])
                self._call(self._targets.post_accumulate, (value, variable), call, hook.kind)
            elif hook.kind is HookKind.NODE_POST:
                old = _results(nodes)
                outputs = tuple(self._value(node) for node in old)
                grads = tuple(self._value(grad) for grad in _gradients(executed))
                args = (value, outputs, grads)
                self._project(self._call(self._targets.node_post, args, call, hook.kind), old, call)

    def _project(self, result: fx.Node, old: Sequence[Any], call: Call) -> None:
        for i, node in enumerate(old):
            if node is not None:
                element = self._graph.call_function(operator.getitem, (result, i))
                element.meta["call"] = Call(CallKind.PROJECT, call.node_call)
                self._rename(node, element)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], call: Call, hook: HookKind) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["call"] = Call(CallKind.HOOK, call.node_call, hook)
        return node

    def _leave_out(self, node: fx.Node) -> None:
        """Leave out a hook call: its results are the values that it would have been given."""
        before = node.args[1]
        if isinstance(before, tuple):
            for user in node.users:
                self._rename(user, self._value(before[user.args[1]]))  # type: ignore[index]
        elif before is not None:
            self._rename(node, self._value(before))

    def _rename(self, old: Any, new: Any) -> None:
        if isinstance(old, fx.Node):
            self._new[old] = new

    def _value(self, node: Any) -> Any:
        return self._new.get(node, node) if isinstance(node, fx.Node) else node

    def _copy(self, node: fx.Node) -> None:
        if node not in self._new:
            self._new[node] = self._graph.node_copy(node, lambda arg: self._new[arg])


def _kinds_before(node: fx.Node) -> tuple[HookKind, ...]:
    """The kinds of hooks that are called before a call that takes gradients."""
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
