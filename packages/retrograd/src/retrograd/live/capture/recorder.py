"""Record one backward, as the engine walks it, into a `BackwardGraph`.

In: the calls of ``_torch.autograd.protocol``, with FX nodes as values: lists of them are gradients, and None
is an undefined one. Out: a `BackwardGraph` in the order of the engine's walk. Nothing is computed, traced or
compiled here, and no tensor metadata is baked in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.autograd import Kept
from retrograd.graph.aot_backward import AotBackward, AotCall, InlinedCall
from retrograd.graph.backward_graph import BackwardGraph, Call, CallKind, HookKind, NodeCall, SourceKind
from retrograd.live.calls import copy_slices, functions, gradients, hooks, saved
from retrograd.live.calls.node_function import NodeFunction, OutputCheck
from retrograd.live.capture.call_graph import CallGraph, Value
from retrograd.live.inlined.recorder import CompiledFunctions


class BackwardRecorder:
    """Records one backward.

    Args:
        finished: is given the `BackwardGraph`; what it returns is kept in the engine's cache.
        graph_is_kept: whether the nodes will still have their saved tensors when the plan runs.
    """

    def __init__(self, finished: Callable[[BackwardGraph], Any], graph_is_kept: bool = True) -> None:
        self._finished = finished
        self._graph_is_kept = graph_is_kept
        self._calls = CallGraph()
        self._compiled = CompiledFunctions(self._calls)
        self._executed: set[int] = set()
        self._inlined: dict[int, InlinedCall] = {}
        self._needs_engine_frame = False
        self._functions: dict[str, NodeFunction] = {}
        self._checks: dict[str, OutputCheck] = {}

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

    def _function(self, name: str, fn: Callable[..., Any]) -> NodeFunction:
        """One object for all calls of a kind of node: the engine binds each name once."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = NodeFunction(name, fn)
        return function

    def _check(self, fn: Callable[..., Any]) -> OutputCheck:
        """One object for all checks of a kind of node."""
        name = self._calls.node_calls[-1].name
        check = self._checks.get(name)
        if check is None:
            check = self._checks[name] = OutputCheck(fn, name)
        return check

    def _execute(self) -> None:
        self._executed.add(self._calls.current)

    def node(
        self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]
    ) -> list[Value]:
        self._execute()
        result = self._calls.call(CallKind.NODE, self._function(name, fn), (grads, *args))
        return self._calls.elements(result, wanted)

    def cpp_function(
        self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]
    ) -> list[Value]:
        self._execute()
        result = self._calls.call(CallKind.CPP_FUNCTION, self._function(name, fn), (grads, *args))
        return self._calls.elements(result, wanted)

    def validate(self, fn: Callable[..., Any], outputs: list[Value], args: Any) -> list[Value]:
        check = self._check(fn)
        inlined = self._inlined.get(self._calls.current)
        if inlined is None:
            result = self._calls.call(CallKind.VALIDATE, check, (outputs, *args))
            return self._calls.elements(result, [value is not None for value in outputs])
        checked: list[Value] = [None] * len(outputs)
        for step, slots in enumerate(inlined.steps):
            given = [value if i in slots else None for i, value in enumerate(outputs)]
            if any(value is not None for value in given):
                call = Call(CallKind.VALIDATE, self._calls.current, step=step)
                result = self._calls.add(call, check, (given, *args))
                for i, value in enumerate(self._calls.elements(result, [v is not None for v in given], step)):
                    checked[i] = checked[i] if value is None else value
        return checked

    def copy_slices_prologue(self, grads: list[Value], base: Any, view: Any) -> list[Value]:
        self._execute()
        result = self._calls.call(CallKind.COPY_SLICES, copy_slices.prologue, (grads[0], base, view))
        return self._calls.elements(result, [True, True, True])

    def copy_slices_epilogue(
        self, needs: list[bool], result: Value, grads: list[Value], grad_slice: Value
    ) -> list[Value]:
        args = (tuple(needs), result, grads, grad_slice)
        return self._calls.elements(self._calls.call(CallKind.COPY_SLICES, copy_slices.epilogue, args), needs)

    def function(
        self,
        context: int,
        grads: list[Value],
        saved_values: list[Value],
        wanted: list[bool],
        zeros: tuple[Any, ...],
        note: str = "",
    ) -> list[Value]:
        self._execute()
        ctx = self._calls.placeholder(SourceKind.HOOK, context)
        if any(_is_packed(value) for value in saved_values):
            return self._kept_function(ctx, grads, saved_values, wanted, zeros)
        args = (ctx, grads, saved_values, tuple(wanted), zeros)
        return self._calls.elements(
            self._calls.call(CallKind.FUNCTION, functions.call_backward, args, note=note), wanted
        )

    def aot_backward(self, aot: AotBackward, call: AotCall) -> list[Value]:
        """Lay the graph of a compiled function in. Raises `Refusal` if it has to stay one call."""
        gradients, inlined = self._compiled.lay_in(aot, call)
        self._execute()
        if inlined.leaves_a_part and not self._graph_is_kept:
            raise GraphNeededError(self._calls.current)
        self._inlined[self._calls.current] = inlined
        return gradients

    def _kept_function(
        self,
        ctx: Value,
        grads: list[Value],
        saved_values: list[Value],
        wanted: list[bool],
        zeros: tuple[Any, ...],
    ) -> list[Value]:
        """Only the Function itself can unpack its saved tensors, as what they were and when it wants them."""
        if not self._graph_is_kept:
            raise GraphNeededError(self._calls.current)
        packed = [value.args if _is_packed(value) else value for value in saved_values]  # type: ignore[union-attr]
        for value in saved_values:
            if value is not None and _is_packed(value):
                self._calls.graph.erase_node(value)
        args = (ctx, grads, tuple(wanted), zeros, packed)
        return self._calls.elements(
            self._calls.call(CallKind.FUNCTION, functions.call_kept_backward, args), wanted
        )

    def add(self, old: Value, new: Value) -> Value:
        if isinstance(old, fx.Node) and old.target is gradients.sum_gradients:
            return self._calls.call(CallKind.SUM, gradients.sum_gradients, (*old.args, new))
        return self._calls.call(CallKind.SUM, gradients.sum_gradients, (old, new))

    def accumulate(self, variable: Value, grad: Value, has_post_hooks: bool) -> Value:
        self._execute()
        self._calls.call(CallKind.ACCUMULATE, gradients.accumulate_grad, (variable, grad, has_post_hooks))
        return variable

    # hooks

    def tensor_hook(self, kind: HookKind, grad: Value, hook: int) -> Value:
        call = Call(CallKind.HOOK, self._calls.current, kind)
        if kind is HookKind.RETAIN_GRAD:
            self._needs_engine_frame = True
            return self._calls.tensor_hook(call, hooks.call_cpp_tensor_hook, hook, grad)
        own = self._calls.placeholder(SourceKind.HOOK, hook)
        return self._calls.tensor_hook(call, hooks.call_tensor_hook, own, grad)

    def node_pre_hook(self, grads: list[Value], hook: int) -> list[Value]:
        args = (self._calls.placeholder(SourceKind.HOOK, hook), tuple(grads))
        node = self._calls.call(CallKind.HOOK, hooks.call_node_pre_hook, args, HookKind.NODE_PRE)
        # A hook cannot replace an undefined gradient.
        return self._calls.elements(node, [grad is not None for grad in grads])

    def node_post_hook(self, outputs: list[Value], grads: list[Value], hook: int) -> list[Value]:
        # It is given all gradients of its node together: there is nothing to deliver one by one.
        inlined = self._inlined.get(self._calls.current)
        if inlined:
            self._inlined[self._calls.current] = replace(inlined, steps=())
        args = (self._calls.placeholder(SourceKind.HOOK, hook), tuple(outputs), tuple(grads))
        node = self._calls.call(CallKind.HOOK, hooks.call_node_post_hook, args, HookKind.NODE_POST)
        return self._calls.elements(node, [True] * len(outputs))

    def post_accumulate_hook(self, variable: Value, hook: int) -> None:
        args = (self._calls.placeholder(SourceKind.HOOK, hook), variable)
        self._calls.call(CallKind.HOOK, hooks.call_post_accumulate_hook, args, HookKind.POST_ACCUMULATE)

    def unpack(self, hook: int, packed: int) -> Value:
        args = (
            self._calls.placeholder(SourceKind.HOOK, hook),
            self._calls.placeholder(SourceKind.PACKED, packed),
        )
        return self._calls.call(CallKind.HOOK, saved.unpack, args, HookKind.UNPACK)

    # the end

    def finish(self, outputs: list[Value]) -> Kept:
        self._calls.graph.output(tuple(self._captured(value) for value in outputs))
        node_calls = tuple(self._calls.node_calls)
        graph = self._calls.graph
        backward = BackwardGraph(graph, node_calls, self._needs_engine_frame, self._inlined)
        return Kept(self._finished(backward))

    def _captured(self, value: Value) -> Value:
        """What ``autograd.grad`` returns for an input of a node that is also executed: the gradient
        before the tensor hooks (``Engine::evaluate_function`` captures it there); after them if not."""
        if value is not None:
            value = self._compiled.moved.get(value, value)
        while (
            value in self._calls.before_hooks
            and isinstance(value, fx.Node)
            and value.meta["call"].node_call in self._executed
        ):
            value = self._calls.before_hooks[value]
        return value


def _is_packed(value: Value) -> bool:
    return value is not None and value.target is saved.unpack


class GraphNeededError(Exception):
    """A node call needs the autograd node itself when the plan runs: collect again, with the graph kept."""

    def __init__(self, node_call: int) -> None:
        super().__init__(f"node call {node_call} needs the autograd graph")
        self.node_call = node_call
