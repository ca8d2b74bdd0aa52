"""Record one backward, as the engine walks it, into a `BackwardGraph`.

In: the calls of ``_torch.protocol`` (this is its `Recorder`), with FX nodes as values. Out: a
`BackwardGraph` in the order of the engine's walk. Nothing is computed, traced or compiled here, and no
tensor metadata is baked in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from retrograd.errors import CaptureError, Reason
from retrograd.graph.backward_graph import BackwardGraph, Call, NodeCall, Source, SourceKind
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.live.calls import copy_slices, functions, gradients, hooks, saved
from retrograd.live.calls.node_function import NodeFunction, OutputCheck

__all__ = ["BackwardRecorder"]

Value = fx.Node | None


class BackwardRecorder:
    """Records one backward.

    Args:
        finished: is given the `BackwardGraph`; what it returns is kept in the engine's cache.
    """

    def __init__(self, finished: Callable[[BackwardGraph], Any]) -> None:
        self._finished = finished
        self._graph = fx.Graph()
        self._node_calls: list[NodeCall] = []
        self._placeholders: dict[Source, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._before_hooks: dict[fx.Node, Value] = {}
        self._executed: set[int] = set()
        self._needs_engine_frame = False

    # placeholders

    def begin(self, inputs: int, sizes: int, scalars: int) -> tuple[list[Value], list[Value], list[Value]]:
        counts = (inputs, sizes, scalars)
        kinds = zip((SourceKind.INPUT, SourceKind.SIZE, SourceKind.SCALAR), counts, strict=True)
        values = [[self._placeholder(kind, i) for i in range(count)] for kind, count in kinds]
        return values[0], values[1], values[2]

    def _placeholder(self, kind: SourceKind, index: int) -> Value:
        source = Source(kind, index)
        if source not in self._placeholders:
            after = self._last_placeholder
            point = self._graph.inserting_after(after) if after else self._graph.inserting_before()
            with point:
                node = self._graph.placeholder(f"{kind.value}_{index}")
            node.meta["source"] = source
            self._placeholders[source] = self._last_placeholder = node
        return self._placeholders[source]

    # calls

    def enter_node(self, index: int, name: str) -> None:
        while len(self._node_calls) < index:
            self._node_calls.append(NodeCall(len(self._node_calls), ""))
        self._node_calls.append(NodeCall(index, name))

    def _call(
        self, kind: CallKind, target: Callable[..., Any], args: tuple[Any, ...], hook: HookKind | None = None
    ) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["call"] = Call(kind, self._node_calls[-1].index, hook)
        return node

    def _elements(self, result: fx.Node, wanted: Sequence[bool]) -> list[Value]:
        return [
            self._call(CallKind.PROJECT, operator.getitem, (result, i)) if want else None
            for i, want in enumerate(wanted)
        ]

    def _execute(self) -> None:
        self._executed.add(self._node_calls[-1].index)

    def node(
        self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]
    ) -> list[Value]:
        self._execute()
        result = self._call(CallKind.NODE, NodeFunction(name, fn), (grads, *args))
        return self._elements(result, wanted)

    def cpp_function(
        self, name: str, fn: Callable[..., Any], grads: list[Value], args: Any, wanted: list[bool]
    ) -> list[Value]:
        self._execute()
        result = self._call(CallKind.CPP_FUNCTION, NodeFunction(name, fn), (grads, *args))
        return self._elements(result, wanted)

    def validate(self, fn: Callable[..., Any], outputs: list[Value], args: Any) -> list[Value]:
        check = OutputCheck(fn, self._node_calls[-1].name)
        result = self._call(CallKind.VALIDATE, check, (outputs, *args))
        return self._elements(result, [value is not None for value in outputs])

    def copy_slices_prologue(self, grads: list[Value], base: Any, view: Any) -> list[Value]:
        self._execute()
        result = self._call(CallKind.COPY_SLICES, copy_slices.prologue, (grads[0], base, view))
        return self._elements(result, [True, True, True])

    def copy_slices_epilogue(
        self, needs: list[bool], result: Value, grads: list[Value], grad_slice: Value
    ) -> list[Value]:
        args = (tuple(needs), result, grads, grad_slice)
        return self._elements(self._call(CallKind.COPY_SLICES, copy_slices.epilogue, args), needs)

    def function(
        self,
        context: int,
        grads: list[Value],
        saved_values: list[Value],
        wanted: list[bool],
        zeros: tuple[Any, ...],
    ) -> list[Value]:
        self._execute()
        if any(_is_packed(value) for value in saved_values):
            raise CaptureError(self._packed_reason())
        ctx = self._placeholder(SourceKind.HOOK, context)
        args = (ctx, grads, saved_values, tuple(wanted), zeros)
        return self._elements(self._call(CallKind.FUNCTION, functions.call_backward, args), wanted)

    def _packed_reason(self) -> Reason:
        call = self._node_calls[-1]
        return Reason(
            "function-behind-unpack-hooks",
            "an autograd.Function whose saved tensors are behind unpack hooks: "
            "the engine does not tell whether they require grad",
            "live.capture",
            node=f"{call.name} (node call {call.index})",
            way_out="save its tensors outside of saved_tensors_hooks",
        )

    def add(self, old: Value, new: Value) -> Value:
        if isinstance(old, fx.Node) and old.target is gradients.sum_gradients:
            return self._call(CallKind.SUM, gradients.sum_gradients, (*old.args, new))
        return self._call(CallKind.SUM, gradients.sum_gradients, (old, new))

    def accumulate(self, variable: Value, grad: Value, has_post_hooks: bool) -> Value:
        self._execute()
        self._call(CallKind.ACCUMULATE, gradients.accumulate_grad, (variable, grad, has_post_hooks))
        return variable

    # hooks

    def tensor_hook(self, kind: HookKind, grads: list[Value], hook: int, slot: int) -> list[Value]:
        if kind is HookKind.RETAIN_GRAD:
            self._needs_engine_frame = True
            node = self._call(CallKind.HOOK, hooks.call_cpp_tensor_hook, (hook, grads[slot]), kind)
        else:
            args = (self._placeholder(SourceKind.HOOK, hook), grads[slot])
            node = self._call(CallKind.HOOK, hooks.call_tensor_hook, args, kind)
        self._before_hooks[node] = grads[slot]
        return [node if i == slot else grad for i, grad in enumerate(grads)]

    def node_pre_hook(self, grads: list[Value], hook: int) -> list[Value]:
        args = (self._placeholder(SourceKind.HOOK, hook), tuple(grads))
        node = self._call(CallKind.HOOK, hooks.call_node_pre_hook, args, HookKind.NODE_PRE)
        return self._elements(node, [True] * len(grads))

    def node_post_hook(self, outputs: list[Value], grads: list[Value], hook: int) -> list[Value]:
        args = (self._placeholder(SourceKind.HOOK, hook), tuple(outputs), tuple(grads))
        node = self._call(CallKind.HOOK, hooks.call_node_post_hook, args, HookKind.NODE_POST)
        return self._elements(node, [True] * len(outputs))

    def post_accumulate_hook(self, variable: Value, hook: int) -> None:
        args = (self._placeholder(SourceKind.HOOK, hook), variable)
        self._call(CallKind.HOOK, hooks.call_post_accumulate_hook, args, HookKind.POST_ACCUMULATE)

    def unpack(self, hook: int, packed: int) -> Value:
        args = (self._placeholder(SourceKind.HOOK, hook), self._placeholder(SourceKind.PACKED, packed))
        return self._call(CallKind.HOOK, saved.unpack, args, HookKind.UNPACK)

    # the end

    def finish(self, outputs: list[Value]) -> Any:
        self._graph.output(tuple(self._captured(value) for value in outputs))
        node_calls = tuple(self._node_calls)
        return self._finished(BackwardGraph(self._graph, node_calls, self._needs_engine_frame))

    def _captured(self, value: Value) -> Value:
        """What ``autograd.grad`` returns for an input of a node that is also executed: the gradient
        before the tensor hooks (``Engine::evaluate_function`` captures it there); after them if not."""
        while (
            value in self._before_hooks
            and isinstance(value, fx.Node)
            and value.meta["call"].node_call in self._executed
        ):
            value = self._before_hooks[value]
        return value


def _is_packed(value: Value) -> bool:
    return value is not None and value.target is saved.unpack
