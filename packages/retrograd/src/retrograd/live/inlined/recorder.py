"""Record a function that AOTAutograd compiled: its backward graph, laid in, instead of one call.

In: the graph that is being recorded, an `AotBackward` and what the engine hands over for it. Out: its
gradients, and an `InlinedCall`. Hooks on its outputs, which the engine hands over first, are moved to where
eager would call them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.autograd import tensors_on_context
from retrograd.errors import Refusal
from retrograd.graph.aot_backward import AotBackward, AotCall, InlinedCall
from retrograd.graph.backward_graph import SourceKind, call_of
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.live.calls import hooks
from retrograd.live.capture.call_graph import CallGraph, Value, is_from_hook
from retrograd.live.inlined.lay_in import Arriving, inline

_LateHook = Callable[[Value, int], fx.Node]


class CompiledFunctions:
    """Lays compiled functions into one recorded backward.

    Args:
        calls: the backward under way.

    Attributes:
        moved: for the result of a hook that was moved, the gradient before it.
    """

    def __init__(self, calls: CallGraph) -> None:
        self._calls = calls
        self._names: Counter[str] = Counter()
        self.moved: dict[Value, Value] = {}

    def lay_in(self, aot: AotBackward, call: AotCall) -> tuple[list[Value], InlinedCall]:
        """Lay the graph of the current node call in.

        Returns:
            A gradient for each argument of the forward; in the `InlinedCall` steps speak of the node's edges.

        Raises:
            Refusal: it has to stay one call; nothing has changed then.
        """
        if call.zeros is None and any(map(_may_be_undefined, call.grads)):
            raise Refusal("not-inlined", "a gradient may be undefined, and its sizes are not known")
        bare, late = self._without_tensor_hooks(call.grads)
        kept = self._tensors_on_context(call.context, aot.kept_on_context)
        objects = [self._calls.placeholder(SourceKind.HOOK, index) for index in call.objects]
        arriving = Arriving(bare, [*call.sizes, *call.saved, *kept, *objects], late, call.wanted, call.zeros)
        try:
            gradients, inlined = inline(self._numbered(aot), arriving, self._calls)
        except Refusal:
            for node in kept:
                self._calls.graph.erase_node(node)
            raise
        self._erase_moved_hooks(call.grads, bare)
        tensors = (i for i, is_tensor in enumerate(call.wanted) if is_tensor)
        edges = {i: edge for edge, i in enumerate(tensors)}
        steps = tuple(tuple(edges[i] for i in step if i in edges) for step in inlined.steps)
        return gradients, replace(inlined, steps=steps)

    def _numbered(self, aot: AotBackward) -> AotBackward:
        """A graph that is met again in one backward has its nodes named ``aot3_1_…``."""
        number = self._names[aot.name]
        self._names[aot.name] += 1
        return replace(aot, name=f"{aot.name}_{number}") if number else aot

    def _tensors_on_context(self, context: int, count: int) -> list[fx.Node]:
        if not count:
            return []
        args = (self._calls.placeholder(SourceKind.HOOK, context),)
        result = self._calls.call(CallKind.AOT_SAVED, tensors_on_context, args)
        return [node for node in self._calls.elements(result, [True] * count) if node is not None]

    # hooks

    def _without_tensor_hooks(self, grads: Sequence[Value]) -> tuple[list[Value], list[list[_LateHook]]]:
        """The gradients before their tensor hooks, and the hooks, to be called later."""
        bare: list[Value] = []
        late: list[list[_LateHook]] = []
        for slot, grad in enumerate(grads):
            chain: list[fx.Node] = []
            while grad is not None and is_from_hook(grad, HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD):
                chain.append(grad)
                grad = self._calls.before_hooks[grad]
            bare.append(grad)
            late.append([functools.partial(self._hook_again, node, slot) for node in reversed(chain)])
        return bare, late

    def _hook_again(self, hook: fx.Node, slot: int, value: Value, step: int) -> fx.Node:
        """Call the hook of `hook`, on output `slot`, with `value` instead."""
        target: Any = hook.target if value is not None else hooks.call_hook_of_unreached
        call = replace(call_of(hook), step=step, enters=slot)
        return self._calls.tensor_hook(call, target, hook.args[0], value)  # type: ignore[arg-type]

    def _erase_moved_hooks(self, grads: Sequence[Value], bare: Sequence[Value]) -> None:
        for grad, before in zip(grads, bare, strict=True):
            while grad is not None and grad is not before:
                self.moved[grad] = before
                earlier = self._calls.before_hooks.pop(grad)
                self._calls.graph.erase_node(grad)
                grad = earlier


def _may_be_undefined(value: Any) -> bool:
    """Whether a gradient may be None when it is there: user code made it."""
    if value is None or value.op != "call_function":
        return False
    call = value.meta["call"]
    if call.hook in (HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD):
        return _may_be_undefined(value.args[1])  # such a hook cannot make it so
    if call.kind is CallKind.SUM:
        return all(map(_may_be_undefined, value.all_input_nodes))
    if call.kind is CallKind.PROJECT:
        source, i = value.args
        validated = source.meta["call"].kind is CallKind.VALIDATE
        return _may_be_undefined(source.args[0][i] if validated else source)
    return call.kind in (CallKind.FUNCTION, CallKind.CPP_FUNCTION, CallKind.HOOK)
