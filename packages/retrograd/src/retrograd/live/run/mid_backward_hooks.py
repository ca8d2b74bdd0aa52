"""Rebuilds the rest of a running backward after hooks were added or removed.

In: the finished steps, the current values, and the `HookChanges` since. Out: the remaining `BackwardGraph`
and the values of its placeholders. Eager takes a snapshot of a tensor's (or node's) hooks before it calls
them. So a change to the hooks that are being called takes effect only in the next backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd.engine import HookChanges, LateHook, LiveBackward, RemovedHook, edge_of
from retrograd.graph.backward_graph import (
    BackwardGraph,
    Call,
    CallKind,
    HookKind,
    OpaqueCall,
    PlanStep,
    Segment,
    SourceKind,
    call_of,
)
from retrograd.graph.fx import add_copy
from retrograd.live.calls import user_code
from retrograd.live.capture.call_graph import CallGraph
from retrograd.live.capture.eager_positions import positions_in_eager


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
    finished, current = set(_nodes(done)), done[-1]
    assert isinstance(current, OpaqueCall)
    here = call_of(current.node)
    remaining = {call.node_call for node, call in graph.calls() if node not in finished}
    late, removed = changes.take(backward.node_calls[i] for i in sorted({*remaining, here.node_call}) if i)
    waiting = [
        (call, node.args[0])
        for node, call in graph.calls()
        if call.kind is CallKind.HOOK and node not in finished and not _same_hooks(call, here)
    ]
    index = {node: i for i, node in enumerate(backward.node_calls)}
    came = _by_node_call(late, index, here, [call for call, _ in waiting])
    _forget_removed(waiting, removed, values, backward)
    requested = [(index.get(node), slot) for node, slot in map(edge_of, backward.request.inputs)]
    # A node that is not executed and has no hooks left may have been passed already.
    places = positions_in_eager(graph, backward) if came.keys() - remaining else {}
    came = {i: on for i, on in came.items() if i in remaining or places[i, 0] >= places[here.place]}
    rest = _Rest(graph, list(values), finished, came, requested, places)
    if _ORDER.index(here.hook or HookKind.UNPACK) >= _ORDER.index(HookKind.UNPACK):
        rest.begun = here.node_call
    hooks = [late.hook for waiting in came.values() for late in waiting]
    made = rest.laid_out()
    return made, dict(zip(dict(made.placeholders()), [*values.values(), *hooks], strict=True))


def _forget_removed(
    waiting: Sequence[tuple[Call, Any]],
    removed: Sequence[RemovedHook],
    values: dict[Any, Any],
    backward: LiveBackward,
) -> None:
    """Put a function that does nothing in the place of each hook that was removed. `waiting` are the calls of
    hooks that it may concern, each with the hook's placeholder."""
    for gone in removed:
        calls = [(call, hook) for call, hook in waiting if values.get(hook) is gone.hook]
        own = [hook for call, hook in calls if gone.was_on(backward.node_calls[call.node_call], call.slot)]
        own = own[gone.place : gone.place + 1]
        if gone.edge is None and not own and len(calls) == 1:  # registered before we could observe it
            own = [calls[0][1]]
        values.update((hook, lambda *_: None) for hook in own)


def _by_node_call(
    late: Sequence[LateHook], index: Mapping[Any, int], here: Call, waiting: Sequence[Call]
) -> dict[int, list[LateHook]]:
    """The added hooks that eager still calls, by node call, in the order of its calls. Hooks on nodes outside
    this backward are left out.

    Args:
        late: all hooks that were added.
        index: the node call of each autograd node.
        here: the call that added them.
        waiting: the calls of hooks that come later.
    """
    # Of tensors on one node, the engine calls those hooks whose dictionaries it found at its arrival.
    slots = {
        call.slot for call in waiting if call.hook is HookKind.TENSOR_PRE and call.node_call == here.node_call
    }
    stage = _ORDER.index(here.hook or HookKind.UNPACK)
    came: dict[int, list[LateHook]] = {}
    for hook in sorted(late, key=lambda hook: _ORDER.index(hook.kind)):
        at = index.get(hook.node)
        follows = _ORDER.index(hook.kind) > stage or (hook.kind is HookKind.TENSOR_PRE and hook.slot in slots)
        if at is not None and (at != here.node_call or follows):
            came.setdefault(at, []).append(hook)
    return came


#: The order in which eager calls the hooks of one node. It unpacks what was saved when it executes the node.
_ORDER = (
    HookKind.TENSOR_PRE,
    HookKind.RETAIN_GRAD,
    HookKind.NODE_PRE,
    HookKind.UNPACK,
    HookKind.POST_ACCUMULATE,
    HookKind.NODE_POST,
)


def _same_hooks(one: Call, two: Call) -> bool:
    """Whether two hook calls have one kind and one dictionary, of which eager took a snapshot."""
    return (one.node_call, one.hook, one.slot) == (two.node_call, two.hook, two.slot)


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
        _last: for each gradient with hooks of tensors, the last of them.
        _hooked: the gradients with hooks, which the engine calls in C++ or Python.
        _inlined: the gradients that enter an inlined node. It may read one before its hooks run.
        begun: the node call that runs, if its hooks before it have finished.
        _before: gradients as they were before new hooks ran. If the engine executes the node of a requested
            gradient, it returns the gradient as it was before the hooks.
    """

    def __init__(
        self,
        backward: BackwardGraph,
        computed: Sequence[fx.Node],
        done: Collection[fx.Node],
        came: Mapping[int, Sequence[LateHook]],
        requested: Sequence[tuple[int | None, int]],
        places: Mapping[tuple[int, int], int],
    ) -> None:
        self._backward, self._done, self._requested, self._places = backward, done, requested, places
        self._waiting = {index: list(hooks) for index, hooks in came.items()}
        self._calls = CallGraph()
        self._graph = self._calls.graph
        late = [hook for hooks in came.values() for hook in hooks]
        sources = [self._calls.placeholder(SourceKind.INPUT, i) for i in range(len(computed) + len(late))]
        self._new: dict[fx.Node, Any] = dict(zip(computed, sources, strict=False))
        self._hooks = dict(zip(late, sources[len(computed) :], strict=True))
        self._before: dict[fx.Node, fx.Node] = {}
        self.begun: int | None = None
        remaining = [(node, call) for node, call in backward.calls() if node not in done]
        self._last = {_slot(node): node for node, call in remaining if call.hook is HookKind.TENSOR_PRE}
        self._hooked = {_slot(node) for node, call in remaining if call.hook in _OF_TENSORS}
        self._inlined = {_slot(node) for node, call in remaining if call.kind is CallKind.ATEN}

    def laid_out(self) -> BackwardGraph:
        outputs = self._backward.outputs()
        for index, nodes in self._blocks():
            waiting = self._waiting.get(index, [])
            self._block(nodes, waiting, index)
            if any(call_of(node).hook is None for node in nodes):
                continue  # it is executed
            grads = {
                edge: grad for edge, grad in zip(self._requested, outputs, strict=False) if grad is not None
            }
            for (at, slot), grad in (self._last | grads).items():
                if at == index:
                    call = Call(CallKind.HOOK, index, slot=slot)
                    self._add_tensor_hooks(grad, call, waiting, _OF_TENSORS)
        self._graph.output(
            tuple(self._before[out] if out in self._before else self._value(out) for out in outputs)
        )
        return self._backward.with_graph(self._graph)

    def _blocks(self) -> list[tuple[int, list[fx.Node]]]:
        """The remaining calls of each node call, and of each step of an inlined node."""
        blocks: dict[tuple[int, int], list[fx.Node]] = {}
        for node, call in self._backward.calls():
            if node not in self._done:
                blocks.setdefault(call.place, []).append(node)
        found = [*blocks.items()]
        for place in [(index, 0) for index in self._waiting.keys() - {index for index, _ in blocks}]:
            after = (i for i, (other, _) in enumerate(found) if self._places[other] > self._places[place])
            found.insert(next(after, len(found)), (place, []))
        return [(index, nodes) for (index, _), nodes in found]

    def _block(self, nodes: list[fx.Node], waiting: list[LateHook], index: int) -> None:
        """Add one node call: the hooks before it, the node, the hooks after it, then the sums of its results.

        We remove the hooks that we add from `waiting`.
        """
        own = [node for node in nodes if call_of(node).kind is not CallKind.SUM]
        for node in own:
            call = call_of(node)
            self._insert_before(node, waiting)
            self._copy(node)
            if self._last.get(_slot(node)) is node:
                kinds = _OF_TENSORS if _slot(node) in self._inlined else (HookKind.TENSOR_PRE,)
                self._add_tensor_hooks(node, call, waiting, kinds)
        self._insert_after(own, waiting, index)
        for node in nodes:
            if call_of(node).kind is CallKind.SUM:
                self._copy(node)

    def _insert_before(self, node: fx.Node, waiting: list[LateHook]) -> None:
        """Add the hooks on the gradients that `node` takes."""
        taken = {} if call_of(node).kind is CallKind.ATEN and _slot(node) in self._hooked else _taken(node)
        for slot, grad in taken.items():
            if grad is not None:
                self._before.setdefault(grad, self._new[grad])
                self._add_tensor_hooks(grad, replace(call_of(node), slot=slot), waiting, _OF_TENSORS)
        if not call_of(node).kind.is_node:
            return
        for hook in [hook for hook in waiting if hook.kind is HookKind.NODE_PRE]:
            waiting.remove(hook)
            args = (self._hooks[hook], tuple(map(self._value, taken.values())))
            result = self._call(user_code.call_node_pre_hook, args, call_of(node), hook.kind)
            self._project(result, [*taken.values()])

    def _add_tensor_hooks(
        self, grad: fx.Node, call: Call, waiting: list[LateHook], kinds: Collection[HookKind]
    ) -> None:
        """Add the hooks of `kinds` on `grad`, which is gradient ``call.slot`` of its node."""
        for hook in [hook for hook in waiting if hook.kind in kinds and hook.slot == call.slot]:
            waiting.remove(hook)
            args = (self._hooks[hook], self._value(grad))
            self._new[grad] = self._call(user_code.call_tensor_hook, args, call, hook.kind)

    def _insert_after(self, nodes: list[fx.Node], waiting: list[LateHook], index: int) -> None:
        calls = [*self._executed_by(index), *nodes] if index == self.begun else nodes
        executed = next((node for node in calls if call_of(node).kind.is_node), None)
        if executed is None:
            return
        call = call_of(executed)
        grads = self._grads_of_post_hooks(executed, nodes, waiting, index)
        for hook in waiting:
            value = self._hooks[hook]
            if hook.kind is HookKind.POST_ACCUMULATE and call.kind is CallKind.ACCUMULATE:
                variable = self._value(executed.args[0])
                self._call(user_code.call_post_accumulate_hook, (value, variable), call, hook.kind)
            elif hook.kind is HookKind.NODE_POST:
                old = _results(nodes)
                outputs = tuple(self._value(node) for node in old)
                args = (value, outputs, tuple(map(self._value, grads)))
                self._project(self._call(user_code.call_node_post_hook, args, call, hook.kind), old)

    def _executed_by(self, index: int) -> Iterator[fx.Node]:
        """The finished call that has executed a node."""
        finished = ((node, call) for node, call in self._backward.calls() if node in self._done)
        return (node for node, call in finished if call.node_call == index and call.kind.is_node)

    def _grads_of_post_hooks(
        self, executed: fx.Node, nodes: Sequence[fx.Node], waiting: Sequence[LateHook], index: int
    ) -> Sequence[Any]:
        """The gradients that new post hooks of a node receive. Eager keeps them only if the node had post
        hooks when it began."""
        older = [node for node in nodes if call_of(node).hook is HookKind.NODE_POST]
        if older:
            return older[-1].args[2]  # type: ignore[return-value]
        is_bare = index == self.begun and any(hook.is_first for hook in waiting)
        return () if is_bare else _gradients(executed)

    def _project(self, result: fx.Node, old: Sequence[Any]) -> None:
        for node, element in zip(
            old, self._calls.elements(result, [n is not None for n in old]), strict=True
        ):
            if isinstance(node, fx.Node):
                self._new[node] = element

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], call: Call, hook: HookKind) -> fx.Node:
        slot = call.slot if hook in _OF_TENSORS else None
        return self._calls.add(Call(CallKind.HOOK, call.node_call, hook, slot=slot), target, args)

    def _value(self, node: Any) -> Any:
        return self._new.get(node, node) if isinstance(node, fx.Node) else node

    def _copy(self, node: fx.Node) -> None:
        if node not in self._new:
            self._new[node] = add_copy(self._graph, node, self._new.__getitem__)


#: The kinds of hooks that receive one gradient.
_OF_TENSORS = (HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD)


def _slot(node: fx.Node) -> tuple[int, int | None]:
    """Which gradient of which node call a hook is on, or a call of an inlined node reads."""
    return call_of(node).node_call, call_of(node).slot


def _taken(node: fx.Node) -> dict[int | None, Any]:
    """The gradients of its autograd node that a call takes when the hooks of tensors have run, by slot."""
    call = call_of(node)
    if call.hook is HookKind.RETAIN_GRAD:
        return {call.slot: node.args[1]}
    if call.kind is CallKind.ATEN:
        return {} if call.slot is None else {call.slot: node.args[0]}
    is_node = call.kind.is_node and node.target is not None
    return dict(enumerate(_gradients(node))) if is_node or call.hook is HookKind.NODE_PRE else {}


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
