"""Records one backward into a `BackwardGraph` while the engine walks it.

In: the calls of ``engine.protocol``, with FX nodes as values. A list of values is a list of gradients; None
is an undefined gradient. Out: a `BackwardGraph` in the order of the engine's walk. This file computes, traces
and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd.engine import CacheEntry
from retrograd.graph.backward_graph import (
    AotBackward,
    AotCall,
    BackwardGraph,
    Call,
    CallKind,
    HookKind,
    InlinedCall,
    NodeCall,
    SourceKind,
)
from retrograd.live.calls import gradients, user_code
from retrograd.live.capture.call_graph import CallGraph, Value
from retrograd.live.inlined.lay_in import CompiledFunctions


class BackwardRecorder:
    """Records one backward."""

    def __init__(self, finished: Callable[[BackwardGraph], Any]) -> None:
        self._finished = finished
        self._calls = CallGraph()
        self._compiled = CompiledFunctions(self._calls)
        self._inlined: dict[int, InlinedCall] = {}
        self._needs_engine_frame = False
        self._functions: dict[str, gradients.NodeFunction] = {}
        self._checks: dict[str, gradients.OutputCheck] = {}

    # placeholders

    def begin(self, inputs: int, sizes: int, scalars: int) -> tuple[list[Value], list[Value], list[Value]]:
        counts = (inputs, sizes, scalars)
        kinds = zip((SourceKind.INPUT, SourceKind.SIZE, SourceKind.SCALAR), counts, strict=True)
        values: list[list[Value]] = [
            [self._calls.placeholder(kind, i) for i in range(count)] for kind, count in kinds
        ]
        return values[0], values[1], values[2]

    # calls

    def enter_node(self, index: int, name: str) -> None:
        while len(self._calls.node_calls) < index:
            self._calls.node_calls.append(NodeCall(len(self._calls.node_calls), ""))
        self._calls.node_calls.append(NodeCall(index, name))

    def node(
        self,
        name: str,
        fn: Callable[..., Any],
        grads: list[Value],
        args: Any,
        wanted: list[bool],
        is_cpp: bool = False,
    ) -> list[Value]:
        # One function object for all nodes of a kind: the engine binds each name once.
        function = self._functions.get(name) or self._functions.setdefault(
            name, gradients.NodeFunction(name, fn)
        )
        kind = CallKind.CPP_FUNCTION if is_cpp else CallKind.NODE
        return self._call_node(kind, function, (grads, *args), wanted)

    def _call_node(
        self,
        kind: CallKind,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        wanted: Sequence[bool],
        note: str = "",
    ) -> list[Value]:
        """Add the call that executes the current node."""
        self._calls.execute()
        return self._calls.elements(self._calls.call(kind, target, args, note=note), wanted)

    def validate(self, fn: Callable[..., Any], outputs: list[Value], args: Any) -> list[Value]:
        # The engine leaves the check out if AOTAutograd's graph has converted the gradients already.
        name = self._calls.node_calls[-1].name
        check = self._checks.get(name) or self._checks.setdefault(name, gradients.OutputCheck(fn, name))
        result = self._calls.call(CallKind.VALIDATE, check, (outputs, *args))
        return self._calls.elements(result, [value is not None for value in outputs])

    def copy_slices_prologue(self, grads: list[Value], base: Any, view: Any) -> list[Value]:
        return self._call_node(CallKind.COPY_SLICES, gradients.prologue, (grads[0], base, view), [True] * 3)

    def copy_slices_epilogue(
        self, needs: list[bool], result: Value, grads: list[Value], grad_slice: Value
    ) -> list[Value]:
        args = (tuple(needs), result, grads, grad_slice)
        return self._calls.elements(self._calls.call(CallKind.COPY_SLICES, gradients.epilogue, args), needs)

    def function(
        self,
        context: int,
        grads: list[Value],
        saved_values: list[Value],
        wanted: list[bool],
        zeros: tuple[Any, ...],
        note: str = "",
    ) -> list[Value]:
        ctx = self._calls.placeholder(SourceKind.HOOK, context)
        packed = [value for value in saved_values if value is not None and value.target is user_code.unpack]
        if not packed:
            all_given = (ctx, grads, saved_values, tuple(wanted), zeros)
            return self._call_node(CallKind.FUNCTION, user_code.call_backward, all_given, wanted, note)
        # Only the Function can unpack its saved tensors with their original history, and it does so when it
        # reads them.
        for value in packed:
            self._calls.graph.erase_node(value)
        args = (ctx, grads, tuple(wanted), zeros)
        return self._call_node(CallKind.FUNCTION, user_code.call_kept_backward, args, wanted)

    def aot_backward(self, aot: AotBackward, call: AotCall) -> list[Value]:
        """Inline the graph of a compiled function.

        Raises:
            Refusal: it must stay one call.
        """
        gradients, inlined = self._compiled.lay_in(aot, call)
        self._calls.execute()
        self._inlined[self._calls.current] = inlined
        return gradients

    def add(self, old: Value, new: Value) -> Value:
        if isinstance(old, fx.Node) and old.target is gradients.sum_gradients:
            return self._calls.call(CallKind.SUM, gradients.sum_gradients, (*old.args, new))
        return self._calls.call(CallKind.SUM, gradients.sum_gradients, (old, new))

    def accumulate(self, variable: Value, grad: Value, has_post_hooks: bool) -> Value:
        self._calls.execute()
        self._calls.call(CallKind.ACCUMULATE, gradients.accumulate_grad, (variable, grad, has_post_hooks))
        return variable

    # hooks

    def _call_hook(self, kind: HookKind, target: Callable[..., Any], hook: int, *given: Any) -> fx.Node:
        args = (self._calls.placeholder(SourceKind.HOOK, hook), *given)
        return self._calls.call(CallKind.HOOK, target, args, kind)

    def tensor_hook(self, kind: HookKind, grad: Value, slot: int, hook: int) -> Value:
        call = Call(CallKind.HOOK, self._calls.current, kind, slot=slot)
        if kind is HookKind.RETAIN_GRAD:
            self._needs_engine_frame = True
            return self._calls.tensor_hook(call, user_code.call_cpp_tensor_hook, hook, grad)
        own = self._calls.placeholder(SourceKind.HOOK, hook)
        return self._calls.tensor_hook(call, user_code.call_tensor_hook, own, grad)

    def node_pre_hook(self, grads: list[Value], hook: int) -> list[Value]:
        node = self._call_hook(HookKind.NODE_PRE, user_code.call_node_pre_hook, hook, tuple(grads))
        # A hook cannot replace an undefined gradient.
        return self._calls.elements(node, [grad is not None for grad in grads])

    def node_post_hook(self, outputs: list[Value], grads: list[Value], hook: int) -> list[Value]:
        # The hook receives all gradients of its node at once, so there are no steps.
        inlined = self._inlined.get(self._calls.current)
        if inlined:
            self._inlined[self._calls.current] = replace(inlined, steps=())
        given = tuple(outputs), tuple(grads)
        node = self._call_hook(HookKind.NODE_POST, user_code.call_node_post_hook, hook, *given)
        return self._calls.elements(node, [True] * len(outputs))

    def post_accumulate_hook(self, variable: Value, hook: int) -> None:
        self._call_hook(HookKind.POST_ACCUMULATE, user_code.call_post_accumulate_hook, hook, variable)

    def unpack(self, hook: int, packed: int) -> Value:
        kept = self._calls.placeholder(SourceKind.PACKED, packed)
        return self._call_hook(HookKind.UNPACK, user_code.unpack, hook, kept)

    # the end

    def finish(self, outputs: list[Value]) -> CacheEntry:
        graph, node_calls = self._calls.graph, tuple(self._calls.node_calls)
        graph.output(tuple(self._calls.captured(self._compiled.moved.get(value, value)) for value in outputs))
        backward = BackwardGraph(graph, node_calls, self._needs_engine_frame, self._inlined)
        return CacheEntry(self._finished(backward))
