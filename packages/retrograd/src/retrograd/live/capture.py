"""Record one backward, as the engine walks it, into a `BackwardGraph`.

In: the calls of ``_torch.protocol`` (this is its `Recorder`), with FX nodes as values. Out: a
`BackwardGraph` in the order of the engine's walk. Nothing is computed, traced or compiled here, and no
tensor metadata is baked in.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.aot_functions import tensors_on_context
from retrograd.graph.aot_backward import AotBackward, AotCall, NotInlinedError
from retrograd.graph.backward_graph import BackwardGraph, Call, NodeCall, Source, SourceKind
from retrograd.graph.hook_kind import CallKind, HookKind
from retrograd.live.calls import copy_slices, functions, gradients, hooks, saved
from retrograd.live.calls.node_function import NodeFunction, OutputCheck
from retrograd.live.inlining import Arriving, inline

__all__ = ["BackwardRecorder", "GraphNeededError"]

Value = fx.Node | None
_LateHook = Callable[[Value, int], fx.Node]


class BackwardRecorder:
    """Records one backward.

    Args:
        finished: is given the `BackwardGraph`; what it returns is kept in the engine's cache.
        graph_is_kept: whether the nodes will still have their saved tensors when the plan runs.
    """

    def __init__(self, finished: Callable[[BackwardGraph], Any], graph_is_kept: bool = True) -> None:
        self._finished = finished
        self._graph_is_kept = graph_is_kept
        self._graph = fx.Graph()
        self._node_calls: list[NodeCall] = []
        self._placeholders: dict[Source, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None
        self._before_hooks: dict[fx.Node, Value] = {}
        self._executed: set[int] = set()
        self._inlined: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._totals: dict[tuple[int, int], Value] = {}
        self._consumed: dict[tuple[int, int | None], frozenset[float]] = {}
        self._intact: set[int] = set()
        self._moved: dict[Value, Value] = {}
        self._aot_names: Counter[str] = Counter()
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
        self,
        kind: CallKind,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        hook: HookKind | None = None,
        step: int = 0,
        note: str = "",
    ) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["call"] = Call(kind, self._node_calls[-1].index, hook, step, note)
        return node

    def _elements(self, result: fx.Node, wanted: Sequence[bool], step: int = 0) -> list[Value]:
        return [
            self._call(CallKind.PROJECT, operator.getitem, (result, i), step=step) if want else None
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
        checked: list[Value] = [None] * len(outputs)
        for step, slots in enumerate(self._inlined.get(self._node_calls[-1].index, (range(len(outputs)),))):
            given = [value if i in slots else None for i, value in enumerate(outputs)]
            if any(value is not None for value in given):
                result = self._call(CallKind.VALIDATE, check, (given, *args), step=step)
                for i, value in enumerate(self._elements(result, [v is not None for v in given], step)):
                    checked[i] = checked[i] if value is None else value
        return checked

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
        note: str = "",
    ) -> list[Value]:
        self._execute()
        ctx = self._placeholder(SourceKind.HOOK, context)
        if any(_is_packed(value) for value in saved_values):
            return self._kept_function(ctx, grads, saved_values, wanted, zeros)
        args = (ctx, grads, saved_values, tuple(wanted), zeros)
        return self._elements(self._call(CallKind.FUNCTION, functions.call_backward, args, note=note), wanted)

    def aot_backward(self, aot: AotBackward, call: AotCall) -> list[Value]:
        """Lay the graph of a compiled function in. Raises `NotInlinedError` if it has to stay one call."""
        if call.zeros is None and any(map(_may_be_undefined, call.grads)):
            raise NotInlinedError("a gradient may be undefined, and its sizes are not known")
        bare, tensor_hooks = self._without_tensor_hooks(call.grads)
        kept = self._tensors_on_context(call.context, aot.kept_on_context)
        objects = [self._placeholder(SourceKind.HOOK, index) for index in call.objects]
        saved_values = [*call.sizes, *call.saved, *kept, *objects]
        arriving = Arriving(bare, saved_values, tensor_hooks, call.wanted, call.zeros)
        try:
            inlined = inline(self._numbered(aot), arriving, self._emit)
        except NotInlinedError:
            for node in kept:
                self._graph.erase_node(node)
            raise
        self._execute()
        self._erase_moved_hooks(call.grads, bare)
        here = self._node_calls[-1].index
        if inlined.leaves_a_part and not self._graph_is_kept:
            raise GraphNeededError(here)
        self._consumed[here, None] = inlined.consumed
        self._consumed.update({(here, slot): keys for slot, keys in inlined.consumed_for.items()})
        if inlined.leaves_a_part:
            self._intact.add(here)
        tensors = (i for i, is_tensor in enumerate(call.wanted) if is_tensor)
        edges = {i: edge for edge, i in enumerate(tensors)}
        self._inlined[here] = tuple(tuple(edges[i] for i in step if i in edges) for step in inlined.steps)
        self._totals.update({(here, slot): value for slot, value in inlined.totals.items()})
        return inlined.gradients

    def _numbered(self, aot: AotBackward) -> AotBackward:
        """A graph that is met again in one backward has its nodes named ``aot3_1_…``."""
        number = self._aot_names[aot.name]
        self._aot_names[aot.name] += 1
        return replace(aot, name=f"{aot.name}_{number}") if number else aot

    def _emit(
        self,
        kind: CallKind,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        step: int = 0,
    ) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        node.meta["call"] = Call(kind, self._node_calls[-1].index, None, step)
        return node

    def _tensors_on_context(self, context: int, count: int) -> list[fx.Node]:
        if not count:
            return []
        args = (self._placeholder(SourceKind.HOOK, context),)
        result = self._call(CallKind.AOT_SAVED, tensors_on_context, args)
        return [node for node in self._elements(result, [True] * count) if node is not None]

    def _without_tensor_hooks(self, grads: Sequence[Value]) -> tuple[list[Value], list[list[_LateHook]]]:
        """The gradients before their tensor hooks, and the hooks, to be called later."""
        bare: list[Value] = []
        late: list[list[_LateHook]] = []
        for grad in grads:
            chain: list[fx.Node] = []
            while grad is not None and _is_hook(grad, HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD):
                chain.append(grad)
                grad = self._before_hooks[grad]
            bare.append(grad)
            late.append([functools.partial(self._hook_again, node) for node in reversed(chain)])
        return bare, late

    def _hook_again(self, hook: fx.Node, value: Value, step: int) -> fx.Node:
        """Call the hook of `hook` with `value` instead."""
        target = hook.target if value is not None else hooks.call_hook_of_unreached
        assert callable(target)
        node = self._call(CallKind.HOOK, target, (hook.args[0], value), hook.meta["call"].hook, step)
        self._before_hooks[node] = value
        return node

    def _erase_moved_hooks(self, grads: Sequence[Value], bare: list[Value]) -> None:
        for grad, before in zip(grads, bare, strict=True):
            while grad is not None and grad is not before:
                self._moved[grad] = before
                earlier = self._before_hooks.pop(grad)
                self._graph.erase_node(grad)
                grad = earlier

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
            raise GraphNeededError(self._node_calls[-1].index)
        packed = [value.args if _is_packed(value) else value for value in saved_values]  # type: ignore[union-attr]
        for value in saved_values:
            if value is not None and _is_packed(value):
                self._graph.erase_node(value)
        args = (ctx, grads, tuple(wanted), zeros, packed)
        return self._elements(self._call(CallKind.FUNCTION, functions.call_kept_backward, args), wanted)

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
        # A hook cannot replace an undefined gradient.
        return self._elements(node, [grad is not None for grad in grads])

    def node_post_hook(self, outputs: list[Value], grads: list[Value], hook: int) -> list[Value]:
        # It is given all gradients of its node together: there is nothing to deliver one by one.
        self._inlined.pop(self._node_calls[-1].index, None)
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
        return self._finished(
            BackwardGraph(
                self._graph,
                node_calls,
                self._needs_engine_frame,
                self._inlined,
                self._totals,
                self._consumed,
                frozenset(self._intact),
            )
        )

    def _captured(self, value: Value) -> Value:
        """What ``autograd.grad`` returns for an input of a node that is also executed: the gradient
        before the tensor hooks (``Engine::evaluate_function`` captures it there); after them if not."""
        value = self._moved.get(value, value)
        while (
            value in self._before_hooks
            and isinstance(value, fx.Node)
            and value.meta["call"].node_call in self._executed
        ):
            value = self._before_hooks[value]
        return value


def _is_packed(value: Value) -> bool:
    return value is not None and value.target is saved.unpack


def _is_hook(value: Value, *kinds: HookKind) -> bool:
    """Whether `value` comes from a hook of one of `kinds`."""
    if value is None or value.op != "call_function":
        return False
    call = value.meta["call"]
    source = value.args[0] if call.kind is CallKind.PROJECT else value
    return isinstance(source, fx.Node) and source.op == "call_function" and source.meta["call"].hook in kinds


def _may_be_undefined(value: Any) -> bool:
    """Whether a gradient may be None when it is there: user code made it."""
    if value is None or value.op != "call_function":
        return False
    kind = value.meta["call"].kind
    if value.meta["call"].hook in (HookKind.TENSOR_PRE, HookKind.RETAIN_GRAD):
        return _may_be_undefined(value.args[1])  # such a hook cannot make it so
    if kind is CallKind.SUM:
        return all(map(_may_be_undefined, value.all_input_nodes))
    if kind is CallKind.PROJECT:
        source, i = value.args
        validated = source.meta["call"].kind is CallKind.VALIDATE
        return _may_be_undefined(source.args[0][i] if validated else source)
    return kind in (CallKind.FUNCTION, CallKind.CPP_FUNCTION, CallKind.HOOK)


class GraphNeededError(Exception):
    """A node call needs the autograd node itself when the plan runs: collect again, with the graph kept."""

    def __init__(self, node_call: int) -> None:
        super().__init__(f"node call {node_call} needs the autograd graph")
        self.node_call = node_call
